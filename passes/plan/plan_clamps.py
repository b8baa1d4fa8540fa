"""Clamp finite constants of ops that run low to the ends of the low range: beyond them they would become infinities.

A mask fill of -1e9 becomes -65504 in fp16, which still blocks a position; -inf times zero would be NaN. Infinities that the model
wrote stay what they are.
"""

from __future__ import annotations

from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.decisions import Decisions
from amprewrite.ir.problem import Problem
from amprewrite.tables.vocabulary import Colour, Edit


class PlanClamps(Pass[Problem, Decisions]):
    name = "plan-clamps"

    def call(self, problem: Problem, decisions: Decisions) -> bool:
        found = [name for name in problem.far_constants if decisions.paints[name].colour is Colour.LOW]
        for name in found:
            decisions.edit(problem, name, Edit.CLAMP_CONSTANTS)
        return bool(found)
