"""Remove checks of torch.export that hold for fp32 alone: dtype checks after conversions, and guards.

The edited graph is exported a second time, which records checks and guards anew.

    before   y = x.to(float32); _assert_tensor_metadata(y, float32); z = relu(y)
    after    y = x.to(float32); z = relu(y)
"""

from __future__ import annotations

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Reading
from amprewrite.ir.pass_base import Pass

_CHECKS = {torch.ops.aten._assert_tensor_metadata.default}
"""Checks that torch.export records after every conversion. They would fail on a value that the rewrite makes bf16 or fp16."""
GUARDS = "_guards_fn"
"""Name of the module with the guards in an exported graph."""


class StripChecks(Pass[Reading, EditedGraph]):
    def __call__(self, reading: Reading, edited: EditedGraph) -> None:
        strip_checks(edited.module)


def strip_checks(module: torch.fx.GraphModule) -> None:
    """Remove dtype checks and guards, in subgraphs too, and add the readers that torch.export left out of `node.users`."""
    for graph_module in module.modules():
        if not isinstance(graph_module, torch.fx.GraphModule):
            continue
        graph = graph_module.graph
        _mend_users(graph)
        checks = [node for node in graph.nodes if node.target in _CHECKS or (node.op == "call_module" and node.target == GUARDS)]
        for node in checks:
            graph.erase_node(node)
        if checks:
            graph_module.recompile()


def _mend_users(graph: torch.fx.Graph) -> None:
    """Record every reader of each node in `node.users`, because torch.export loses some readers.

    If torch.export inlines a region with another grad mode, `users` of the region's result lacks the readers inside the region.
    """
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)
