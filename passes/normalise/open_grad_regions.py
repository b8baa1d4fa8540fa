"""Inline the `no_grad` sub-graphs of torch.export, so that the passes see every op.

    before   y = wrap_with_set_grad_enabled(False, body, x)
    after    _set_grad_enabled(False); y = relu(x); _set_grad_enabled(True)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.fx.node import map_arg

from amprewrite.graphs.fx.captured import EditedGraph, Reading
from amprewrite.ir.pass_base import Pass
from amprewrite.torch_internals.dispatch import set_grad_enabled


class OpenGradRegions(Pass[Reading, EditedGraph]):
    def __call__(self, reading: Reading, edited: EditedGraph) -> None:
        open_grad_regions(edited.module)


def open_grad_regions(module: torch.fx.GraphModule) -> None:
    """Replace each `wrap_with_set_grad_enabled` subgraph by its nodes between two calls that set the grad mode.

    The result has the form in which Dynamo captures such regions. torch.export wraps them again when the edited graph is exported.
    """
    while node := next((n for n in module.graph.nodes if n.target is torch.ops.higher_order.wrap_with_set_grad_enabled), None):
        _open(module, node)
    module.recompile()


def _open(module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    enabled, body_node, *operands = node.args
    assert isinstance(body_node, torch.fx.Node)
    body = module.get_submodule(str(body_node.target))
    assert isinstance(body, torch.fx.GraphModule)
    graph, inner = module.graph, {}
    feeders = iter(operands)
    with graph.inserting_before(node):
        graph.call_function(set_grad_enabled, (enabled,))
        for each in body.graph.nodes:
            if each.op == "placeholder":
                inner[each] = next(feeders)
            elif each.op == "output":
                results = map_arg(each.args[0], inner.__getitem__)
            elif each.op == "get_attr":
                inner[each] = _moved_attribute(module, body, each)
            else:
                inner[each] = graph.node_copy(each, inner.__getitem__)  # type: ignore[arg-type]
        graph.call_function(set_grad_enabled, (not enabled,))
    for user in list(node.users):  # each user is a getitem of one result, because the subgraph returns a tuple
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
    if not body_node.users:
        graph.erase_node(body_node)


def _moved_attribute(module: torch.fx.GraphModule, body: torch.fx.GraphModule, node: torch.fx.Node) -> torch.fx.Node:
    """Insert a node into the outer graph that reads the attribute `node` of `body`, a subgraph or a constant, and return the new node."""
    held: Any = body
    for part in str(node.target).split("."):
        held = getattr(held, part)
    name = str(node.target).replace(".", "_")
    while hasattr(module, name):
        name += "_"
    setattr(module, name, held)
    copy = module.graph.get_attr(name)
    copy.meta = dict(node.meta)
    return copy
