"""Give fp32 weights of one, a weight for each channel, to the norms that the plan names.

    before   batch_norm(x, None, None)
    after    batch_norm(x, None, None, x.new_ones(x.size(1), dtype=torch.float32))

`plan-kernel-needs` decides which norms need weights.
"""

from __future__ import annotations

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.node_facts import set_argument
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.tables.vocabulary import Edit


class InsertNormWeights(Pass[RegionPlan, EditedGraph]):
    name = "insert-norm-weights"

    def __call__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        for name in plan.edited(Edit.FP32_STATISTICS):
            give_ones(edited.nodes[name])


def give_ones(node: torch.fx.Node) -> None:
    """Let a norm without weights multiply by fp32 ones, one for each channel."""
    graph = node.graph
    values = node.args[0] if node.args else node.kwargs["input"]
    with graph.inserting_before(node):
        channels = graph.call_method("size", (values, 1))
        ones = graph.call_method("new_ones", (values, (channels,)), {"dtype": torch.float32})
    set_argument(node, 3, "weight", ones)
