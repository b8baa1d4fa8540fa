"""Collect the graph that all pictures of a plan draw: ops with fp32 or low values, inputs, outputs, and edges with their casts."""

from __future__ import annotations

from dataclasses import dataclass

from amprewrite.ir.plans.plan import ModelPlan, NodePlan
from amprewrite.report.counts import by_region
from amprewrite.report.pictures.layout import Nest, nest
from amprewrite.tables.vocabulary import Colour


@dataclass(frozen=True)
class Edge:
    """An edge from the op that makes a value to an op that reads it."""

    source: int
    """Index of the maker in `Drawing.nodes`."""
    target: int
    """Index of the reader in `Drawing.nodes`."""
    cast: str = ""
    """Format of the cast copy that the reader reads; "" if it reads the value itself."""


@dataclass(frozen=True)
class Drawing:
    """Result of `draw`: the nodes to draw, the edges between them, and the nested boxes of modules."""

    nodes: tuple[NodePlan, ...]
    edges: tuple[Edge, ...]
    nest: Nest
    hidden: int
    """Number of ops that are not drawn because they carry no fp32 value. Weights are not drawn either, and not counted."""

    def colour(self, edge: Edge) -> Colour:
        """Return the colour of the op that makes the edge's value."""
        return self.nodes[edge.source].colour


def draw(plan: ModelPlan) -> Drawing:
    """Return the nodes, edges and nested boxes of the whole plan. If it covers several graphs, each graph is a box."""
    nodes: list[NodePlan] = []
    paths: list[tuple[str, ...]] = []
    edges: list[Edge] = []
    hidden = 0
    several = len(plan.regions) > 1
    for region, (named, casts) in zip(plan.regions, by_region(plan), strict=True):
        read = {value for node in region.nodes for value in node.inputs}
        copies = {(cast.value, user): cast.to for cast in casts for user in cast.users}
        prefix = f"{region.name}/" if several else ""
        place: dict[str, int] = {}
        for node, bare in zip(named, region.nodes, strict=True):
            shown = (node.role == "op" and node.colour is not Colour.PLAIN) or node.role == "output"
            if not shown and not (node.role == "input" and bare.name in read and node.colour is not Colour.PLAIN):
                hidden += node.role == "op"
                continue
            place[node.name] = len(nodes)
            nodes.append(node)
            module = tuple(node.module.split(".")) if node.module and node.role == "op" else ()
            paths.append((region.name, *module) if several else module)
        for node in named:
            for value in dict.fromkeys(prefix + value for value in node.inputs):
                if node.name in place and value in place:
                    edges.append(Edge(place[value], place[node.name], copies.get((value, node.name), "")))
    return Drawing(tuple(nodes), tuple(edges), nest(paths, ((edge.source, edge.target) for edge in edges)), hidden)
