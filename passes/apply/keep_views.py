"""Let a result leave as a view if it is one in fp32, as that of `linear` of more than two dims is: of a hidden tensor.

    before   to = linear.to(float32); return to
    after    to = linear.to(float32); view_as = to.view_as(to); return view_as

A cast makes a tensor of its own. Where the caller writes a view of the result in place, autograd goes on otherwise for the two:
the gradient that `retain_grad` keeps of the result has no part of what comes by that view, if the result is a view itself.
"""

from __future__ import annotations

import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.node_facts import LEAVES, MEMORY
from amprewrite.graphs.fx.ops.pad_ops import resize
from amprewrite.graphs.fx.ops.scale_ops import scale_gradient
from amprewrite.graphs.fx.read.aliasing import is_view
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes.apply.insert_casts import CAST


class KeepViews(Pass[RegionPlan, EditedGraph]):
    name = "keep-views"

    def call(self, plan: RegionPlan, edited: EditedGraph) -> bool:
        graph = edited.module.graph
        output = graph.find_nodes(op="output")[0]
        copies = [node for node in output.all_input_nodes if plan.training and _is_copy(node) and list(node.users) == [output]]
        made = [node for node in copies if is_view(_copied(node))]
        for node in made:
            with graph.inserting_after(node):  # under the grad mode of the copy
                view = graph.call_method("view_as", (node, node))
            view.meta = {key: value for key, value in node.meta.items() if key not in (CAST, LEAVES, MEMORY)}
            output.replace_input_with(node, view)
        return bool(made)


def _is_copy(node: torch.fx.Node) -> bool:
    """Whether the rewrite made the node: a cast, a change of size, or the place where a gradient is scaled."""
    return CAST in node.meta or node.target in (resize, scale_gradient)


def _copied(node: torch.fx.Node) -> torch.fx.Node:
    """The value that a result is a copy of."""
    value = node
    while _is_copy(value):
        given = value.args[0]
        assert isinstance(given, torch.fx.Node)
        value = given
    return value
