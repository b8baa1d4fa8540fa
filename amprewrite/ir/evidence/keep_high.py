"""Nodes that an accuracy search kept high, graph by graph, with the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amprewrite.ir.evidence.ranges import fingerprint
from amprewrite.ir.op_graph import OpGraph


@dataclass(frozen=True)
class KeepHigh:
    """Nodes to keep high and the reasons, by fingerprint of the graph and by node."""

    graphs: Mapping[str, Mapping[str, str]]
    note: str = ""
    """The target and the result of the search, for the plan's notes."""

    def of(self, graph: OpGraph) -> Mapping[str, str] | None:
        """Nodes of this graph to keep high, with the reason in words; None if the search has not seen the graph."""
        return self.graphs.get(fingerprint(graph))
