"""Return a result as a view if the fp32 graph returns a view, such as the result of `tensordot` (before torch 2.15, of `linear`, too).

    before   to = tensordot.to(float32); return to
    after    to = tensordot.to(float32); view_as = to.view_as(to); return view_as

A cast returns a new tensor. Autograd treats a view differently if the caller calls `retain_grad` on a result, and then writes in place to
a view of this result: if the result is itself a view, the retained gradient leaves out the gradient through the written view.
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
    needs = ("training",)

    def __call__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        graph = edited.module.graph
        output = graph.find_nodes(op="output")[0]
        copies = [node for node in output.all_input_nodes if _is_copy(node) and list(node.users) == [output]]
        made = [node for node in copies if is_view(_copied(node))]
        for node in made:
            with graph.inserting_after(node):  # insert it right after the copy, so that both run in the same grad mode
                view = graph.call_method("view_as", (node, node))
            view.meta = {key: value for key, value in node.meta.items() if key not in (CAST, LEAVES, MEMORY)}
            output.replace_input_with(node, view)


def _is_copy(node: torch.fx.Node) -> bool:
    """True if the rewrite inserted the node: a cast, a pad, a slice, or a node that scales a gradient."""
    return CAST in node.meta or node.target in (resize, scale_gradient)


def _copied(node: torch.fx.Node) -> torch.fx.Node:
    """Return the value of which the result `node` is a copy: go back through all casts and other copies that the rewrite inserted."""
    value = node
    while _is_copy(value):
        given = value.args[0]
        assert isinstance(given, torch.fx.Node)
        value = given
    return value
