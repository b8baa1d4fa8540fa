"""Run a law suite of about ten minutes on cells of versions: Python, torch, transformers.

    python .ci/matrix.py --out build/matrix                     # all cells that have no line yet
    python .ci/matrix.py --out build/matrix --only 3.12/2.14    # those that begin so
    python .ci/matrix.py --out build/matrix --list

Each cell appends one line of JSON to `cells.jsonl`: its versions as they were found, the date and commit, tests that failed, networks
that were wrong at 1,024 positions, and `green` or not. A run can be ended and goes on with the cells that have no line; delete a line to
run its cell again. Per Python and torch there is one environment, per Python and transformers one folder of packages beside it. `--use`
names interpreters that exist already; one with the Python and torch of a cell is taken for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS, TORCHES = ("3.11", "3.12", "3.13"), ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "newest")
TRANSFORMERS = ("4.57.6", "5.0.0", "5.8.1", "5.17.0", "newest")
PINNED = ("3.11", "2.13.0", "5.17.0")
NEEDED = ("networkx", "numpy", "rich", "scipy", "pytest", "hypothesis", "expecttest", "setuptools")
OF_TRANSFORMERS = (
    "tests/runtime/test_heard.py", "tests/runtime/test_runtime_huggingface.py", "tests/runtime/test_generation.py",
    "tests/passes/test_repaint_counts.py", "tests/integrations/test_transformers.py",
)  # fmt: skip
OF_TORCH = (
    "tests/runtime/test_runtime_identity.py", "tests/runtime/test_runtime_modes.py", "tests/runtime/test_weight_law.py",
    "tests/runtime/test_effects_once.py", "tests/runtime/test_gradients_inside.py", "tests/runtime/test_freeze.py",
    "tests/passes/test_fixtures.py", "tests/faults/test_process_state.py",
)  # fmt: skip
"""Tests of the laws: what capture sees, hears and gives back. Those of torch run in the cells of one version of transformers."""
POSITIONS = ("--small", "--length", "1024", "--dtype", "bf16,fp16", "--only", "bert,gpt2,llama,qwen,mixtral,t5,mamba,unet")


@dataclass
class Cell:
    """One combination of versions, and what came of it."""

    asked: str
    python: str = ""
    torch: str = ""
    transformers: str = ""
    date: str = ""
    commit: str = ""
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    result: str = "red"
    """green, red, or not installed."""


def cells() -> list[str]:
    """Each version beside the pinned ones, and the newest of all: PYTHON/TORCH/TRANSFORMERS."""
    python, torch, transformers = PINNED
    found = [f"{python}/{torch}/{each}" for each in TRANSFORMERS]
    found += [f"{python}/{each}/{transformers}" for each in TORCHES]
    found += [f"{each}/{torch}/newest" for each in PYTHONS]
    found += [f"{each}/newest/newest" for each in PYTHONS]
    found += [f"{python}/2.11.0/{each}" for each in ("4.57.6", "5.0.0")]
    return list(dict.fromkeys(found))


def said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def versions(interpreter: Path) -> tuple[str, str]:
    """Python and torch of an interpreter, without the build of torch."""
    text = said(str(interpreter), "-c", "import sys, torch; print('%d.%d' % sys.version_info[:2], torch.__version__.partition('+')[0])")
    python, torch = text.split()
    return python, torch


def pinned(package: str, version: str) -> str:
    return package if version == "newest" else f"{package}=={version}"


def environment(out: Path, python: str, torch: str, known: dict[tuple[str, str], Path]) -> Path:
    """An interpreter with a Python and a torch, made if there is none."""
    if (python, torch) not in known:
        home = out / f"python-{python}-torch-{torch}"
        interpreter = home / "bin" / "python"
        if not (home / "ready").exists():
            said(f"python{python}", "-m", "venv", "--clear", str(home))
            said(str(interpreter), "-m", "pip", "install", "-q", pinned("torch", torch), *NEEDED)
            (home / "ready").touch()
        known[python, torch] = interpreter
    return known[python, torch]


def packages(out: Path, interpreter: Path, python: str, transformers: str) -> Path:
    """A folder with a version of transformers and what it needs, for a Python."""
    home = out / f"transformers-{transformers}-python-{python}"
    if not (home / "ready").exists():
        said(str(interpreter), "-m", "pip", "install", "-q", "--target", str(home), "--upgrade", pinned("transformers", transformers))
        (home / "ready").touch()
    return home


def ends_within(limit: float, words: list[str], log: Path, settings: dict[str, str]) -> bool:
    """Run a command and append its output to `log`. True if it ends within `limit` seconds; otherwise end it with all its children."""
    with log.open("a") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=settings, cwd=ROOT, start_new_session=True)
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return True


def run(cell: Cell, out: Path, known: dict[tuple[str, str], Path], minutes: float) -> None:
    """Fill the line of a cell."""
    began = time.monotonic()
    python, torch, transformers = cell.asked.split("/")
    log = out / f"{cell.asked.replace('/', '_')}.txt"
    log.write_text("")
    try:
        interpreter = environment(out, python, torch, known)
        home = packages(out, interpreter, python, transformers)
    except (subprocess.CalledProcessError, FileNotFoundError) as problem:
        cell.result, cell.failed = "not installed", [str(getattr(problem, "stderr", "") or problem).strip()[-300:]]
        return
    settings = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{home}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    cell.python, cell.torch = versions(interpreter)
    cell.transformers = next(home.glob("transformers-*.dist-info")).name.split("-")[1].removesuffix(".dist")

    def follow(limit: float, *words: str) -> str:
        if not ends_within(limit, [str(interpreter), *words], log, settings):
            cell.failed.append(f"{words[0]} {words[1]} takes more than {limit:.0f} s")
        return log.read_text()

    rows = out / f"{cell.asked.replace('/', '_')}.jsonl"
    rows.unlink(missing_ok=True)
    laws = OF_TORCH if transformers in (PINNED[2], "newest") else ()
    follow(30 * minutes, "examples/benchmarks/wall/real_size.py", *POSITIONS, "--out", str(rows))
    # no -q: pyproject.toml has one, and a second one takes away the line with the counts
    text = follow(30 * minutes, "-m", "pytest", "-rfE", "-p", "no:cacheprovider", *OF_TRANSFORMERS, *laws)
    judged = [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
    cell.wrong += [f"{row['name']}: {row['outcome']}: {row.get('why', '')}"[:200] for row in judged if row["outcome"] != "right"]
    cell.failed += [each[:200] for each in re.findall(r"^(?:FAILED|ERROR) (.*)$", text, re.M)]
    cell.passed = int((re.findall(r"(\d+) passed", text) or ["0"])[-1])
    cell.result = "green" if cell.passed and judged and not cell.wrong and not cell.failed else "red"
    cell.seconds = round(time.monotonic() - began)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="folder for environments, logs and cells.jsonl")
    options.add_argument("--only", default="", help="cells that begin so: PYTHON/TORCH/TRANSFORMERS, with commas between")
    options.add_argument("--use", type=Path, action="append", default=[], help="an interpreter that has torch, pytest and the rest")
    options.add_argument("--minutes", type=float, default=10.0, help="for each cell")
    options.add_argument("--list", action="store_true", help="print the cells and what came of them, and run none")
    asked = options.parse_args()
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    lines = out / "cells.jsonl"
    done = {row["asked"]: row for row in map(json.loads, lines.read_text().splitlines())} if lines.exists() else {}
    begins = tuple(each for each in asked.only.split(",") if each)
    chosen = [each for each in cells() if not begins or each.startswith(begins)]
    chosen += [each for each in begins if each.count("/") == 2 and each not in chosen]
    if asked.list:
        for each in chosen:
            print(f"{each:24} {done[each]['result'] + ', ' + done[each]['date'] if each in done else 'not run'}")
        return
    known = {versions(each): each for each in asked.use}
    for each in chosen:
        if each in done:
            continue
        cell = Cell(each, date=date.today().isoformat(), commit=said("git", "rev-parse", "--short", "HEAD"))
        run(cell, out, known, asked.minutes)
        with lines.open("a") as file:
            file.write(json.dumps(asdict(cell)) + "\n")
        told = f"{cell.passed} passed, {len(cell.failed)} failed, {len(cell.wrong)} wrong, {cell.seconds:.0f} s"
        print(f"{each:24} {cell.result}: {told}", flush=True)
        done[each] = asdict(cell)
    sys.exit(any(done[each]["result"] != "green" for each in chosen))


if __name__ == "__main__":
    main()
