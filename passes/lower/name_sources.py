"""Tell AOTAutograd, as Dynamo does, where each input of a graph comes from; a hoisted copy comes from nowhere."""

from __future__ import annotations

from amprewrite.graphs.fx.captured import EditedGraph, Target
from amprewrite.ir.pass_base import Pass


class NameSources(Pass[Target, EditedGraph]):
    name = "name-sources"

    def call(self, target: Target, edited: EditedGraph) -> bool:
        if target.eager:
            return False
        for node in edited.module.graph.find_nodes(op="placeholder"):
            node._dynamo_source = getattr(node.meta.get("grapharg"), "source", None)
        return True
