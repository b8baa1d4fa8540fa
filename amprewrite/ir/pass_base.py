"""The base class of passes and a function that runs a pipeline of them.

A pass reads one object and edits another. Deciding passes read a `Problem` and edit `Decisions`. Applying passes read a `RegionPlan` and
edit an fx graph. So a deciding pass cannot change a graph, and an applying pass cannot decide.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import ClassVar, Generic, TypeVar

from amprewrite.tables.errors import AmpRewriteError, PassError

Read = TypeVar("Read")
"""Type of the object that a pass reads."""
Edited = TypeVar("Edited")
"""Type of the object that a pass edits."""


class Pass(Generic[Read, Edited]):
    """One step of a pipeline. A subclass defines `__call__`, which calls plain functions to do the work."""

    name: ClassVar[str]
    """Name of the pass in messages and in `amprewrite passes`: that of its class in small letters, such as "repaint-by-cost"."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Attributes of the object that the pass reads, such as "policy.products". If none of them is set, the pass has nothing to do and is
    not called. () for a pass that always runs."""

    def __init_subclass__(cls) -> None:
        cls.name = re.sub("(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()

    def __call__(self, read: Read, edited: Edited) -> None:
        """Run the pass on `edited`. Raise PassError if `read` or `edited` is not ready for it."""
        raise PassError(f"{type(self).__name__} does nothing: it has no __call__ method")


def run_passes(passes: Sequence[Pass[Read, Edited]], read: Read, edited: Edited, where: str = "graph") -> None:
    """Run the passes that have something to do, in order. `where` is the name of the graph in error messages.

    An unexpected exception becomes a PassError that names the pass and the passes that ran before it.
    """
    for place, each in enumerate(passes):
        if each.needs and not any(attrgetter(name)(read) for name in each.needs):
            continue
        before = ", ".join(earlier.name for earlier in passes[:place]) or "nothing"
        with failing_as_pass(f"pass {each.name}", f" on {where} after {before}"), no_collection():
            each(read, edited)


@contextmanager
def failing_as_pass(what: str, where: str = "") -> Iterator[None]:
    """Turn an unexpected exception of the `with` block into a PassError ("`what` failed `where`"); amprewrite's own errors pass through.

    The caller can then leave the graph in fp32 with a warning, so that a bug in a pass does not end a training run.
    """
    try:
        yield
    except AmpRewriteError:
        raise
    except Exception as error:
        raise PassError(f"{what} failed{where}: {type(error).__name__}: {error}") from error


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch Python's cycle collector off inside the `with` block.

    The collector would scan a growing graph again and again, so that the time would grow faster than the graph. This changes no result:
    garbage cycles are collected after the block, and the collector is on again even if the block raises. It is off in all threads.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
