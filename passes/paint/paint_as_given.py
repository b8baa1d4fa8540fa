"""Give each node the colour (low, high or plain) that it has in a given plan, which the user may have edited.

1. Every node takes the colour and the reason that the given plan has for it.
2. A node that the plan does not list carries no fp32 value, so it gets the colour plain.
3. Tied nodes take one colour, even if an edit gave them two.
"""

from __future__ import annotations

from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.errors import PassError
from amprewrite.tables.vocabulary import Colour, Reason


class PaintAsGiven(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        if problem.given is None:
            raise PassError("paint-as-given follows a plan, and none is given")
        for node in problem.given.nodes:
            if node.name in problem.graph.nodes:
                decisions.paint(node.name, node.colour, node.reason, node.because_of, node.detail)
        for vertex in problem.graph:
            if vertex.name not in decisions.paints:
                decisions.paint(vertex.name, Colour.PLAIN, Reason.NO_FLOAT)
        decisions.tie(problem)
