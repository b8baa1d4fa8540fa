"""Values that so many ops read that a low format would lose gradients in adding them up."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import differentiable, example_value, tensors
from amprewrite.ir.op_graph import OpGraph
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with

_STOP = ops_with(Trait.STOPS_GRADIENT)
MOST_READERS = 8
"""So many gradients a low format may add up: each sum is rounded, which for eight is what one product's rounding is in bf16, 0.4 %."""


def trained_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes whose values a backward gives gradients: parameters and inputs that want them, and what is made of such."""
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        value = example_value(node)
        held = node.op in ("placeholder", "get_attr")
        learns = value.requires_grad if held and isinstance(value, torch.Tensor) else not found.isdisjoint(node.all_input_nodes)
        if learns and op_name(node.target) not in _STOP and any(map(differentiable, tensors(value))):
            found.add(node)
    return found


def trained_values(nodes: Mapping[str, torch.fx.Node]) -> frozenset[str]:
    """The names of `trained_nodes` among `nodes`, which are of one graph."""
    trained = trained_nodes(next(iter(nodes.values())).graph) if nodes else set()
    return frozenset(name for name, node in nodes.items() if node in trained)


def read_by_many(graph: OpGraph, nodes: Mapping[str, torch.fx.Node], trained: Set[str]) -> tuple[str, ...]:
    """Values among the trained that more than MOST_READERS ops read: memories of encoders, biases shared by layers, matrices of loops.

    torch.autocast copies each for every reader, and adds the gradients of the copies up in fp32. Of weights it makes one copy, too.
    """
    names = {node: name for name, node in nodes.items()}
    found = list[str]()
    for name in trained:
        many = sum(names.get(user) in trained for user in nodes[name].users) > MOST_READERS
        if many and graph[name].carries_fp32 and graph[name].role != "parameter":
            found.append(name)
    return tuple(sorted(found, key=graph.rank.__getitem__))


__all__ = ["MOST_READERS", "read_by_many", "trained_nodes", "trained_values"]
