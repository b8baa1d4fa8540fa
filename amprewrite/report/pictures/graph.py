"""The graph of a plan as it is drawn: ops that carry fp32 or low values, inputs, outputs, and edges with their casts."""

from __future__ import annotations

from dataclasses import dataclass

from amprewrite.ir.plans.plan import ModelPlan, NodePlan
from amprewrite.report.counts import by_region
from amprewrite.report.pictures.layout import Nest, nest
from amprewrite.tables.vocabulary import Colour


@dataclass(frozen=True)
class Edge:
    """A value on its way from its maker to a reader."""

    source: int
    target: int
    cast: str = ""
    """Format of the copy that the reader gets; "" if it reads the value itself."""


@dataclass(frozen=True)
class Drawing:
    """What is drawn: nodes by place, edges between places, and the nested layout."""

    nodes: tuple[NodePlan, ...]
    edges: tuple[Edge, ...]
    nest: Nest
    hidden: int
    """Ops left out because they carry no fp32 value; weights are no nodes of the drawing either."""

    def colour(self, edge: Edge) -> Colour:
        """The colour of the value that an edge carries, as its maker gives it."""
        return self.nodes[edge.source].colour


def draw(plan: ModelPlan) -> Drawing:
    """Nodes, edges and layers of the whole plan; several regions are boxes of their own."""
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
