"""Remove checks of torch.export that hold for fp32 alone: dtype checks after conversions, and guards.

The edited graph is exported a second time, which records both anew.

    before   y = x.to(float32); _assert_tensor_metadata(y, float32); z = relu(y)
    after    y = x.to(float32); z = relu(y)
"""

from __future__ import annotations

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Reading
from amprewrite.ir.pass_base import Pass

_CHECKS = {torch.ops.aten._assert_tensor_metadata.default}
"""Checks that torch.export records after every conversion. They would fail on a value that the rewrite makes low."""
GUARDS = "_guards_fn"
"""Name of the module with the guards in an exported graph."""


class StripChecks(Pass[Reading, EditedGraph]):
    name = "strip-checks"

    def call(self, reading: Reading, edited: EditedGraph) -> bool:
        return strip_checks(edited.module) > 0


def strip_checks(module: torch.fx.GraphModule) -> int:
    """Remove dtype checks and guards, in subgraphs too, and repair `node.users`. Returns the number of nodes removed."""
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
    """Record every reader of each node in `node.users`, because torch.export loses some readers.

    Where torch.export inlines a region with another grad mode, the value that the region returns lacks its readers inside the region.
    """
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


__all__ = ["StripChecks", "strip_checks"]
