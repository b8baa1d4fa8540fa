"""Parametrised tests of which some cases run always, and the others with `-m long`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def long_unless(always: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Return `cases` with the mark `long` on each for which `always` is false. A tuple stands for the values of several arguments."""
    return [case if always(case) else _long(case) for case in cases]


def long_beyond(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return `cases` with the mark `long` on all but the first `count`."""
    return [case if place < count else _long(case) for place, case in enumerate(cases)]


def _long(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
