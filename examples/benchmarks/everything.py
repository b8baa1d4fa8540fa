"""One command: the tests that need a GPU and every benchmark, each in a process of its own with a time limit, results in one folder.

    python examples/benchmarks/everything.py --out results [--minutes 8] [--only suite,fusion] [--small]

Writes what each prints to `NAME.txt`, its figures to `NAME.json` where it has any, and `summary.json`. What fails or runs out of time is
said in the summary at the end, and the rest goes on; the exit status tells. `--small` is for a look on a CPU: the least of each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TESTS = "gpu_tests"
ENOUGH = 5.0
"""Seconds: nothing is started with less."""


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


TASKS = (
    Task("suite", 0.5, ("--quick",), ("--only", "odd_mlp", "--no-inductor", "--rounds", "2"), "--out", True),
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
    """The last line of one that did not end well."""


def gpu_tests() -> list[str]:
    """Files with tests that are marked as needing a GPU."""
    return sorted(str(path) for path in (ROOT / "tests").glob("test_*.py") if "mark.gpu" in path.read_text())


def command(task: Task, out: Path, seconds: float, small: bool) -> list[str]:
    options = [*(task.small if small else task.quick)]
    if task.json:
        options += [task.json, str(out / f"{task.name}.json")]
    if task.minutes:
        options += ["--minutes", f"{seconds * 0.85 / 60:.2f}"]  # the rest is for the row under way and for start-up
    return [sys.executable, str(HERE / f"{task.name}.py"), *options]


def run(name: str, words: list[str], out: Path, limit: float) -> Outcome:
    """One process, ended with all that it started when its time is over."""
    began = time.monotonic()
    here = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(here), "HF_HUB_OFFLINE": "1", "COLUMNS": "160", "PYTHONUNBUFFERED": "1"}
    with (out / f"{name}.txt").open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=settings, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - began
    if status == 0:
        return Outcome(name, "ok", seconds)
    lines = (out / f"{name}.txt").read_text().strip().splitlines()
    said = lines[-1] if lines else "said nothing"
    return Outcome(name, "out of time" if status is None else f"failed, status {status}", seconds, said)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="folder for all results")
    options.add_argument("--minutes", type=float, default=8.0, help="for everything together")
    options.add_argument("--only", help=f"some of: {TESTS}, {', '.join(task.name for task in TASKS)}")
    options.add_argument("--small", action="store_true", help="the least of each, to see that it runs")
    asked = options.parse_args()
    known = {TESTS, *(task.name for task in TASKS)}
    wanted = set(asked.only.split(",")) if asked.only else known
    if wanted - known:
        options.error(f"no such part: {', '.join(sorted(wanted - known))}; there are {', '.join(sorted(known))}")
    asked.out.mkdir(parents=True, exist_ok=True)
    out, console, outcomes = asked.out.resolve(), Console(), []
    whole = 60 * asked.minutes
    ends = time.monotonic() + whole
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "--durations=5", *gpu_tests()]
    parts = [(TESTS, 0.2, None), *((task.name, task.share, task) for task in TASKS)]
    for name, share, task in parts:
        if name not in wanted:
            continue
        limit = min(share * whole if wanted == known else whole, ends - time.monotonic())
        if limit < ENOUGH:
            outcomes.append(Outcome(name, "left out"))
            continue
        with console.status(f"{name}, {limit:.0f} s at most"):
            outcomes.append(run(name, tests if task is None else command(task, out, limit, asked.small), out, limit))
        console.print(f"{outcomes[-1].name}: {outcomes[-1].result}, {outcomes[-1].seconds:.0f} s", highlight=False)
    table = Table("part", "result", "seconds", "last words", title=f"results in {asked.out}")
    for each in outcomes:
        table.add_row(each.name, each.result, f"{each.seconds:.0f}", each.said)
    console.print(table)
    (out / "summary.json").write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    sys.exit(any(each.result != "ok" for each in outcomes))


if __name__ == "__main__":
    main()
