"""Colour op by op as torch.autocast does at run time, with no look-ahead.

1. Ops on its lists are painted already.
2. Any other op takes the widest format of its fp32-or-low operands: high if one is high, low if all are low. 0-dim operands count only
   among other 0-dim ones, as in PyTorch's type promotion.
3. An op with no such operand is high.

Inputs and parameters are high. In canonical order makers precede readers, so one sweep suffices. Ties are repaired last.
"""

from __future__ import annotations

from amprewrite.ir.decisions import Decisions
from amprewrite.ir.held_wide import widest_of
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.problem import Problem
from amprewrite.passes.paint.paint_ties import paint_ties
from amprewrite.tables.vocabulary import Colour, Reason


class PaintAutocast(Pass[Problem, Decisions]):
    name = "paint-autocast"

    def call(self, problem: Problem, decisions: Decisions) -> bool:
        open_nodes = [node for node in problem.graph if node.name not in decisions.paints]
        high = {name for name, paint in decisions.paints.items() if paint.colour is not Colour.LOW}
        for node in open_nodes:
            value, is_high = widest_of(node, high)
            if value and not is_high:
                decisions.paint(node.name, Colour.LOW, Reason.FOLLOWS_INPUTS, because_of=value)
            else:
                decisions.paint(node.name, Colour.HIGH, Reason.WIDEST_INPUT if value else Reason.NOT_REACHED, because_of=value)
                high.add(node.name)
        paint_ties(problem, decisions)
        return bool(open_nodes)
