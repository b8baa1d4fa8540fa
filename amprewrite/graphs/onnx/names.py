"""Names of values and nodes: free ones for what a rewrite adds, and one name for one thing.

ONNX identifies values by name. A body (subgraph) may use a name that a value of another graph has, too. Then type inference, ranges and
new reads across the border of a body could mean the wrong value, so a model that is read gets a name of its own for each value.
"""

from __future__ import annotations

import onnx_ir as ir


class FreshNames:
    """Gives names that no value and no node of the model has."""

    def __init__(self, model: ir.Model) -> None:
        self.taken: set[str | None] = set()
        for graph in model.graphs():
            self.taken |= {value.name for value in _values(graph)} | {node.name for node in graph}

    def new(self, base: str) -> str:
        """Return `base`, or `base` with a number at its end if it is taken."""
        name, count = base, 1
        while name in self.taken:
            name, count = f"{base}_{count}", count + 1
        self.taken.add(name)
        return name


def name_apart(model: ir.Model) -> None:
    """Rename each value of a body whose name an earlier value of the model has, and each node whose name another node of its graph has.

    ONNX Runtime loads no model in which two nodes of a graph have one name.
    """
    names, of_values = FreshNames(model), set[str]()
    for graph in model.graphs():
        of_nodes = set[str]()
        for things, used in ((_values(graph), of_values), (list(graph), of_nodes)):
            for thing in things:
                if thing.name in used:
                    thing.name = names.new(str(thing.name))
                if thing.name:
                    used.add(thing.name)


def _values(graph: ir.Graph) -> list[ir.Value]:
    """Return the values that a graph itself holds, without those of its bodies, each once."""
    held = (*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs))
    return list(dict.fromkeys(held))
