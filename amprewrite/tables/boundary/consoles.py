"""Output of the library: consoles that print text unchanged, and progress bars on terminals and in notebooks.

rich draws from Python's random numbers on import, which a rewrite must not do: it is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console(stderr: bool = False, **options: Any) -> Console:
    """A console that prints names unchanged: ":x:" becomes no picture and "[x]" no style."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, **options)


@contextmanager
def bar(what: str, total: int | None, shown: bool = True) -> Iterator[Callable[[], None]]:
    """Progress for a user who watches: a bar on a terminal, a line in a notebook. Yields the function that advances it by one."""
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
    """A line in the notebook cell that counts. rich's own bar needs ipywidgets, and shows nothing without it."""
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


__all__ = ["bar", "console"]
