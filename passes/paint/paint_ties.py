"""Give tied nodes one colour (low or high). Nodes are tied if they share memory, or are results of one kernel.

The colour is high if one member is high, low if one is low and none is high. If no member has a colour yet, none gets one.
"""

from __future__ import annotations

from amprewrite.ir.pass_base import Decisions, Pass, Problem


class PaintTies(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        decisions.tie(problem)
