"""Give tied nodes one colour. Nodes are tied if they share memory, or are results of one kernel.

The colour is high if one member is high, low if one is low and none is high. A tie without painted members is left open.
"""

from __future__ import annotations

from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.vocabulary import Colour, Reason


class PaintTies(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        paint_ties(problem, decisions)


def paint_ties(problem: Problem, decisions: Decisions) -> None:
    """Give all nodes that are tied (share memory or a kernel) one colour: high (fp32) if one is high, otherwise low if one is low.

    Tied nodes that all have no colour yet stay without one.
    """
    for members in problem.graph.precision_groups().values():
        painted = [name for name in members if name in decisions.paints]
        high = next((name for name in painted if decisions.paints[name].colour is Colour.HIGH), None)
        low = next((name for name in painted if decisions.paints[name].colour is Colour.LOW), None)
        cause = high or low
        if cause is None:
            continue
        colour = decisions.paints[cause].colour
        for name in members:
            if name not in decisions.paints or decisions.paints[name].colour is not colour:
                decisions.paint(name, colour, Reason.TIED, because_of=cause)
