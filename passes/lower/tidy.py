"""Remove nodes that the rewrite made idle: conversions to the dtype a value already has, and copies that nothing reads.

Zeros and ones, such as the initial state of an LSTM, are made directly in the low format if only casts read them.

A conversion is removed only if it does nothing else: a cast that also pads or scales gradients stays if anything reads it. A conversion
that changes the dtype stays, even if a later conversion changes it back.
"""

from __future__ import annotations

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.node_facts import CONVERSIONS, example_value, tensors
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with

_ZEROS_AND_ONES = ops_with(Trait.UNIFORM) - ops_with(Trait.FILLS)


class Tidy(Pass[RegionPlan, EditedGraph]):
    def __call__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        remove_idle_conversions(edited.module.graph)
        make_in_format(edited.module.graph)
        edited.module.recompile()


def remove_idle_conversions(graph: torch.fx.Graph) -> None:
    """Remove from `graph`, in place, each `x.to(dtype)` whose x has that dtype already, and each inserted cast that nothing reads.

    The example value of x tells its dtype. Without one, `x.to(dtype)` stays.
    """
    for node in list(graph.nodes):
        if node.op == "call_method" and op_name(node.target) in CONVERSIONS and _is_idle(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif CAST in node.meta and not node.users:
            graph.erase_node(node)


def make_in_format(graph: torch.fx.Graph) -> None:
    """If only inserted casts read a tensor of zeros or ones, make it directly in the dtype of each cast, which saves launches."""
    found = [node for node in graph.nodes if node.users and _is_made_of_sizes(node) and all(_copies(user, node) for user in node.users)]
    for node in found:
        for copy in list(node.users):
            with graph.inserting_before(copy):
                made = graph.call_function(node.target, node.args, {**node.kwargs, "dtype": copy.args[1]})
            made.meta = {key: value for key, value in copy.meta.items() if key != CAST}
            copy.replace_all_uses_with(made)
            graph.erase_node(copy)
        graph.erase_node(node)


def _is_made_of_sizes(node: torch.fx.Node) -> bool:
    """True if a node makes zeros or ones in new memory, from sizes alone."""
    if node.op != "call_function" or op_name(node.target) not in _ZEROS_AND_ONES or node.kwargs.get("out") is not None:
        return False
    return not node.kwargs.get("requires_grad") and not any(tensors(example_value(given)) for given in node.all_input_nodes)


def _copies(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """True if `user` is a cast of `node` that the rewrite inserted."""
    return CAST in user.meta and user.op == "call_method" and user.target == "to" and user.args[:1] == (node,) and len(user.args) == 2


def _is_idle(node: torch.fx.Node) -> bool:
    """True if a conversion asks for the dtype that its operand has: PyTorch would return the same tensor."""
    source = node.args[0]
    if node.kwargs or len(node.args) != 2 or not isinstance(node.args[1], torch.dtype) or not isinstance(source, torch.fx.Node):
        return False
    found = tensors(example_value(source))
    return len(found) == 1 and found[0].dtype == node.args[1]
