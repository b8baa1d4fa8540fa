"""Keep in fp32 the products of numbers that count something: positions, distances, indices, time steps.

torch.autocast rounds such products, unless the model switches it off around them. bf16 holds all integers up to 256. Beyond that,
neighbouring positions round to one number, and rotary angles are wrong by whole turns. These products are marked when the graph is read
(`ir/evidence/counts.py`). An override may still make them low.
"""

from __future__ import annotations

from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.vocabulary import Reason


class RepaintCounts(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        for node in problem.graph:
            if node.counted:
                decisions.keep_high(problem, node.name, Reason.COUNTS, because_of=node.counted)
        decisions.tie(problem)
