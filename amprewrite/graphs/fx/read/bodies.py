"""Graphs inside a graph: the bodies of conditions, loops, scans, maps and custom autograd Functions.

A higher-order op calls its bodies with tensors of its own choosing: slices of what is scanned, what a loop carries, gradients. So a
body reads and gives fp32, as the graph around it does, whatever runs inside. A checkpoint's body alone may give low results.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx
from torch.utils._pytree import tree_leaves

from amprewrite.graphs.fx.node_facts import example_value, has_own_backward, is_checkpoint

KEPT = {
    "wrap_with_autocast": "the model's own autocast region decides there",
    "flex_attention": "its graph is part of an attention kernel",
    "flex_attention_backward": "its graph is part of an attention kernel",
}
"""Higher-order ops whose bodies stay as they are, and why."""


def inner_graphs(module: torch.fx.GraphModule) -> Iterator[tuple[torch.fx.Node, str]]:
    """Every node of `module` that runs a body with fp32 at its border, with the name of the attribute that holds the body."""
    for node in module.graph.nodes:
        if not isinstance(node.target, torch._ops.HigherOrderOperator) or is_checkpoint(node):
            continue
        for held in _graphs(node):
            if isinstance(getattr(module, str(held.target), None), torch.fx.GraphModule):
                yield node, str(held.target)


def unscaled(node: torch.fx.Node, name: str) -> bool:
    """Whether gradients pass the body `name` of `node` unscaled in a graph with loss scaling.

    The backward of an autograd Function is code of the user and sees gradients as they are. What is around it in a body, such as that
    of a condition, has a backward that nothing scales. Nothing is differentiated in the forward of an autograd Function.
    """
    if "autograd_function" in str(node.target):
        return bool(_graphs(node)) and name != str(_graphs(node)[0].target)
    return has_own_backward(node)


def operands(node: torch.fx.Node, body: torch.fx.GraphModule) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """Each input of `body` that is a value of the graph around it as it stands there, with that value."""
    placeholders = body.graph.find_nodes(op="placeholder")
    held = set(_graphs(node))
    outer = [leaf for leaf in tree_leaves(node.args) if isinstance(leaf, torch.fx.Node) and leaf not in held]
    pairs = zip(reversed(placeholders), reversed(outer), strict=False)  # what comes first, such as a predicate, is no operand
    return [(inner, given) for inner, given in pairs if _shape(inner) == _shape(given) is not None]


def _graphs(node: torch.fx.Node) -> list[torch.fx.Node]:
    return [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, torch.fx.Node) and leaf.op == "get_attr"]


def _shape(node: torch.fx.Node) -> tuple[object, ...] | None:
    value = example_value(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


__all__ = ["KEPT", "inner_graphs", "operands", "unscaled"]
