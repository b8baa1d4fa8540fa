"""Consoles that print text unchanged, and progress bars on terminals and in notebooks.

The library rich is imported inside the functions that need it. Its import draws random numbers, and a rewrite must not change the state of
Python's generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


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

    rich's own bar is not used, because it shows nothing without ipywidgets.
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
