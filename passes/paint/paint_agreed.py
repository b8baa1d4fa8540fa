"""Give ops the colours (low or high) that the same ops have in other captured graphs of the model.

1. An op without a colour gets the colour that the same op has in another graph.
2. An op that the allowlist made low becomes fp32 if it is high in another graph.
3. All other colours stay. If an explicit dtype, override or list keeps an op high that another graph runs low, then high will hold for all
   graphs, and the graphs that run the op low are captured again.

For example, exp is denied, gelu has no colour, matmul is allowed; another graph runs gelu low. Then exp is high, the other two are low.
"""

from __future__ import annotations

from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.vocabulary import Colour, Reason


class PaintAgreed(Pass[Problem, Decisions]):
    needs = ("agreed.places",)

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        whys = problem.agreed.whys_of(problem.graph)
        for name, colour in problem.agreed.of(problem.graph).items():
            painted = decisions.paints.get(name)
            if painted is None or (colour is Colour.HIGH and painted.colour is Colour.LOW and painted.reason is Reason.ON_ALLOWLIST):
                decisions.paint(name, colour, Reason.AGREED, detail=whys[name])
