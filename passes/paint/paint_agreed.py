"""Take over the colours that other graphs of the model have decided.

1. An op that is known from another graph takes its colour there if the lists decide here, or if nothing has decided yet.
2. High is always taken over. Low is taken over if no fact, override or list keeps the op high here. If one does, high then holds for all
   graphs, and graphs that run the op low are captured anew.

    exp gelu matmul, where another graph runs gelu low  →  H L L
"""

from __future__ import annotations

from amprewrite.ir.decisions import Decisions
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.problem import Problem
from amprewrite.tables.vocabulary import Colour, Reason


class PaintAgreed(Pass[Problem, Decisions]):
    name = "paint-agreed"

    def call(self, problem: Problem, decisions: Decisions) -> bool:
        before, whys = dict(decisions.paints), problem.agreed.whys_of(problem.graph)
        for name, colour in problem.agreed.of(problem.graph).items():
            painted = decisions.paints.get(name)
            if painted is None or (colour is Colour.HIGH and painted.colour is Colour.LOW and painted.reason is Reason.ON_ALLOWLIST):
                decisions.paint(name, colour, Reason.AGREED, detail=whys[name])
        return decisions.paints != before
