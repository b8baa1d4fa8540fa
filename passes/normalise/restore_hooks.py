"""Call hooks on tensors through our function `hooked` instead of Dynamo's higher-order op, which fails on fake tensors.

    before   y = register_hook(x, body)
    after    y = hooked(x, body)
"""

from __future__ import annotations

from amprewrite.graphs.fx.captured import EditedGraph, Reading
from amprewrite.graphs.fx.ops.tensor_hooks import restore_hooks
from amprewrite.ir.pass_base import Pass


class RestoreHooks(Pass[Reading, EditedGraph]):
    name = "restore-hooks"

    def __call__(self, reading: Reading, edited: EditedGraph) -> None:
        restore_hooks(edited.module)
