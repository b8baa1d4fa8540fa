"""Cut a failing case down: keep each smaller case that fails in the same way, until none does or processor time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from tests.fuzz.oracle import Problem

C = TypeVar("C")


def shrink(
    case: C, problem: Problem, check: Callable[[C], Problem | None], smaller: Callable[[C], Iterator[C]], seconds: float
) -> tuple[C, Problem]:
    """The smallest case found, and what is wrong with it."""
    end = time.process_time() + seconds
    progress = True
    while progress:
        progress = False
        for candidate in smaller(case):
            if time.process_time() > end:
                return case, problem
            found = check(candidate)
            if found is not None and (found.kind, found.where) == (problem.kind, problem.where):
                case, problem, progress = candidate, found, True
                break
    return case, problem
