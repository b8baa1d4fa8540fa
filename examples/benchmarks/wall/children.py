"""What every wall shares: one process a case, with limits; one JSON line a case; and going on where an earlier run ended.

A case may hang, use up memory or end its process. Each runs in a child that is forked off with all imports made, so that only
its own line is lost. Where torch is built for CUDA the child is a new process: neither CUDA nor the threads of its autograd live on in a
forked one. Lines are appended at once: a run that is ended goes on from the last one when it is started again.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import multiprocessing
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
Work = Callable[[str], Row]
SECONDS = 60.0
GIGABYTES = 6.0


def in_child(work: Work, name: str, seconds: float = SECONDS, gigabytes: float | None = GIGABYTES) -> Row:
    """What `work` says of a case; that it died or was late where it says nothing. On a GPU there is no limit of memory."""
    context: Any = multiprocessing.get_context("spawn" if torch.backends.cuda.is_built() else "fork")
    here, there = context.Pipe(duplex=False)
    began = time.monotonic()
    child = context.Process(target=_answer, args=(there, work, name, gigabytes), daemon=True)
    child.start()
    there.close()
    row: Row = {"outcome": "late", "why": f"takes more than {seconds:g} s"}
    try:
        if here.poll(seconds):
            row = here.recv()
    except EOFError:
        row = {}
    finally:
        if child.is_alive() and row:
            child.kill()
        child.join()
        here.close()
    if not row:
        row = {"outcome": "died", "why": f"the process ended with status {child.exitcode}"}
    return {"name": name, **row, "seconds": round(time.monotonic() - began, 2)}


def _answer(there: Connection, work: Work, name: str, gigabytes: float | None) -> None:
    """Run in the child: the limits, silence, and the row."""
    if gigabytes is not None:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if Path("/proc/self/statm").exists() else 0
        most = held + int(gigabytes * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    try:
        there.send(work(name))
    except BaseException as error:
        there.send({"outcome": "broken", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"})
        raise


def run_cases(
    names: Sequence[str], work: Work, out: Path | None, seconds: float, gigabytes: float | None = GIGABYTES, jobs: int = 1
) -> Iterator[Row]:
    """A row for each case: those that `out` has already first, then the others, each appended to `out` as soon as it is there.

    `jobs` cases run at the same time.
    """
    have = {row["name"]: row for row in (read_rows(out) if out is not None and out.exists() else ())}
    yield from (have[name] for name in names if name in have)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(out.open("a")) if out is not None else None
        if file is not None and file.tell() and not out.read_text().endswith("\n"):
            print(file=file)  # behind a line that was cut off
        todo = [name for name in names if name not in have]
        rows: Iterable[Row] = (in_child(work, name, seconds, gigabytes) for name in todo)
        if jobs > 1:
            pool = stack.enter_context(ThreadPoolExecutor(jobs))
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)  # of a run that is ended
            rows = (done.result() for done in as_completed([pool.submit(in_child, work, name, seconds, gigabytes) for name in todo]))
        for row in rows:
            if file is not None:
                print(json.dumps(row), file=file, flush=True)
            yield row


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file; a last line that was cut off is left out."""
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


# -- the command line ------------------------------------------------------------------------
def parser(text: str | None, seconds: float) -> argparse.ArgumentParser:
    """The options that every wall takes; `seconds` is how long one of its cases may take."""
    options = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, help="file of JSON lines; a run goes on where the last one with it ended")
    options.add_argument("--html", type=Path, help="write the table there, too")
    options.add_argument("--only", default="", help="cases whose names hold one of these words, with commas between")
    options.add_argument("--shard", default="0/1", help="i/n: every n-th case, from the i-th on")
    options.add_argument("--seconds", type=float, default=seconds, help=f"limit of a case; {seconds:g} unless told")
    return options


def chosen(names: Iterable[str], asked: argparse.Namespace) -> list[str]:
    """The cases of this shard whose names hold a wanted word."""
    index, count = (int(part) for part in asked.shard.split("/"))
    words = [word for word in asked.only.split(",") if word]
    kept = [name for name in sorted(names) if not words or any(word in name for word in words)]
    return kept[index::count]


def follow(rows: Iterable[Row], total: int, good: frozenset[str]) -> list[Row]:
    """All rows; those that are not good are printed as they come."""
    found = []
    for row in rows:
        found.append(row)
        if row["outcome"] not in good:
            print(f"[{len(found)}/{total}] {row['name']}: {row['outcome']}: {row.get('why', '')}", file=sys.stderr, flush=True)
    return found


def tally(rows: Iterable[Row]) -> dict[str, int]:
    """How often each outcome occurs, the commonest first."""
    return dict(Counter(row["outcome"] for row in rows).most_common())


def page(title: str, rows: Sequence[Row], columns: Sequence[str]) -> str:
    """All rows as one page that needs nothing else."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        f'<tr class="{html.escape(str(row["outcome"]).replace(" ", "-"))}">'
        + "".join(f"<td>{html.escape(_shown(row.get(column, '')))}</td>" for column in columns)
        + "</tr>\n"
        for row in rows
    )
    counts = ", ".join(f"{count} {outcome}" for outcome, count in tally(rows).items())
    style = "body{font:14px sans-serif}td,th{padding:2px 8px;text-align:left}.right td:nth-child(2){color:#2a7}"
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{style}</style>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(counts)}</p><table><tr>{head}</tr>\n{body}</table>"
    )


def _shown(cell: object) -> str:
    return f"{cell:.2e}" if isinstance(cell, float) and cell and not 0.01 <= abs(cell) < 1000 else str(cell)
