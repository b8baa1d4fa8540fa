"""The base class of passes (requires, call, ensures), and a function that runs a pipeline of them.

A pass reads one thing and edits another. Deciding passes read a `Problem` and add to `Decisions`. Applying passes read the plan
of a region and edit an fx graph. So neither kind can do the work of the other.
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
    """One named step. Subclasses are thin wrappers of plain functions."""

    name: ClassVar[str]

    def requires(self, read: Read, edited: Edited) -> None:
        """Raise PassError if the two are not ready for this pass."""

    def call(self, read: Read, edited: Edited) -> bool:
        """Run the pass. True if anything changed."""
        raise PassError(f"{type(self).__name__} does nothing: it has no call method")

    def ensures(self, read: Read, edited: Edited) -> None:
        """Raise PassError if the result breaks a promise of this pass."""

    def __call__(self, read: Read, edited: Edited) -> PassResult:
        started = time.perf_counter()
        self.requires(read, edited)
        modified = self.call(read, edited)
        self.ensures(read, edited)
        return PassResult(self.name, modified, time.perf_counter() - started)


def run_passes(passes: Sequence[Pass[Read, Edited]], read: Read, edited: Edited, where: str = "graph") -> tuple[PassResult, ...]:
    """Run passes in order on the graph called `where`, and return the result of each.

    An unexpected failure becomes a PassError that names the pass and the passes before it.
    """
    results: list[PassResult] = []
    for each in passes:
        before = ", ".join(result.name for result in results) or "nothing"
        with failing_as_pass(f"pass {each.name}", f" on {where} after {before}"), no_collection():
            results.append(each(read, edited))
    return tuple(results)


@contextmanager
def failing_as_pass(what: str, where: str = "") -> Iterator[None]:
    """Turn an unexpected exception into a PassError. The graph then stays fp32 with a warning: our bugs must not end a training run."""
    try:
        yield
    except AmpRewriteError:
        raise
    except Exception as error:
        raise PassError(f"{what} failed{where}: {type(error).__name__}: {error}") from error


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch Python's cycle collector off inside the block.

    A pass makes no garbage cycles, and scanning a large graph again and again would make it slower than linear.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
