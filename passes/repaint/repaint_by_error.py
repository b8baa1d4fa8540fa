"""Keep in fp32 the nodes that the accuracy search (`tolerance=`) found too inexact in the low format.

1. The search (`rewrite(model, tolerance=...)`, `accuracy="autocast"`) gives the nodes to keep in fp32, for each graph, with reasons.
2. Each of these nodes is painted high, unless an override asks for low, or the node is a result that the body of a checkpoint returns low.
   Tied nodes (with shared memory or a shared kernel) get one colour.
3. A graph that the search never ran, for example a graph for training, is planned without the search, and its plan has a note.
"""

from __future__ import annotations

from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.vocabulary import Colour, Reason


class RepaintByError(Pass[Problem, Decisions]):
    needs = ("keep_high",)

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        assert problem.keep_high is not None
        keep = problem.keep_high.of(problem.graph)
        if keep is None:
            decisions.note("the search for an accuracy never ran this graph: it is planned without regard to accuracy")
            return
        for name, why in keep.items():
            paint = decisions.paints.get(name)
            if paint is None or (paint.colour is Colour.LOW and paint.reason not in (Reason.ASKED, Reason.BODY)):
                decisions.paint(name, Colour.HIGH, Reason.SENSITIVE, detail=why)
        decisions.tie(problem)
