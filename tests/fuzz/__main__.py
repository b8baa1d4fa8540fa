"""`python -m tests.fuzz`: run cases of all kinds for some minutes, keep findings, print a table."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from tests.fuzz.findings import Finding, Folder, foreign
from tests.fuzz.kinds import KINDS, Kind
from tests.fuzz.oracle import Problem
from tests.fuzz.shrink import shrink

CASE_SECONDS = 90
SHRINK_SECONDS = 8
SHRUNK_EACH = 2
"""Findings of one coarse signature (kind of failure and place) that are cut down; the next ones are only counted."""
BLOCK = 10
"""Cases of one kind before the next kind's turn."""


class TooSlowError(BaseException):
    """A case ran past its time. It is no Exception, because cases and the library expect those, and would go on."""


def _alarm(number: int, frame: FrameType | None) -> None:
    raise TooSlowError


def placed(case: Any, device: str) -> Any:
    """A program for a device; every fourth makes its own tensors on the CPU, so that its graphs hold two devices."""
    return case if case is None or device == "cpu" else replace(case, device=device, everything_there=case.seed % 4 != 0)


def examine(
    kind: Kind, seed: int, shrunk: dict[tuple[str, str], int], seconds: float = SHRINK_SECONDS, device: str = "cpu"
) -> Finding | None:
    """Run the case of a seed; what is wrong with it, cut down unless enough of its sort were."""
    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(CASE_SECONDS)
    case = None
    try:
        case = placed(kind.generate(seed), device)
        problem = None if case is None else kind.check(case)
    except TooSlowError:
        problem = Problem("slow", f"over {CASE_SECONDS} s", "the case was given up")
    finally:
        signal.alarm(0)
    if problem is None:
        return None
    coarse = (problem.kind, problem.where)
    shrunk[coarse] = shrunk.get(coarse, 0) + 1
    if problem.kind != "slow" and not foreign(problem.kind) and shrunk[coarse] <= SHRUNK_EACH and seconds:
        case, problem = shrink(kind.cut(case, problem), problem, kind.check, kind.smaller, seconds)
        tags = f" · {' '.join(kind.tags(case))}"
    else:
        tags = ""
    return Finding(kind.name, seed, f"{problem.kind} · {problem.where}{tags}", problem.text, kind.shown(case) if case is not None else "")


def _has(kind: Kind, seed: int, wanted: list[str]) -> bool:
    """Whether each of the wanted words stands in the description of a seed's case."""
    case = kind.generate(seed)
    text = "" if case is None else f"{' '.join(kind.tags(case))} {case!r}"
    return all(word in text for word in wanted)


def work(options: argparse.Namespace, worker: int) -> int:
    """One process: every JOBS-th seed of each kind, until time or cases are up. Returns how many findings count."""
    gc.collect()
    gc.freeze()  # what torch made at import need not be looked through again and again
    folder, end, start = Folder(options.out), time.monotonic() + 60 * options.minutes, time.monotonic()
    progress = options.out / f"progress-{worker}-of-{options.jobs}-from-{options.seed}.json"
    at = dict.fromkeys(options.kinds, options.seed + worker)
    if progress.exists() and options.resume:
        at |= json.loads(progress.read_text())
    shrunk: dict[tuple[str, str], int] = {}
    done, counted = 0, 0
    turn = sum(at.values()) // options.jobs  # a run that goes on goes on with the kind that was at work
    while time.monotonic() < end and (options.cases is None or done < options.cases):
        name = options.kinds[turn // BLOCK % len(options.kinds)]
        turn += 1
        seed = at[name]
        at[name] += options.jobs
        progress.write_text(json.dumps(at))  # before the case: one that ends the process is not run again
        skipped = options.having and not _has(KINDS[name], seed, options.having)
        found = None if skipped else examine(KINDS[name], seed, shrunk, device=options.device)
        if skipped:
            continue
        done += 1
        if options.device != "cpu":
            _ask_device()
        if found is not None:
            found = Finding(found.kind, found.seed, found.signature, found.text, found.script, round(time.monotonic() - start, 1))
            folder.add(found)
            counted += not found.foreign
            print(f"{time.monotonic() - start:7.1f} s  {name}:{seed}  {found.signature}", flush=True)
            if options.first and not found.foreign:
                break
    print(f"worker {worker}: {done} cases in {time.monotonic() - start:.0f} s, {counted} findings; next seeds {at}", flush=True)
    return counted


def _ask_device() -> None:
    """End the process if a case has broken the device, which answers nothing any more then. It is a finding; another process goes on."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the device is lost: {error}", flush=True)
        sys.exit(3)


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--cases", type=int, help="stop after so many a process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), help=",".join(KINDS))
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--show", help="kind:seed: print that case cut down, and what comes of it")
    parser.add_argument("--bare", help="kind:seed: run that case and say nothing; the status is 1 where it is a finding")
    parser.add_argument(
        "--having", type=lambda text: text.split(";") if text else [], default=[], help="only cases with these words in them"
    )
    parser.add_argument("--resume", action="store_true", help="go on at the seeds where a run into the same folder stopped")
    parser.add_argument("--first", action="store_true", help="stop at the first finding")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: programs run there; their seeds make the same programs")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.device != "cpu":
        options.kinds = ["programs"]  # the only kind that knows devices
    return options


def hush() -> None:
    """Keep torch's log off the screen. It is not switched off: the library listens to it."""
    logging.lastResort = None
    for name in ("torch", "torch._dynamo", "torch._subclasses.fake_tensor"):
        log = logging.getLogger(name)
        log.handlers[:] = [logging.NullHandler()]
        log.propagate = False


def main(argv: list[str] | None = None) -> int:
    options = parsed(argv)
    warnings.simplefilter("ignore")
    hush()
    if options.bare:
        name, _, seed = options.bare.partition(":")
        found = examine(KINDS[name], int(seed), {}, seconds=0, device=options.device)
        return int(found is not None and not found.foreign)
    if options.show:
        name, _, seed = options.show.partition(":")
        case = placed(KINDS[name].generate(int(seed)), options.device)
        print("nothing is generated" if case is None else KINDS[name].shown(case))
        found = examine(KINDS[name], int(seed), {}, device=options.device)
        print("no finding" if found is None else f"\n# cut down\n{found.script}\n{found.signature}\n{found.text}")
        return int(found is not None and not found.foreign)
    if options.worker is not None:
        return int(work(options, options.worker) > 0)
    options.out.mkdir(parents=True, exist_ok=True)
    return _supervise(options)


def _supervise(options: argparse.Namespace) -> int:
    """Keep JOBS processes at work; one that dies is a finding, and its place is taken from the next seed on."""
    end = time.monotonic() + 60 * options.minutes
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--cases",
        str(options.cases or 10**9),
        "--seed",
        str(options.seed),
        "--jobs",
        str(options.jobs),
    ]
    command += ["--kinds", ",".join(options.kinds), "--out", str(options.out)] + ["--first"] * options.first
    command += ["--having", ";".join(options.having), "--device", options.device]

    def start(worker: int, resume: bool) -> subprocess.Popen[bytes]:
        minutes = max(end - time.monotonic(), 0) / 60
        return subprocess.Popen([*command, "--minutes", f"{minutes:.3f}", "--worker", str(worker), *["--resume"] * resume])

    running = {worker: start(worker, options.resume) for worker in range(options.jobs)}
    while running:
        time.sleep(0.2)
        for worker, process in list(running.items()):
            status = process.poll()
            if status is None:
                continue
            del running[worker]
            if status not in (0, 1):
                at = json.loads((options.out / f"progress-{worker}-of-{options.jobs}-from-{options.seed}.json").read_text())
                Folder(options.out).add(Finding("process", 0, f"died · status {status}", f"the cases before these seeds: {at}", ""))
                if time.monotonic() < end:
                    running[worker] = start(worker, True)
    folder, ran = Folder(options.out), 0
    for worker in range(options.jobs):
        at = json.loads((options.out / f"progress-{worker}-of-{options.jobs}-from-{options.seed}.json").read_text())
        ran += sum((seed - options.seed - worker) // options.jobs for seed in at.values())
    print(f"{folder.table() or 'no findings'}\n{ran} cases from seed {options.seed} on")
    return int(any(not each.foreign for each in folder.findings()))


if __name__ == "__main__":
    sys.exit(main())
