"""Clamp finite constants of low ops to ±max of the low format, because beyond it they would become infinities.

A mask fill of -1e9 becomes -65504 in fp16, which still blocks a position; -inf times zero would be NaN. Infinities that the model wrote are
not changed.
"""

from __future__ import annotations

from amprewrite.ir.decisions import Decisions
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.problem import Problem
from amprewrite.tables.vocabulary import Edit


class PlanClamps(Pass[Problem, Decisions]):
    name = "plan-clamps"

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        decisions.edit_low(problem, problem.far_constants, Edit.CLAMP_CONSTANTS)
