"""Pad the convolutions that the plan names by a separate op in front of them.

    before   conv2d(x, weight, bias, 2, 1)
    after    conv2d(pad(x, (1, 1, 1, 1)), weight, bias, 2, 0)

`plan-kernel-needs` decides which convolutions need a separate op.
"""

from __future__ import annotations

import torch
import torch.fx
import torch.nn.functional as F

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.flow.kernel_pins import per_dim
from amprewrite.graphs.fx.node_facts import example_value, named_arguments, set_argument
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.tables.vocabulary import Edit


class PadApart(Pass[RegionPlan, EditedGraph]):
    name = "pad-apart"

    def __call__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        for name in plan.edited(Edit.PAD_APART):
            _pad_apart(edited.nodes[name])


def _pad_apart(node: torch.fx.Node) -> None:
    """Move the padding of one convolution into an op before it."""
    given = named_arguments(node)
    padding = per_dim(given["padding"], example_value(given["weight"]).dim() - 2)
    with node.graph.inserting_before(node):
        padded = node.graph.call_function(F.pad, (given["input"], [side for each in reversed(padding) for side in (each, each)]))
    set_argument(node, 0, "input", padded)
    set_argument(node, 4, "padding", 0)
