"""What a pass is: requires, call, ensures; and how a pipeline of them is run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from amprewrite.ir.program import Program
from amprewrite.tables.errors import AmpRewriteError, PassError


@dataclass(frozen=True)
class PassResult:
    name: str
    modified: bool
    seconds: float


class Pass:
    """One named step over a Program. Subclasses are small shells round plain functions."""

    name: ClassVar[str]

    def requires(self, program: Program) -> None:
        """Raise PassError where the program is not ready for this pass."""

    def call(self, program: Program) -> bool:
        """Do it; True if anything changed."""
        raise PassError(f"{type(self).__name__} does nothing: it has no call method")

    def ensures(self, program: Program) -> None:
        """Raise PassError where the result breaks what this pass promises."""

    def __call__(self, program: Program) -> PassResult:
        started = time.perf_counter()
        self.requires(program)
        modified = self.call(program)
        self.ensures(program)
        return PassResult(self.name, modified, time.perf_counter() - started)


def run_passes(
    passes: Sequence[Pass], program: Program, between: Callable[[PassResult, Program], None] | None = None
) -> tuple[PassResult, ...]:
    """Run passes in order. An unexpected failure becomes a PassError naming the pass and those that ran before it."""
    results: list[PassResult] = []
    for each in passes:
        before = ", ".join(result.name for result in results) or "nothing"
        with failing_as_pass(f"pass {each.name}", f" on {program.name} after {before}"), no_collection():
            results.append(each(program))
        if between is not None:
            between(results[-1], program)
    return tuple(results)


@contextmanager
def failing_as_pass(what: str, where: str = "") -> Iterator[None]:
    """Turn an unexpected failure into a PassError, upon which the graph stays fp32 and says so: a bug of ours ends no training run."""
    try:
        yield
    except AmpRewriteError:
        raise
    except Exception as error:
        raise PassError(f"{what} failed{where}: {type(error).__name__}: {error}") from error


@contextmanager
def no_collection() -> Iterator[None]:
    """Leave Python's cycle collector off: a pass makes no garbage cycles, and scanning a large graph again and again would
    make it slower than linear."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
