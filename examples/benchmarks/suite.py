"""A training step and a forward pass of nine networks, in every way there is to run them, timed in turns in one process.

    python examples/benchmarks/suite.py [--quick] [--minutes 8] [--only bert,gpt2] [--dtypes bf16,fp16] [--out results.json]

    fp32, tf32          the model as it is; with TF32 matmuls (CUDA)
    autocast            torch.autocast, with torch.amp.GradScaler in fp16
    ours                amprewrite.rewrite, eager
    half                the limit: model, inputs and optimizer wholly in the low format, nothing kept in fp32
    ...+inductor        the same three through torch.compile

Every way has its own copy of the model and its own AdamW. All take turns, so that what else the machine does hits all of them; the
table gives medians of ratios within a turn. A step counts only if its loss agrees with fp32's. Memory on CUDA is the peak over a
step; saved bytes are the tensors that autograd keeps from forward for backward, parameters aside. JSON holds all figures.

Rows that cannot be had within `--minutes` (8 with --quick) are named and left out; what matters most comes first.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from casts_vs_autocast import Casts
from nets import NETS, Made, console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import amprewrite

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = 0.05
"""How far the first loss may lie from fp32's, relative: all ways agree far better, a wrong one does not."""
EAGER = ("fp32", "tf32", "autocast", "ours", "half")
COMPILED = ("fp32+inductor", "autocast+inductor", "ours+inductor", "half+inductor")


@dataclass(frozen=True)
class Job:
    """A row to measure."""

    net: str
    batch: int
    dtype: str
    ways: tuple[str, ...]

    @property
    def compiled(self) -> bool:
        return any("+" in name for name in self.ways)

    def __str__(self) -> str:
        return f"{self.net} at batch {self.batch} in {self.dtype}{' through inductor' if self.compiled else ''}"


@dataclass
class Way:
    """One way to run a net: its step, its forward pass, and what was measured of them."""

    name: str
    forward: Callable[[], Tensor]
    step: Callable[[], Tensor]
    model: nn.Module
    persistent: int = 0
    """Bytes on the device that stay between steps."""
    loss: float = math.nan
    casts: int | None = None
    saved: int | None = None
    peak: int | None = None
    steps: list[float] = field(default_factory=list)
    forwards: list[float] = field(default_factory=list)


def way(name: str, net: Made, dtype: torch.dtype, device: torch.device) -> Way:
    """Build one way from the pristine model and inputs."""
    kind, compiled = name.partition("+")[0], name.endswith("+inductor")
    model, inputs = copy.deepcopy(net[0]).to(device), {key: x.to(device) for key, x in net[1].items()}
    scaler, context = None, contextlib.nullcontext
    run: Any = model
    if kind == "half":
        model.to(dtype)
        inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}
    if kind == "autocast":
        context = lambda: torch.autocast(device.type, dtype)  # type: ignore[assignment]  # noqa: E731
        scaler = torch.amp.GradScaler(device.type) if dtype == torch.float16 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if kind == "ours":
        run = amprewrite.rewrite(model, dtype=dtype, optimizer=optimizer, backend="inductor" if compiled else "eager")
    elif compiled:
        run = torch.compile(model)

    def forward() -> Tensor:
        with context():
            loss: Tensor = run(**inputs)
        return loss

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss

    return Way(name, forward, step, model)


@contextlib.contextmanager
def matmuls_of(name: str) -> Any:
    """TF32 on for `tf32` only: PyTorch's default leaves it off for matmuls and on for cuDNN."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    sync(device)
    start = time.perf_counter()
    call()
    sync(device)
    return time.perf_counter() - start


def saved_bytes(each: Way) -> int:
    """Bytes that autograd keeps from forward for backward, each storage once, parameters and buffers aside."""
    known = {t.untyped_storage().data_ptr() for t in (*each.model.parameters(), *each.model.buffers())}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(x.detach())  # no storage is freed and its address used again while we count
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = each.forward()
    del loss
    return sum(kept.values())


def measure(name: str, batch: int, full: bool, dtype: str, names: tuple[str, ...], device: torch.device, rounds: int) -> list[Way]:
    torch.manual_seed(0)
    net = NETS[name].make(full, batch)
    net[0].train()
    ways = []
    for each in names:
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        with matmuls_of(each):
            made = way(each, net, DTYPES[dtype], device)
            made.loss = float(made.step())
            for _ in range(2):  # scale searches, fused optimizers' state, autotuning
                made.step()
            with torch.no_grad():
                made.forward()
            if device.type == "cuda":
                for p in made.model.parameters():
                    p.grad = None
                made.persistent = torch.cuda.memory_allocated(device) - before
        if ways and not abs(made.loss - ways[0].loss) <= TOLERANCE * max(abs(ways[0].loss), 1e-3):
            raise SystemExit(f"{name}, {each}: the first loss is {made.loss:.5g}, fp32's is {ways[0].loss:.5g}")
        ways.append(made)
    for each in ways:
        if "+" not in each.name:
            with Casts() as casts:
                each.step()
            each.casts, each.saved = casts.count, saved_bytes(each)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            each.step()
            each.peak = each.persistent + torch.cuda.max_memory_allocated(device) - before
    for turn in range(rounds):
        for each in ways if turn % 2 == 0 else reversed(ways):
            with matmuls_of(each.name):
                each.steps.append(seconds(each.step, device))
                with torch.no_grad():
                    each.forwards.append(seconds(each.forward, device))
    return ways


def ratio(over: list[float], under: list[float]) -> float:
    """Median over the turns of how many times faster `under` is than `over`."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def row(name: str, batch: int, dtype: str, ways: list[Way]) -> dict[str, Any]:
    fields = {"net": name, "batch": batch, "dtype": dtype, "ways": {}}
    by_name = {each.name: each for each in ways}
    for each in ways:
        base = by_name.get("autocast+inductor" if "+" in each.name or "autocast" not in by_name else "autocast", by_name["fp32"])
        facts = {key: value for key, value in asdict_of(each).items() if value is not None}
        facts["step, ms"], facts["forward, ms"] = (1000 * statistics.median(times) for times in (each.steps, each.forwards))
        facts["items a second"] = batch / statistics.median(each.steps)
        facts["faster than autocast"] = ratio(base.steps, each.steps)
        facts["faster than fp32"] = ratio(by_name["fp32"].steps, each.steps)
        facts["forward faster than autocast"] = ratio(base.forwards, each.forwards)
        quartiles = statistics.quantiles((a / b for a, b in zip(base.steps, each.steps, strict=True)), n=4)
        facts["spread"] = quartiles[2] - quartiles[0]
        fields["ways"][each.name] = facts
    return fields


def asdict_of(each: Way) -> dict[str, Any]:
    return {key: getattr(each, key) for key in ("loss", "casts", "saved", "peak", "steps", "forwards")}


def table(rows: list[dict[str, Any]], compiled: bool) -> Table:
    shown = Table(title=f"{'compiled by inductor' if compiled else 'eager'}: times faster than autocast, per training step")
    names = COMPILED[1:] if compiled else EAGER
    for column in ("net", "batch", "dtype"):
        shown.add_column(column)
    present = [n for n in names if any(n in r["ways"] for r in rows)]
    for n in present:
        shown.add_column(n.removesuffix("+inductor"), justify="right")
    peak = ["peak"] if any("peak" in facts for each in rows for facts in each["ways"].values()) else []
    for column in ("vs fp32", "ms", "items/s") if compiled else ("vs fp32", "ms", "items/s", "forward", "casts", "saved", *peak):
        shown.add_column(column, justify="right")
    for each in rows:
        ways = each["ways"]
        if ("autocast+inductor" if compiled else "autocast") not in ways:
            continue
        cells = [f"{ways[n]['faster than autocast']:.2f}" if n in ways else "" for n in present]
        ours, theirs = (ways[f"{kind}+inductor" if compiled else kind] for kind in ("ours", "autocast"))
        cells += [f"{ours['faster than fp32']:.2f}", f"{ours['step, ms']:.1f}", f"{ours['items a second']:.0f}"]
        if not compiled:
            cells += [f"{ours['forward faster than autocast']:.2f}"]
            cells += [f"{ours[key] / max(theirs[key], 1):.2f}" for key in ("casts", "saved", "peak") if key in ours]
        shown.add_row(each["net"], str(each["batch"]), each["dtype"], *cells)
    ours = "ours+inductor" if compiled else "ours"
    gains = [each["ways"][ours]["faster than autocast"] for each in rows if ours in each["ways"]]
    if gains:
        mean = statistics.geometric_mean(gains)
        shown.caption = f"ours against autocast: geometric mean {mean:.2f}, worst {min(gains):.2f}"
        shown.caption += "; the last columns are ours: times faster than eager fp32, milliseconds and items a second in a step"
        shown.caption += "" if compiled else ", forward alone against autocast's, and shares of autocast's"
    return shown


@dataclass(frozen=True)
class Machine:
    device: str
    torch: str
    python: str
    date: str

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        return cls(name, torch.__version__, platform.python_version(), date.today().isoformat())


def jobs(nets: list[str], dtypes: list[str], quick: bool, inductor: bool, full: bool) -> list[Job]:
    """What to measure. If quick, what matters most first: large batches eagerly, then through inductor, then small ones."""
    eager = tuple(name for name in EAGER if name != "tf32" or torch.cuda.is_available())

    def batch(net: str, large: bool) -> int:
        whole = NETS[net].large if large else NETS[net].small
        return whole if full else max(whole // 4, 2)

    if not quick:
        every = (*eager, *COMPILED) if inductor else eager
        return [Job(net, batch(net, large), dtype, every) for net in nets for large in (False, True) for dtype in dtypes]
    large = [Job(net, batch(net, True), dtype, eager) for dtype in dtypes for net in nets]
    compiled = [Job(net, batch(net, True), dtypes[0], ("fp32", *COMPILED[1:])) for net in nets if inductor]
    small = [Job(net, batch(net, False), dtype, eager) for dtype in dtypes for net in nets]
    unrolled = [job for job in compiled if job.net == "lstm"]  # pure half is, over time, by AOTAutograd: minutes to compile
    return large + [job for job in compiled if job not in unrolled] + small + unrolled


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer turns, inductor at the large batch in the first dtype only, 8 minutes")
    options.add_argument("--minutes", type=float, help="leave out what takes longer; default: no limit, 8 with --quick")
    options.add_argument("--only", default=",".join(NETS))
    options.add_argument("--dtypes", help="default: bf16,fp16 on CUDA, bf16 on a CPU")
    options.add_argument("--no-inductor", action="store_true")
    options.add_argument("--rounds", type=int, help="turns; default 20, 8 with --quick")
    options.add_argument("--out", type=Path, help="write all figures as JSON")
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    full = device.type == "cuda"
    dtypes = (asked.dtypes or ("bf16,fp16" if full else "bf16")).split(",")
    rounds, shown, rows = asked.rounds or (8 if asked.quick else 20), console(), []
    machine = Machine.here(device)
    shown.print(f"{machine.device}, torch {machine.torch}, Python {machine.python}, {machine.date}")
    minutes = asked.minutes or (8 if asked.quick else math.inf)
    ends, longest, left_out = time.monotonic() + 60 * minutes, {False: 0.0, True: 0.0}, []
    for job in track(
        jobs(asked.only.split(","), dtypes, asked.quick, not asked.no_inductor, full), "measuring", console=shown, transient=True
    ):
        began = time.monotonic()
        expected = longest[job.compiled] or 4 * longest[False]  # before the first is compiled, a guess
        if began + expected > ends:
            left_out.append(str(job))
            continue
        rows.append(row(job.net, job.batch, job.dtype, measure(job.net, job.batch, full, job.dtype, job.ways, device, rounds)))
        torch._dynamo.reset()
        if full:
            torch.cuda.empty_cache()
        longest[job.compiled] = max(longest[job.compiled], time.monotonic() - began)
        if asked.out:
            asked.out.write_text(json.dumps({"machine": asdict(machine), "rows": rows, "left out": left_out}, indent=1))
    for compiled in (False, True):
        if any(("ours+inductor" if compiled else "ours") in r["ways"] for r in rows):
            shown.print(table(rows, compiled))
    if left_out:
        shown.print(f"left out after {minutes:g} minutes: {'; '.join(left_out)}", highlight=False)
        if asked.out:
            asked.out.write_text(json.dumps({"machine": asdict(machine), "rows": rows, "left out": left_out}, indent=1))


if __name__ == "__main__":
    main()
