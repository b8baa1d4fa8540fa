"""Colour op by op as torch.autocast does at run time, with no look-ahead.

1. Ops on its lists are painted already.
2. Any other op takes the widest of its fp32-or-low operands: high where one arrives high, low where all arrive low.
   0-dim operands count only beside other 0-dim ones, as in PyTorch's type promotion.
3. An op with no such operand stays as it is.

Inputs and parameters arrive high. In canonical order makers come before readers, so one sweep suffices; ties are mended last.
"""

from __future__ import annotations

from amprewrite.ir.op_graph import Demand, OpNode
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.decisions import Decisions
from amprewrite.ir.problem import Problem
from amprewrite.passes.paint.paint_ties import paint_ties
from amprewrite.tables.vocabulary import Colour, Reason


class PaintAutocast(Pass[Problem, Decisions]):
    name = "paint-autocast"

    def call(self, problem: Problem, decisions: Decisions) -> bool:
        open_nodes = [node for node in problem.graph if node.name not in decisions.paints]
        for node in open_nodes:
            _paint_widest(decisions, node)
        paint_ties(problem, decisions)
        return bool(open_nodes)


def _paint_widest(decisions: Decisions, node: OpNode) -> None:
    read = [o for o in node.operands if o.demand in (Demand.COLOUR, Demand.PROMOTE)]
    counted = [o for o in read if not o.scalar] or read
    high = next((o.value for o in counted if decisions.paints[o.value].colour is not Colour.LOW), None)
    if not counted:
        decisions.paint(node.name, Colour.HIGH, Reason.NOT_REACHED)
    elif high is not None:
        decisions.paint(node.name, Colour.HIGH, Reason.WIDEST_INPUT, because_of=high)
    else:
        decisions.paint(node.name, Colour.LOW, Reason.FOLLOWS_INPUTS, because_of=counted[0].value)
