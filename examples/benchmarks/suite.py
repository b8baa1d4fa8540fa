"""A training step and a forward pass of networks, in every way there is to run them, timed in turns in one process a network.

    python examples/benchmarks/suite.py [--quick] [--minutes 8] [--only bert,gpt2] [--dtypes bf16,fp16] [--out rows.jsonl]

    fp32, tf32          the model as it is; with TF32 matmuls (CUDA)
    autocast            torch.autocast, with torch.amp.GradScaler in fp16
    ours                amprewrite.rewrite, eager
    o2                  the model wholly in half with fp32 master weights, written by hand
    half                the limit: model, inputs and optimizer wholly in the low format, nothing kept in fp32
    ...+inductor        fp32, autocast, ours and half through torch.compile

Every way has its own copy of the model and its own AdamW. All take turns, so that what else the machine does hits all of them; the
table gives medians of ratios within a turn. Several networks build and compile at the same time (`--together`) and are timed one after
another. A step counts only if its loss agrees with fp32's; the error is that of all gradients against fp32's, relative. On CUDA the
profiler counts kernels and sums their time, and memory is the peak over a step. Saved bytes are the tensors that autograd keeps from
forward for backward, parameters aside. `--out` gets a line of JSON for the machine, and one a row with all figures.

Rows that cannot be had within `--minutes` (8 with --quick) are named and left out; what matters most comes first.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
import multiprocessing
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from casts_vs_autocast import Casts
from launches import o2_step
from nets import MORE, NETS, Made, console
from rich.table import Table
from torch import Tensor, nn

import amprewrite

sys.path.append(str(Path(__file__).parent / "wall"))
from judging import error

EVERY = NETS | MORE
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = 0.05
"""How far the first loss may lie from fp32's, relative: all ways agree far better, a wrong one does not."""
EAGER = ("fp32", "tf32", "autocast", "ours", "o2", "half")
COMPILED = ("fp32+inductor", "autocast+inductor", "ours+inductor", "half+inductor")
SCALE = 1024.0
"""What losses are multiplied by in fp16 where gradients are compared, and in O2."""
TURN = 0.15
"""Seconds of steps in one turn of a way."""


@dataclass(frozen=True)
class Job:
    """A row to measure."""

    net: str
    batch: int
    dtype: str
    ways: tuple[str, ...]
    full: bool
    rounds: int

    def __str__(self) -> str:
        compiled = any("+" in name for name in self.ways)
        return f"{self.net} at batch {self.batch} in {self.dtype}{', also through inductor' if compiled else ''}"


class Way:
    """One way to run a net: its step, its forward pass, and what was measured of them."""

    def __init__(self, name: str, net: Made, dtype: torch.dtype, device: torch.device) -> None:
        self.name, self.device = name, device
        self.kind, compiled = name.partition("+")[0], name.endswith("+inductor")
        images = any(isinstance(each, nn.Conv2d) for each in net[0].modules())
        self.model = copy.deepcopy(net[0]).to(device)
        self.inputs = {key: x.to(device) for key, x in net[1].items()}
        if images and device.type == "cuda":  # the layout that cuDNN's low kernels are made for
            self.model = self.model.to(memory_format=torch.channels_last)
            self.inputs = {key: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for key, x in self.inputs.items()}
        if self.kind in ("half", "o2"):
            self.model.to(dtype)
            self.inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in self.inputs.items()}
        self.parameters = list(self.model.parameters())
        self.masters = [nn.Parameter(p.detach().float()) for p in self.parameters] if self.kind == "o2" else self.parameters
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-5, fused=True)
        self.scale = SCALE if dtype == torch.float16 and self.kind in ("autocast", "o2", "half") else 1.0
        self.scaler = torch.amp.GradScaler(device.type) if self.kind == "autocast" and dtype == torch.float16 else None
        self.context: Any = (lambda: torch.autocast(device.type, dtype)) if self.kind == "autocast" else contextlib.nullcontext
        self.run: Any = self.model
        if self.kind == "ours":
            backend = "inductor" if compiled else "eager"
            self.run = amprewrite.rewrite(self.model, dtype=dtype, optimizer=self.optimizer, backend=backend)
        elif compiled:
            self.run = torch.compile(self.model)
        self.facts: dict[str, Any] = {}
        self.steps: list[float] = []
        self.forwards: list[float] = []

    def forward(self) -> Tensor:
        with self.context():
            loss: Tensor = self.run(**self.inputs)
        return loss

    def step(self) -> None:
        if self.kind == "o2":
            o2_step(self.model, self.masters, self.optimizer, lambda: self.forward().float(), self.scale)
            return
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def gradients(self) -> list[Tensor]:
        """Gradients of one pass, unscaled; the loss is kept."""
        loss = self.forward()
        (loss.float() * self.scale).backward()
        self.facts["loss"] = float(loss)
        found = [p.grad.float() / self.scale for p in self.parameters if p.grad is not None]
        self.forget()
        return found

    def forget(self) -> None:
        """Drop all gradients."""
        for p in (*self.parameters, *self.masters):
            p.grad = None


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


def seconds(call: Callable[[], Any], device: torch.device, repeat: int = 1) -> float:
    sync(device)
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    sync(device)
    return (time.perf_counter() - start) / repeat


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


def kernels(each: Way, steps: int = 3) -> dict[str, float]:
    """Launches of a step and the summed time of its kernels, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            each.step()
        torch.cuda.synchronize()
    ran = [event.self_device_time_total for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {"launches": len(ran) / steps, "kernels, ms": sum(ran) / steps / 1000}


def built(job: Job, device: torch.device) -> list[Way]:
    """All ways of a net, compared with fp32 and warm."""
    torch.manual_seed(0)
    net = EVERY[job.net].make(job.full, job.batch)
    net[0].train()
    ways: list[Way] = []
    exact: list[Tensor] = []
    for name in job.ways:
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        began = time.perf_counter()
        with matmuls_of(name):
            made = Way(name, net, DTYPES[job.dtype], device)
            got = made.gradients()
            made.facts["first pass, s"] = time.perf_counter() - began
            exact = exact or got
            made.facts["error"] = error(exact, got)
            del got
            for _ in range(3):  # scale searches, fused optimizers' state, autotuning
                made.step()
            with torch.no_grad():
                made.forward()
        made.forget()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            made.facts["persistent"] = torch.cuda.memory_allocated(device) - before
        loss, right = made.facts["loss"], (ways or [made])[0].facts["loss"]
        if not abs(loss - right) <= TOLERANCE * max(abs(right), 1e-3):
            raise ValueError(f"{job.net}, {name}: the first loss is {loss:.5g}, fp32's is {right:.5g}")
        ways.append(made)
    return ways


def timed(ways: list[Way], rounds: int, device: torch.device) -> None:
    """Take turns; count what one step takes."""
    for each in ways:
        if "+" not in each.name:
            with Casts() as casts:
                each.step()
            each.facts |= {"casts": casts.count, "saved": saved_bytes(each)}
        if device.type == "cuda":
            each.forget()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            each.step()
            each.facts["peak"] = each.facts["persistent"] + torch.cuda.max_memory_allocated(device) - before
            each.forget()
            with matmuls_of(each.name):
                each.facts |= kernels(each)
    repeats = {each.name: max(1, min(50, int(TURN / seconds(each.step, device)))) for each in ways}
    for turn in range(rounds):
        for each in ways if turn % 2 == 0 else reversed(ways):
            with matmuls_of(each.name):
                each.steps.append(seconds(each.step, device, repeats[each.name]))
                with torch.no_grad():
                    each.forwards.append(seconds(each.forward, device, repeats[each.name]))


def ratio(over: list[float], under: list[float]) -> float:
    """Median over the turns of how many times faster `under` is than `over`."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def row(job: Job, ways: list[Way]) -> dict[str, Any]:
    fields: dict[str, Any] = {"net": job.net, "batch": job.batch, "dtype": job.dtype, "ways": {}}
    by_name = {each.name: each for each in ways}
    for each in ways:
        base = by_name.get("autocast+inductor" if "+" in each.name else "autocast", by_name.get("autocast", by_name["fp32"]))
        facts = each.facts | {"steps": each.steps, "forwards": each.forwards}
        facts["step, ms"], facts["forward, ms"] = (1000 * statistics.median(times) for times in (each.steps, each.forwards))
        facts["items a second"] = job.batch / statistics.median(each.steps)
        facts["faster than autocast"] = ratio(base.steps, each.steps)
        facts["faster than fp32"] = ratio(by_name["fp32"].steps, each.steps)
        facts["forward faster than autocast"] = ratio(base.forwards, each.forwards)
        quartiles = statistics.quantiles((a / b for a, b in zip(base.steps, each.steps, strict=True)), n=4)
        facts["spread"] = quartiles[2] - quartiles[0]
        fields["ways"][each.name] = facts
    return fields


def table(rows: list[dict[str, Any]], compiled: bool) -> Table:
    shown = Table(title=f"{'compiled by inductor' if compiled else 'eager'}: times faster than autocast, per training step")
    names = COMPILED[1:] if compiled else EAGER
    for column in ("net", "batch", "dtype"):
        shown.add_column(column)
    present = [n for n in names if any(n in r["ways"] for r in rows)]
    for n in present:
        shown.add_column(n.removesuffix("+inductor"), justify="right")
    last = [key for key in ("casts", "saved", "peak", "launches", "kernels, ms") if any(key in r["ways"].get(present[0], {}) for r in rows)]
    for column in ("vs fp32", "ms", "items/s", "forward", *last, "error", "autocast's"):
        shown.add_column(column.removesuffix(", ms"), justify="right")
    for each in rows:
        ways = each["ways"]
        if ("autocast+inductor" if compiled else "autocast") not in ways:
            continue
        cells = [f"{ways[n]['faster than autocast']:.2f}" if n in ways else "" for n in present]
        ours, theirs = (ways[f"{kind}+inductor" if compiled else kind] for kind in ("ours", "autocast"))
        cells += [f"{ours['faster than fp32']:.2f}", f"{ours['step, ms']:.1f}", f"{ours['items a second']:.0f}"]
        cells += [f"{ours['forward faster than autocast']:.2f}"]
        cells += [f"{ours[key] / max(theirs[key], 1e-9):.2f}" if key in ours else "" for key in last]
        cells += [f"{each['error']:.1e}" for each in (ours, theirs)]
        shown.add_row(each["net"], str(each["batch"]), each["dtype"], *cells)
    ours = "ours+inductor" if compiled else "ours"
    gains = [each["ways"][ours]["faster than autocast"] for each in rows if ours in each["ways"]]
    if gains:
        mean = statistics.geometric_mean(gains)
        shown.caption = f"ours against autocast: geometric mean {mean:.2f}, worst {min(gains):.2f}; the columns behind the ways are ours: "
        shown.caption += "times faster than eager fp32, milliseconds and items a second in a step, forward alone against autocast's, "
        shown.caption += "shares of autocast's, and relative errors of gradients"
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


def jobs(nets: list[str], dtypes: list[str], quick: bool, inductor: bool, full: bool, rounds: int) -> list[Job]:
    """What to measure. If quick, what matters most first: half of the large batch, the first format also through inductor."""
    eager = tuple(name for name in EAGER if name != "tf32" or (torch.cuda.is_available() and not quick))
    compiled = (COMPILED[1:3] if quick else COMPILED) if inductor else ()

    def batch(net: str, large: bool) -> int:
        whole = EVERY[net].large // (2 if quick else 1) if large else EVERY[net].small
        return whole if full else max(whole // 4, 2)

    if not quick:
        every = (*eager, *compiled)
        sizes = [(net, batch(net, large)) for net in nets for large in (False, True)]
        return [Job(net, size, dtype, every, full, rounds) for net, size in sizes for dtype in dtypes]
    # an LSTM is unrolled by AOTAutograd over time: minutes to compile
    return [
        Job(net, batch(net, True), dtype, (*eager, *(compiled if dtype == dtypes[0] and net != "lstm" else ())), full, rounds)
        for dtype in dtypes for net in nets
    ]  # fmt: skip


def work(pipe: Connection, job: Job, device: torch.device) -> None:
    """In a process of its own: build, say so, wait for the word, and time."""
    warnings.simplefilter("ignore")
    try:
        ways = built(job, device)
        pipe.send("ready")
        pipe.recv()
        timed(ways, job.rounds, device)
        pipe.send(row(job, ways))
    except Exception as problem:
        pipe.send({"failed": f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"})


def measured(group: list[Job], device: torch.device, ends: float) -> list[tuple[Job, dict[str, Any]]]:
    """A row for each job: all build at the same time, and are timed one after another. What takes too long or fails says so."""
    context = multiprocessing.get_context("spawn")
    running = []
    for job in group:
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there, job, device), daemon=True)
        process.start()
        there.close()
        running.append((job, process, here))

    def answer(pipe: Connection) -> Any:
        try:
            left = None if math.isinf(ends) else max(ends - time.monotonic(), 0)  # None waits forever
            return pipe.recv() if pipe.poll(left) else {"failed": "out of time"}
        except EOFError:
            return {"failed": "its process ended"}

    found = []
    try:
        built_ones = [(job, process, pipe, answer(pipe)) for job, process, pipe in running]
        for job, process, pipe, said in built_ones:
            if said == "ready":
                pipe.send("go")
                said = answer(pipe)
            found.append((job, said))
            process.kill()  # its memory is the next one's
            process.join()
    finally:
        for _, process, _ in running:
            process.kill()
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="half of the large batch only, fewer turns and ways, 8 minutes")
    options.add_argument("--minutes", type=float, help="leave out what takes longer; default: no limit, 8 with --quick")
    options.add_argument("--only", default=",".join(NETS), help=f"nets, with commas between, of {', '.join(EVERY)}")
    options.add_argument("--dtypes", help="default: bf16,fp16 on CUDA, bf16 on a CPU")
    options.add_argument("--no-inductor", action="store_true")
    options.add_argument("--rounds", type=int, help="turns; default 20, 4 with --quick")
    options.add_argument("--together", type=int, help="nets that build at the same time; default 4 on CUDA, else 1")
    options.add_argument("--out", type=Path, help="write all figures as lines of JSON")
    asked = options.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    full = device.type == "cuda"
    dtypes = (asked.dtypes or ("bf16,fp16" if full else "bf16")).split(",")
    rounds, shown, rows = asked.rounds or (4 if asked.quick else 20), console(), []
    machine = Machine.here(device)
    shown.print(f"{machine.device}, torch {machine.torch}, Python {machine.python}, {machine.date}")
    minutes = asked.minutes or (8 if asked.quick else math.inf)
    ends, failed = time.monotonic() + 60 * minutes, []
    if asked.out:
        asked.out.write_text(json.dumps(asdict(machine)) + "\n")
    todo = jobs(asked.only.split(","), dtypes, asked.quick, not asked.no_inductor, full, rounds)
    size = asked.together or (4 if full else 1)
    for start in range(0, len(todo), size):
        for job, found in measured(todo[start : start + size], device, ends):
            if "failed" in found:
                failed.append(f"{job}: {found['failed']}")
                shown.print(failed[-1], highlight=False)
            else:
                rows.append(found)
            if asked.out:
                with asked.out.open("a") as file:
                    file.write(json.dumps(found if "net" in found else {"job": str(job), **found}) + "\n")
    for compiled in (False, True):
        if any(("ours+inductor" if compiled else "ours") in r["ways"] for r in rows):
            shown.print(table(rows, compiled))
    sys.exit(any(not each.endswith("out of time") for each in failed))


if __name__ == "__main__":
    main()
