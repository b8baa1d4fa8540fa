"""Print the output of the command line: tables, coloured text on terminals, JSON for --json, and progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.text import Text

from amprewrite.tables.boundary.printable import console, printable

STYLES = {
    "low": "cyan", "high": "yellow", "cast": "magenta", "plain": "dim", "module": "bold", "graph": "bold underline",
    "title": "bold", "note": "dim", "bad": "bold red", "good": "green", "": "",
}  # fmt: skip
"""The style of a line on a terminal, by kind of line."""
OUT = console(soft_wrap=True)
ERR = console(stderr=True, soft_wrap=True)


def say(lines: Iterable[tuple[str, str]]) -> None:
    """Print lines, each given as (kind, text). The kind, such as "title" or "bad", selects a style in `STYLES`.

    On a terminal, lines are coloured by style and cut to the terminal's width. In a pipe, lines are plain and whole.
    """
    for kind, text in lines:
        text = printable(text)
        shown = text if not OUT.is_terminal or len(text) <= OUT.width else f"{text[: OUT.width - 1]}…"
        OUT.print(Text(shown, style=STYLES.get(kind, "")))


def text(found: str) -> None:
    """Print text without cutting lines; a terminal wraps long lines. Lines about heavy fp32 ops and omitted parts are coloured."""
    for line in found.split("\n") if found else ():
        bad = line.startswith(("heavy op left high", "left out"))
        OUT.print(Text(printable(line), style=STYLES["high"] if bad else ""))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], kinds: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """Align rows in columns. Yield (kind, text) for each line, for the function `say`, with the titles first.

    `kinds` has the kind of each row, which selects its style in `STYLES`. Without `kinds`, rows have no style.
    """
    held = [list(map(str, row)) for row in rows]
    widths = [max([len(title), *(len(row[column]) for row in held)]) for column, title in enumerate(titles)]
    named = [*kinds] or [""] * len(held)

    def line(cells: Sequence[str]) -> str:
        return "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()

    yield "title", line(titles)
    for kind, row in zip(named, held, strict=True):
        yield kind, line(row)


def as_json(data: Any) -> None:
    """Print data as JSON. Infinities and NaN become strings, since JSON cannot hold them as numbers."""
    sys.stdout.write(json.dumps(_sound(data), indent=1) + "\n")


def _sound(data: Any) -> Any:
    if isinstance(data, float) and (data != data or data in (float("inf"), float("-inf"))):
        return str(data)
    if isinstance(data, dict):
        return {key: _sound(value) for key, value in data.items()}
    return [_sound(value) for value in data] if isinstance(data, list | tuple) else data


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show a spinner with the text `what` and the elapsed time on stderr inside a `with` block. Do nothing if stderr is no terminal."""
    if not ERR.is_terminal:
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=ERR, transient=True) as progress:
        progress.add_task(printable(what), total=None)
        yield
