"""Nodes that an accuracy search keeps in fp32, for each graph, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amprewrite.ir.evidence.ranges import fingerprint
from amprewrite.ir.op_graph import OpGraph


@dataclass(frozen=True)
class KeepHigh:
    """Result of an accuracy search: the nodes to keep in fp32."""

    graphs: Mapping[str, Mapping[str, str]]
    """Fingerprint of a graph → name of a node → the reason in words."""
    note: str = ""
    """A sentence with the target and the result of the search, which the plan shows among its notes."""

    def of(self, graph: OpGraph) -> Mapping[str, str] | None:
        """Return the nodes of `graph` to keep in fp32, each with the reason in words; None if the search has not seen the graph."""
        return self.graphs.get(fingerprint(graph))
