"""Remove checks of torch.export that hold for fp32 alone: dtype checks after conversions, and guards.

The second export, of the edited graph, makes both anew.

    before   y = x.to(float32); _assert_tensor_metadata(y, float32); z = relu(y)
    after    y = x.to(float32); z = relu(y)
"""

from __future__ import annotations

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Reading
from amprewrite.ir.pass_base import Pass

_CHECKS = {torch.ops.aten._assert_tensor_metadata.default}
"""Checks that export records with every conversion. They hold for fp32 alone."""
GUARDS = "_guards_fn"


class StripChecks(Pass[Reading, EditedGraph]):
    name = "strip-checks"

    def call(self, reading: Reading, edited: EditedGraph) -> bool:
        return strip_checks(edited.module) > 0


def strip_checks(module: torch.fx.GraphModule) -> int:
    """Remove recorded dtype checks and guards, in sub-graphs too, and repair the users of nodes; returns the number of nodes removed."""
    removed = 0
    for graph_module in module.modules():
        if not isinstance(graph_module, torch.fx.GraphModule):
            continue
        before = removed
        _mend_users(graph_module.graph)
        for node in list(graph_module.graph.nodes):
            if node.target in _CHECKS or (node.op == "call_module" and node.target == GUARDS):
                graph_module.graph.erase_node(node)
                removed += 1
        if removed != before:
            graph_module.recompile()
    return removed


def _mend_users(graph: torch.fx.Graph) -> None:
    """Record every reader of each node as its user.

    torch.export inlines code at a change of the grad mode, and loses the readers in that code of the value that leaves it.
    """
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


__all__ = ["StripChecks", "strip_checks"]
