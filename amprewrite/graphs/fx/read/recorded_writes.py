"""Find the inputs to which a graph writes values with gradients. Autograd records such a write: the input then has a new history."""

from __future__ import annotations

from collections.abc import Set

import torch
import torch.fx

from amprewrite.graphs.fx.flow.readers import trained_nodes
from amprewrite.graphs.fx.node_facts import memory_of, written
from amprewrite.graphs.fx.read.reader import without_grad
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with

_STATISTICS = ops_with(Trait.RUNNING_STATISTICS)


def recorded_inputs(graph: torch.fx.Graph) -> frozenset[int]:
    """Return the positions of the inputs to which autograd records a write.

    Norms write their running statistics without gradients, so writes to these do not count.
    """
    trained = trained_nodes(graph)
    quiet = without_grad(graph, grad=True)
    memory = {
        storage
        for node in graph.nodes
        if node not in quiet and op_name(node.target) not in _STATISTICS and not trained.isdisjoint(node.all_input_nodes)
        for target in written(node)
        for storage in memory_of(target)
    }
    return frozenset(place for place, node in enumerate(graph.find_nodes(op="placeholder")) if not memory.isdisjoint(memory_of(node)))


def hooked_and_written(graph: torch.fx.Graph, hooked: Set[str]) -> bool:
    """True if the graph writes to an input named in `hooked`, and autograd records the write.

    A hook that the model set before the write belongs to the old value, but Dynamo would set it on the new value, after the graph.
    """
    if not hooked:
        return False
    recorded = recorded_inputs(graph)
    return any(place in recorded and node.name in hooked for place, node in enumerate(graph.find_nodes(op="placeholder")))
