"""The base class of passes (requires, call, ensures), and a function that runs a pipeline of them.

A pass reads one object and edits another. Deciding passes read a `Problem` and edit `Decisions`. Applying passes read a `RegionPlan` and
edit an fx graph. So a deciding pass cannot change a graph, and an applying pass cannot decide.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from amprewrite.tables.errors import AmpRewriteError, PassError

Read = TypeVar("Read")
"""Type of the object that a pass reads."""
Edited = TypeVar("Edited")
"""Type of the object that a pass edits."""


@dataclass(frozen=True)
class PassResult:
    """The result of one pass: whether it changed anything, and its time."""

    name: str
    modified: bool
    seconds: float


class Pass(Generic[Read, Edited]):
    """One named step of a pipeline. A subclass defines `name` and `call`, and calls plain functions to do the work."""

    name: ClassVar[str]

    def requires(self, read: Read, edited: Edited) -> None:
        """Raise PassError if `read` or `edited` is not ready for this pass."""

    def call(self, read: Read, edited: Edited) -> bool:
        """Run the pass on `edited`. Return True if anything changed."""
        raise PassError(f"{type(self).__name__} does nothing: it has no call method")

    def ensures(self, read: Read, edited: Edited) -> None:
        """Raise PassError if `edited`, after the pass, breaks a promise of this pass."""

    def __call__(self, read: Read, edited: Edited) -> PassResult:
        started = time.perf_counter()
        self.requires(read, edited)
        modified = self.call(read, edited)
        self.ensures(read, edited)
        return PassResult(self.name, modified, time.perf_counter() - started)


def run_passes(passes: Sequence[Pass[Read, Edited]], read: Read, edited: Edited, where: str = "graph") -> tuple[PassResult, ...]:
    """Run passes in order, and return the result of each. `where` is the name of the graph in error messages.

    An unexpected exception becomes a PassError that names the pass and the passes that ran before it.
    """
    results: list[PassResult] = []
    for each in passes:
        before = ", ".join(result.name for result in results) or "nothing"
        with failing_as_pass(f"pass {each.name}", f" on {where} after {before}"), no_collection():
            results.append(each(read, edited))
    return tuple(results)


@contextmanager
def failing_as_pass(what: str, where: str = "") -> Iterator[None]:
    """Turn an unexpected exception of the block into a PassError; amprewrite's own errors pass through.

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
    """Switch Python's cycle collector off inside the block.

    A pass makes no garbage cycles, and repeated scans of a large graph by the collector would make its run time more than linear.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
