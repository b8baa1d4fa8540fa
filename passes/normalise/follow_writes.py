"""Let nodes after an in-place op read the result of the op instead of the tensor to which it wrote: both are the same tensor.

    before   y = x @ w; add_ = y.add_(b); mul = y * 2
    after    y = x @ w; add_ = y.add_(b); mul = add_ * 2

Then no node after the write reads `y` itself, so the write may go to a cast copy of `y`. In the example the product may run in bf16 and the
sum in fp32, as if the model had written `y = y + b`. If the grad mode changes between the op that makes the value and the write, readers
still read the value itself, because the value and the result of the write then have different autograd histories.
"""

from __future__ import annotations

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Reading
from amprewrite.graphs.fx.node_facts import GRAD_SWITCHES, example_value, is_opaque, transformed_nodes, written
from amprewrite.ir.pass_base import Pass
from amprewrite.tables.ops.op_lists import op_name


class FollowWrites(Pass[Reading, EditedGraph]):
    def __call__(self, reading: Reading, edited: EditedGraph) -> None:
        places: dict[torch.fx.Node, int] = {}
        apart, switch = transformed_nodes(edited.module.graph), -1
        for place, node in enumerate(edited.module.graph.nodes):
            places[node] = place
            if op_name(node.target) in GRAD_SWITCHES:
                switch = place
            target = next((each for each in node.all_input_nodes if _gives(node, each)), None)
            if target is None or target.op in ("placeholder", "get_attr") or node in apart or places[target] < switch:
                continue
            for user in [user for user in target.users if user is not node and user not in places]:
                user.replace_input_with(target, node)


def _gives(node: torch.fx.Node, operand: torch.fx.Node) -> bool:
    """True if a node writes to `operand` in place and returns that same tensor."""
    value = example_value(node)
    if not isinstance(value, torch.Tensor) or value is not example_value(operand) or is_opaque(node):
        return False
    return node.op in ("call_function", "call_method") and operand in written(node)
