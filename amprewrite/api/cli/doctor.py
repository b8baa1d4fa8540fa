"""The command `amprewrite doctor`: report versions and speeds of this machine, and check a small model. Paste its output into bug reports.

1. Versions of the packages that amprewrite is built on or works with.
2. For each device and low format: the measured speed of a matrix product, and whether the device table lists the format.
3. Kernels: whether there is Triton, and whether fused optimizers can skip overflowed steps without a wait for the device.
4. Self-check: a small model in each low format. Results, capture and gradients are compared with fp32, and a step with overflowed
   gradients must be skipped. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from amprewrite.api.cli.models import UsageError
from amprewrite.api.cli.output import as_json, say, table
from amprewrite.api.rewrite import rewrite
from amprewrite.runtime.compiler.capture_check import relative_error
from amprewrite.tables.devices import best_format, device_row
from amprewrite.tables.errors import one_line
from amprewrite.tables.extras import load_extra
from amprewrite.tables.formats import FP32, LOW_FORMATS, Format
from amprewrite.tables.version import VERSION

PACKAGES = ("torch", "numpy", "networkx", "scipy", "triton", "onnx", "onnxruntime", "transformers", "accelerate", "lightning", "peft")
_SIDE = {"cpu": 384, "cuda": 4096}
"""Side of the square matrices of the timed product, by type of device."""
_ROOM = 16
"""Largest relative error that the self-check allows, in eps of the low format."""


@dataclass(frozen=True)
class Gain:
    """The speed of one low format on one device."""

    device: str
    format: str
    speed: float
    """Speed of a matrix product relative to fp32; above 1 is faster."""
    note: str
    """Whether the device has matrix units for the format, in words."""


@dataclass(frozen=True)
class Check:
    """Result of one check that the command `doctor` makes on a small model."""

    device: str
    format: str
    what: str
    """Name of the check, such as "gradients"."""
    ok: bool
    found: str
    """The measured error or the fault, in words."""


def doctor(options: argparse.Namespace) -> int:
    """Print the report on versions, speeds, kernels and self-checks. Return status 1 if a self-check failed, otherwise 0."""
    began = time.perf_counter()
    devices = [_at_hand(options.run_on)] if options.run_on else _devices()
    versions, kernels = dict(_versions()), dict(_kernels(devices))
    gains = [gain for device in devices for gain in _gains(device)]
    checks = [check for device in devices for row in LOW_FORMATS for check in _checks(device, row, options.device)]
    failed = not all(check.ok for check in checks)
    if options.json:
        as_json({"versions": versions, "gains": [asdict(g) for g in gains], "kernels": kernels, "checks": [asdict(c) for c in checks]})
        return int(failed)
    say(table(("version", ""), versions.items()))
    say([("", "")])
    say(table(("device", "format", "speed", ""), [(g.device, g.format, f"{g.speed:.3g} x fp32", g.note) for g in gains]))
    say([("", "")])
    say(table(("kernels", ""), kernels.items()))
    say([("", "")])
    rows = [(c.device, c.format, c.what, "ok" if c.ok else "FAILED", c.found) for c in checks]
    say(table(("device", "format", "self-check", "", ""), rows, ["" if c.ok else "bad" for c in checks]))
    say([("note", f"{len(checks)} checks in {time.perf_counter() - began:.0f} s; a failed one is a bug: report it with this text")])
    return int(failed)


def _devices() -> list[str]:
    return ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]


def _versions() -> Iterator[tuple[str, str]]:
    yield "amprewrite", VERSION
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"
    yield "CUDA", str(torch.version.cuda or torch.version.hip or "none in this build of torch")


def _at_hand(device: str) -> str:
    """Return `device` if this machine has it, such as "cpu", "cuda" or "cuda:1". Raises UsageError otherwise."""
    if device not in ("cuda" if torch.cuda.is_available() else "", *_devices()):
        raise UsageError(f"--run-on {device}: doctor checks {', '.join(_devices())} here")
    return device


def _kernels(devices: list[str]) -> Iterator[tuple[str, str]]:
    if not torch.cuda.is_available():
        yield "Triton", "not used: it serves CUDA devices, and there is none"
    else:
        yield "Triton", "used for fp8 copies" if find_spec("triton") is not None else "missing: eager graphs run no product in fp8"
    for device in devices:
        weight = nn.Parameter(torch.zeros(2, device=device))
        try:
            torch.optim.AdamW([weight], fused=True)
            yield f"fused AdamW on {device}", "there: it skips overflowing steps without a wait for the device"
        except RuntimeError as error:
            yield f"fused AdamW on {device}", f"missing ({one_line(error, 80)}): a step reads one number back"


def _gains(device: str) -> Iterator[Gain]:
    row = device_row(device)
    best, plain = best_format(row), _seconds_of_product(device, FP32)
    for low in LOW_FORMATS:
        if low is best:
            note = "dtype=None takes this"
        elif low.name in row.low_formats:
            note = f"its matrix units have {low.name}"
        else:
            note = f"{row.name}: no matrix units for {low.name}"
        yield Gain(device, low.name, plain / _seconds_of_product(device, low), note)


def _seconds_of_product(device: str, row: Format) -> float:
    """Return the seconds that a square matrix product takes in the format `row`: the shortest of several runs."""
    side = _SIDE[torch.device(device).type]
    x = torch.randn(side, side, device=device).to(row.dtype)
    return min(Timer("x @ x", globals={"x": x}, num_threads=torch.get_num_threads()).blocked_autorange(min_run_time=0.02).times)


class _Small(nn.Module):
    """A small model for the self-check: a residual block with attention, whose ops run partly in the low format and partly in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inner(self.norm(x)).chunk(3, -1)
        x = x + self.outer(nn.functional.scaled_dot_product_attention(query, key, value))
        return torch.logsumexp(nn.functional.gelu(x), -1)


def _checks(device: str, low: Format, planned_for: str | None) -> Iterator[Check]:
    """Yield checks of results, capture, gradients and an overflowed step, in the format `low` on `device`.

    The model is planned for the device `planned_for`; None plans for `device`. An exception becomes a failed check.
    """
    with torch.random.fork_rng(devices=[] if device == "cpu" else [device]):
        torch.manual_seed(0)
        model, x = _Small().to(device), torch.randn(4, 16, 32, device=device)
    room = _ROOM * torch.finfo(low.dtype).eps
    try:
        exact = model(x)
        wanted = torch.autograd.grad(exact.mean(), list(model.parameters()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        amp: Any = rewrite(model, dtype=low, loss_scale=2.0**10, optimizer=optimizer, strict=True, device=planned_for)
        result = amp(x)
        error = relative_error([result.detach()], [exact.detach()])
        yield Check(device, low.name, "results", error < room and result.dtype is FP32.dtype, f"relative error {error:.1e}")
        report = load_extra("accuracy", "doctor").verify(amp, (x,))
        found = f"relative error {report.capture_error} in fp32, from {report.parted} on"
        yield Check(device, low.name, "capture", same := report.capture_error == 0, "changes nothing in fp32" if same else found)
        result.mean().backward()
        error = relative_error([p.grad for p in model.parameters() if p.grad is not None], list(wanted))
        yield Check(device, low.name, "gradients", error < room, f"relative error {error:.1e}")
        before = [p.detach().clone() for p in model.parameters()]
        (amp(x) * float("inf")).mean().backward()
        optimizer.step()
        kept = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        skipped = kept and amp.loss_scale.report().skipped == 1
        yield Check(device, low.name, "overflow", skipped, "the step was skipped" if skipped else "the step was not skipped")
    except Exception as error:  # the report must show any failure on a user's machine
        yield Check(device, low.name, "ran to the end", False, f"{type(error).__name__}: {one_line(error)}")
