"""Make text safe to print, make consoles that print text unchanged, and show progress bars on terminals and in notebooks.

Names from files may hold control characters, or characters that no encoding can write. `fragment` returns text and a table as HTML.

The library rich is imported inside the functions that need it. Its import draws random numbers, and a rewrite must not change the state of
Python's generator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_STEERING = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Matches control characters, marks that change the direction of writing, line separators and lone halves of surrogate pairs."""


def printable(text: object) -> str:
    r"""Return the text on one line, with every character that could steer a terminal replaced by an escape sequence.

    >>> printable("relu\x1b[31m")
    'relu\\x1b[31m'
    """
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], str(text))


_CELL = "padding:2px 10px;white-space:nowrap"


def fragment(lines: Iterable[str], titles: Sequence[str] = (), rows: Iterable[Sequence[str]] = ()) -> str:
    """Return HTML for a notebook: the text `lines`, then a table of `rows` under `titles`. Without titles there is no table.

    All text is escaped. The first column holds text and is aligned to the left. The others hold figures and are aligned to the right.
    """

    def row(tag: str, cells: Sequence[str]) -> str:
        sides = ("left", *["right"] * (len(cells) - 1))
        shown = zip(sides, cells, strict=True)
        return "<tr>" + "".join(f'<{tag} style="{_CELL};text-align:{side}">{_safe(cell)}</{tag}>' for side, cell in shown) + "</tr>"

    head = f'<p style="margin:4px 0">{"<br>".join(map(_safe, lines))}</p>'
    table = f"<table><thead>{row('th', titles)}</thead><tbody>{''.join(row('td', each) for each in rows)}</tbody></table>" if titles else ""
    return f"<div>{head}{table}</div>"


def _safe(text: str) -> str:
    return escape(printable(text))


def console(stderr: bool = False, **options: Any) -> Console:
    """Return a rich console that prints text unchanged: it turns neither ":x:" into an emoji nor "[x]" into a style."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, **options)


@contextmanager
def bar(what: str, total: int | None, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Show the progress of the `with` block under the title `what`: a bar on a terminal, a line in a notebook, nothing elsewhere.

    Yields the function that advances the progress by one step. `total` is the number of steps, None if unknown. shown=False shows nothing.
    """
    screen = console(stderr=True)
    if shown and screen.is_jupyter:
        yield _line(what, total)
        return
    if not (shown and screen.is_terminal):
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def _line(what: str, total: int | None) -> Callable[[], None]:
    """Show a line with a count in the notebook cell, and return the function that adds one to the count.

    The line replaces rich's progress bar, which shows nothing in a notebook without ipywidgets.
    """
    from IPython.display import display

    count, of = 0, "" if total is None else f" of {total}"

    def text() -> dict[str, str]:
        return {"text/plain": f"{what}: {count}{of}"}

    shown = display(text(), raw=True, display_id=True)

    def advance() -> None:
        nonlocal count
        count += 1
        shown.update(text(), raw=True)

    return advance
