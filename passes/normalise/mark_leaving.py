"""Insert a no-op conversion after a returned value that shares memory or has other readers, so that one cast serves all its readers.

    before   y = linear(x); z = relu(y); return y, z
    after    y = linear(x); to = y.to(float32); z = relu(to); return to, z

If `linear` runs low, `to` is the cast to fp32, for the caller as well as for `relu`. So both send their gradients to one tensor.
`amprewrite.graphs.fx.read.leaving` gives the rules by which values get a conversion. Two results may share memory in eager PyTorch but not
in the captured graph, or the reverse. So the pass first records the memory of each result in eager PyTorch, for itself and later passes.
"""

from __future__ import annotations

from amprewrite.graphs.fx.captured import EditedGraph, Reading
from amprewrite.graphs.fx.read.aliasing import note_memory
from amprewrite.graphs.fx.read.leaving import mark_leaving
from amprewrite.graphs.fx.read.reader import without_grad
from amprewrite.ir.pass_base import Pass
from amprewrite.tables.formats import FP32


class MarkLeaving(Pass[Reading, EditedGraph]):
    def __call__(self, reading: Reading, edited: EditedGraph) -> None:
        if reading.low is FP32:
            return
        graph = edited.module.graph
        note_memory(graph)
        if mark_leaving(graph, edited.make_own, without_grad(graph, reading.grad) if reading.training else None):
            edited.module.recompile()
