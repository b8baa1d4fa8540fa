"""Choose low (bf16 or fp16) or high (fp32) op by op, by the rules that torch.autocast applies at run time, without look-ahead.

1. Ops on the lists of torch.autocast are painted before this pass.
2. Any other op takes the widest format of its operands: high if one is high, low if all are low. 0-dim operands count only if there are no
   operands with dims, as in PyTorch's type promotion.
3. An op without fp32 or low operands is high.

Inputs and parameters are high. One sweep suffices, because in canonical order every node follows the nodes that make its operands. At the
end, tied nodes (with shared memory or a shared kernel) get one colour.
"""

from __future__ import annotations

from amprewrite.ir.held_wide import widest_of
from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.vocabulary import Colour, Reason


class PaintAutocast(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        open_nodes = [node for node in problem.graph if node.name not in decisions.paints]
        high = {name for name, paint in decisions.paints.items() if paint.colour is not Colour.LOW}
        for node in open_nodes:
            value, is_high = widest_of(node, high)
            if value and not is_high:
                decisions.paint(node.name, Colour.LOW, Reason.FOLLOWS_INPUTS, because_of=value)
            else:
                decisions.paint(node.name, Colour.HIGH, Reason.WIDEST_INPUT if value else Reason.NOT_REACHED, because_of=value)
                high.add(node.name)
        decisions.tie(problem)
