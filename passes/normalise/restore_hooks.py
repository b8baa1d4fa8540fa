"""Call hooks on tensors through our function `hooked` instead of Dynamo's higher-order op, which fails on fake tensors.

    before   y = register_hook(x, body)
    after    y = hooked(x, body)
"""

from __future__ import annotations

from amprewrite.graphs.fx.captured import EditedGraph, Reading
from amprewrite.graphs.fx.ops.scale_ops import hooked
from amprewrite.ir.pass_base import Pass
from amprewrite.torch_internals.operators import HigherOrderOperator


class RestoreHooks(Pass[Reading, EditedGraph]):
    needs = ("higher_order",)

    def __call__(self, reading: Reading, edited: EditedGraph) -> None:
        nodes = edited.module.graph.nodes
        hooks = [node for node in nodes if isinstance(node.target, HigherOrderOperator) and node.target.name() == "register_hook"]
        for node in hooks:
            node.target = hooked
        if hooks:
            edited.module.recompile()
