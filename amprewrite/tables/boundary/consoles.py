"""Where the library prints: consoles that show text as it is, and bars where somebody can watch them.

rich draws from Python's random numbers as it is imported, which a rewrite must not: it is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console(stderr: bool = False, **options: Any) -> Console:
    """A console that prints names as they are: no ":x:" becomes a picture, no "[x]" a style."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, **options)


def watched(found: Console) -> bool:
    """Whether somebody can watch a bar there: on a terminal, or in a notebook."""
    return found.is_terminal or found.is_jupyter


@contextmanager
def bar(what: str, total: int | None, shown: bool = True) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr where somebody can watch it; gives the function that counts one on."""
    screen = console(stderr=True)
    if not (shown and watched(screen)):
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


__all__ = ["bar", "console", "watched"]
