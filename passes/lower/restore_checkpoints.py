"""Activation checkpoints that really free memory when a graph runs without a compiler.

Dynamo turns `torch.utils.checkpoint` into a higher-order op that only compilers honour; run eagerly it keeps every activation.
"""

from __future__ import annotations

import torch.fx
from torch.utils.checkpoint import checkpoint

from amprewrite.graphs.fx.captured import EditedGraph, Target
from amprewrite.ir.pass_base import Pass


class RestoreCheckpoints(Pass[Target, EditedGraph]):
    name = "restore-checkpoints"

    def call(self, target: Target, edited: EditedGraph) -> bool:
        return target.eager and restore_checkpoints(edited.module)


def restore_checkpoints(module: torch.fx.GraphModule) -> bool:
    """Call `torch.utils.checkpoint.checkpoint` wherever the graph holds the higher-order op; True if there was one."""
    found = False
    for node in module.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "tag_activation_checkpoint":
            node.target = checkpoint
            node.kwargs = {"use_reentrant": False, **node.kwargs}
            found = True
    if found:
        module.recompile()
    return found
