"""The kinds of cases: how each makes, checks, cuts down and prints one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from amprewrite.passes.lower import group_weights
from tests.fuzz import onnx_files, option_sets, program_case, programs, states
from tests.fuzz.oracle import Problem


def _grouped(check: Callable[[Any], Problem | None]) -> Callable[[Any], Problem | None]:
    """A check that casts weights in groups at every other seed, as a GPU does."""

    def checked(case: Any) -> Problem | None:
        before = group_weights.WITHOUT_LAUNCHES, group_weights.LEAST
        if case.seed % 2:
            group_weights.WITHOUT_LAUNCHES, group_weights.LEAST = set(), 2
        try:
            return check(case)
        finally:
            group_weights.WITHOUT_LAUNCHES, group_weights.LEAST = before

    return checked


def _whole(case: Any, problem: Problem) -> Any:
    return case


@dataclass(frozen=True)
class Kind:
    name: str
    generate: Callable[[int], Any]
    check: Callable[[Any], Problem | None]
    smaller: Callable[[Any], Iterator[Any]]
    shown: Callable[[Any], str]
    tags: Callable[[Any], tuple[str, ...]]
    cut: Callable[[Any, Problem], Any] = _whole


_run, _follow = _grouped(program_case.check), _grouped(states.check)
KINDS = {
    "programs": Kind("programs", programs.generate, _run, programs.smaller, program_case.shown, programs.Program.tags),
    "states": Kind("states", states.generate, _follow, states.smaller, states.shown, states.Sequence.tags, states.cut),
    "options": Kind("options", option_sets.generate, option_sets.check, option_sets.smaller, option_sets.shown, option_sets.OptionSet.tags),
    "files": Kind("files", onnx_files.generate, onnx_files.check, onnx_files.smaller, onnx_files.shown, onnx_files.File.tags),
}
