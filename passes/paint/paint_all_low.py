"""Give the low format (bf16 or fp16) to all nodes whose format is not decided yet, as Apex's O2 and O3 do."""

from __future__ import annotations

from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.vocabulary import Colour, Reason


class PaintAllLow(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        for node in problem.graph:
            if node.name not in decisions.paints:
                decisions.paint(node.name, Colour.LOW, Reason.FORCED)
