"""Nodes that a search kept high for accuracy's sake, graph by graph, with the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amprewrite.ir.evidence.ranges import fingerprint
from amprewrite.ir.op_graph import OpGraph


@dataclass(frozen=True)
class KeepHigh:
    """What to keep high: by fingerprint of the graph, by node, why."""

    graphs: Mapping[str, Mapping[str, str]]
    note: str = ""
    """What the search asked for and found, for the plan's notes."""

    def of(self, graph: OpGraph) -> Mapping[str, str] | None:
        """Nodes of this graph with the reason in words; None if the search never met the graph."""
        return self.graphs.get(fingerprint(graph))
