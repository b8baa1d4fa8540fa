"""Find values with so many readers that adding up their gradients in a low format would lose accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import differentiable, example_value, tensors
from amprewrite.ir.op_graph import OpGraph
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with

_STOP = ops_with(Trait.STOPS_GRADIENT)
MOST_READERS = 8
"""Largest number of gradients of one value that may be added up in a low format.

Each addition rounds. In bf16, eight additions together are off by as much as one product: by 0.4 %.
"""


def trained_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes that get gradients: parameters and inputs that require them, and values computed from these, up to a `detach`."""
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        value = example_value(node)
        held = node.op in ("placeholder", "get_attr")
        learns = value.requires_grad if held and isinstance(value, torch.Tensor) else not found.isdisjoint(node.all_input_nodes)
        if learns and op_name(node.target) not in _STOP and any(map(differentiable, tensors(value))):
            found.add(node)
    return found


def trained_values(nodes: Mapping[str, torch.fx.Node]) -> frozenset[str]:
    """Return the names of the nodes among `nodes` whose values get gradients. All of `nodes` must belong to one graph."""
    trained = trained_nodes(next(iter(nodes.values())).graph) if nodes else set()
    return frozenset(name for name, node in nodes.items() if node in trained)


def read_by_many(graph: OpGraph, nodes: Mapping[str, torch.fx.Node], trained: Set[str]) -> tuple[str, ...]:
    """Return the names of fp32 values that get gradients from more than MOST_READERS readers. `trained` names all values with gradients.

    An example is the result of an encoder, which every layer of a decoder reads. torch.autocast casts such a value for every reader and
    adds up the gradients of the copies in fp32. Another is the weight of a cell that a loop calls in each time step: torch.autocast keeps
    one copy of it, and adds up the gradients of all steps in the low format.
    """
    names = {node: name for name, node in nodes.items()}
    found = list[str]()
    for name in trained:
        many = sum(names.get(user) in trained for user in nodes[name].users) > MOST_READERS
        if many and graph[name].carries_fp32:
            found.append(name)
    return tuple(sorted(found, key=graph.rank.__getitem__))
