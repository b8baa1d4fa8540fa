"""One command for a GPU: checks that need one and every benchmark, each in a process of its own with a time limit, results in one folder.

    PYTHONPATH=. python examples/benchmarks/everything.py --out results [--minutes 8] [--only yardstick,suite] [--small --device cpu]

In the order of their value, the first four side by side, as they need no card alone:

    yardstick         twelve nets at real sizes, both formats: errors of results and gradients beside torch.autocast's
    gpu_tests         the tests that need a GPU, a graph on two devices among them
    fuzz              generated programs on the card
    policy_gradient   the example with one set of numbers for sampling and training
    doctor            `amprewrite doctor`
    suite             a training step in every way there is to run it
    ...               all other benchmarks

Writes what each prints to `NAME.txt`, its figures to `NAME.jsonl` or `NAME.json` where it has any, and a line for each part to
`summary.jsonl`. What fails or runs out of time is said in the table at the end, and the rest goes on; the exit status tells. Nothing needs
to be installed but the project's dependencies. `--small --device cpu` shows the least of each, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENOUGH = 5.0
"""Seconds: nothing is started with less."""
TAIL = 45
"""Lines of a part that are printed as it ends."""


@dataclass(frozen=True)
class Part:
    """A check: its command, the share of all time that it may take, and whether it may run beside others."""

    name: str
    share: float
    words: tuple[str, ...]
    beside: bool = True


def checks(out: Path, whole: float, small: bool, device: str) -> tuple[Part, ...]:
    """What comes before the benchmarks. `whole` is all time, in seconds."""
    on, quarter = ("--device", device), f"{whole / 4 / 60:.2f}"
    yardstick = ("--small", "--only", "unet,llama", "--dtype", "bf16") if small else ("--layers", "2", "--length", "2048", "--jobs", "4")
    fuzz = ("--cases", "2") if small else ("--jobs", str(max((os.cpu_count() or 1) // 2, 1)))
    return (
        Part("yardstick", 0.45, (str(HERE / "wall" / "real_size.py"), *yardstick, *on, "--out", str(out / "yardstick.jsonl"))),
        Part("gpu_tests", 0.45, ("-m", "pytest", "-m", "gpu", "-v", "-rs", "--durations=5", *gpu_tests())),
        Part("fuzz", 0.4, ("-m", "tests.fuzz", "--kinds", "programs", *fuzz, *on, "--minutes", quarter, "--out", str(out / "fuzz"))),
        Part("policy_gradient", 0.4, (str(HERE.parent / "policy_gradient.py"), "--steps", "2" if small else "20", *on)),
        Part("doctor", 0.1, ("-m", "amprewrite", "doctor"), beside=False),
    )


@dataclass(frozen=True)
class Task:
    """A script beside this one; what it is given, quickly and in the least form; the share of all time that it may take."""

    name: str
    share: float
    quick: tuple[str, ...]
    small: tuple[str, ...]
    json: str = ""
    """Its option for a file of figures."""
    minutes: bool = False
    """Whether it takes --minutes and keeps to it."""


QUICK = "gpt2,llama,bert,vit,t5,resnet,convnext,odd_mlp,unet"
TASKS = (
    Task("suite", 0.7, ("--quick", "--only", QUICK), ("--only", "odd_mlp", "--no-inductor", "--rounds", "2"), "--out", True),
    Task("fp8", 0.19, (), ("--small",), "--json", True),
    Task("fusion", 0.12, ("--quick", "--only", "bert,resnet,unet,odd_mlp"), ("--quick", "--only", "odd_mlp"), "--json"),
    Task("onnx_converters", 0.1, ("--rounds", "10"), ("--only", "odd_mlp", "--rounds", "2"), "--json"),
    Task("padding", 0.1, ("--quick",), ("--quick", "--only", "mlp", "--rounds", "2")),
    Task("accumulation", 0.08, ("--micro", "1,4", "--rounds", "5"), ("--micro", "2", "--only", "bert", "--rounds", "1")),
    Task("call_overhead", 0.1, ("--rounds", "50"), ("--rounds", "2")),
    Task("frozen", 0.05, ("--rounds", "20"), ("--rounds", "2", "--layers", "1", "--only", "vit")),
    Task("generation", 0.1, ("--prompts", "16"), ("--rounds", "1", "--layers", "1", "--prompts", "8", "--tokens", "4")),
    Task("first_call", 0.1, ("--nets", "bert", "--turns", "1"), ("--nets", "bert", "--turns", "1")),
    Task("casts_vs_autocast", 0.1, ("--layers", "4"), ("--layers", "1", "--only", "bert")),
    Task("launches", 0.1, ("--only", "bert,vit"), ("--only", "vit", "--small", "--dtypes", "bf16")),
    Task("memory", 0.1, ("--only", "bert,vit"), ("--only", "lstm", "--batch", "2")),
    Task("compiled_memory", 0.1, ("--only", "bert,gpt2"), ("--only", "odd_mlp", "--batch", "2")),
    Task("fp16_training", 0.1, ("--only", "cost", "--rounds", "10"), ("--only", "cost", "--rounds", "2")),
    Task("accuracy", 0.12, ("--layers", "2", "--only", "bert,vit"), ("--layers", "1", "--only", "bert", "--batches", "1")),
    Task("planner_cost", 0.1, ("--only", "bert,gpt2,resnet", "--perturb", "1"), ("--only", "resnet", "--perturb", "1")),
    Task("parity", 0.1, ("--only", "gpt2,llama,bert,vit"), ("--only", "gpt2", "--dtype", "bf16")),
    Task("passes_scale", 0.05, ("1000", "10000"), ("200",)),
    Task("import_time", 0.02, ("3",), ("1",)),
    Task("onnx_scale", 0.05, ("400", "1600"), ("100",)),
)
"""In the order in which they run: what matters most first."""


@dataclass
class Outcome:
    name: str
    result: str
    """ok, failed, out of time, or left out."""
    seconds: float = 0.0
    said: str = ""
    """The last line with words that it printed."""


def gpu_tests() -> list[str]:
    """Files with tests that are marked as needing a GPU."""
    return sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())


def command(task: Task, out: Path, seconds: float, small: bool) -> list[str]:
    options = [*(task.small if small else task.quick)]
    if task.json:
        options += [task.json, str(out / f"{task.name}.{'jsonl' if task.name == 'suite' else 'json'}")]
    if task.minutes:
        options += ["--minutes", f"{seconds * 0.85 / 60:.2f}"]  # the rest is for the row under way and for start-up
    return [str(HERE / f"{task.name}.py"), *options]


def run(name: str, words: Sequence[str], out: Path, limit: float, threads: str | None = None) -> Outcome:
    """One process of Python, ended with all that it started when its time is over."""
    began = time.monotonic()
    here = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(here), "HF_HUB_OFFLINE": "1", "COLUMNS": "160", "PYTHONUNBUFFERED": "1"}
    if threads is not None:
        settings["OMP_NUM_THREADS"] = threads
    with (out / f"{name}.txt").open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=settings, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - began
    lines = (out / f"{name}.txt").read_text().strip().splitlines()
    said = next((line.strip("= ") for line in reversed(lines) if any(map(str.isalnum, line))), "said nothing")[:100]
    return Outcome(name, "ok" if status == 0 else "out of time" if status is None else f"failed, status {status}", seconds, said)


class Report:
    """What came of each part: a line in `summary.jsonl` at once, and the table at the end."""

    def __init__(self, out: Path) -> None:
        self.out, self.console, self.outcomes = out, Console(width=None if sys.stdout.isatty() else 160), []
        (out / "summary.jsonl").write_text("")

    def add(self, outcome: Outcome, tail: int) -> None:
        self.outcomes.append(outcome)
        with (self.out / "summary.jsonl").open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        self.console.print(f"== {outcome.name}: {outcome.result}, {outcome.seconds:.0f} s", highlight=False)
        if tail and outcome.result != "left out":
            print("\n".join((self.out / f"{outcome.name}.txt").read_text().splitlines()[-tail:]), flush=True)

    def table(self) -> Table:
        table = Table("part", "result", "seconds", "last words", title=f"results in {self.out}")
        for each in self.outcomes:
            table.add_row(each.name, each.result, f"{each.seconds:.0f}", each.said)
        return table


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="folder for all results")
    options.add_argument("--minutes", type=float, default=8.0, help="for everything together")
    options.add_argument("--only", help="some parts, with commas between")
    options.add_argument("--small", action="store_true", help="the least of each, to see that it runs")
    options.add_argument("--device", default="cuda", help="of the checks: cuda, or cpu; benchmarks take what is there")
    asked = options.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    out, whole = asked.out.resolve(), 60 * asked.minutes
    parts = checks(out, whole, asked.small, asked.device)
    known = {*(part.name for part in parts), *(task.name for task in TASKS)}
    wanted = set(asked.only.split(",")) if asked.only else known
    if wanted - known:
        options.error(f"no such part: {', '.join(sorted(wanted - known))}; there are {', '.join(sorted(known))}")
    report, ends = Report(out), time.monotonic() + whole

    def limit(share: float) -> float:
        return min(share * whole if wanted == known else whole, ends - time.monotonic())

    def outcome(part: Part | Task) -> Outcome:
        seconds = limit(part.share)
        if seconds < ENOUGH:
            return Outcome(part.name, "left out")
        if isinstance(part, Part):
            return run(part.name, part.words, out, seconds, "1" if part.beside else None)
        return run(part.name, command(part, out, seconds, asked.small), out, seconds)

    beside = [part for part in parts if part.name in wanted and part.beside]
    with ThreadPoolExecutor(len(beside) or 1 if asked.device == "cuda" else 1) as pool:
        for done in as_completed([pool.submit(outcome, part) for part in beside]):
            report.add(done.result(), TAIL)
    for each in (*(part for part in parts if not part.beside), *TASKS):
        if each.name in wanted:
            report.add(outcome(each), TAIL if each.name in ("doctor", "suite") else 0)
    report.console.print(report.table())
    sys.exit(any(each.result != "ok" for each in report.outcomes))


if __name__ == "__main__":
    main()
