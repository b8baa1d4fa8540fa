"""Weight casts that pad, as an eager graph runs them: into buffers lent by a pool, a block of them through one autograd node."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Target
from amprewrite.graphs.fx.node_facts import example_value, hint
from amprewrite.graphs.fx.ops.pad_ops import BufferPool, pad_cast, pad_cast_many
from amprewrite.graphs.fx.ops.scale_ops import BATCH, BATCH_ELSEWHERE, cast_batches
from amprewrite.ir.pass_base import Pass
from amprewrite.passes.apply.scale_loss import by_grad_mode

_POOL = "amprewrite_pool"


class LendBuffers(Pass[Target, EditedGraph]):
    name = "lend-buffers"

    def call(self, target: Target, edited: EditedGraph) -> bool:
        return target.eager and lend_buffers(edited.module)


def lend_buffers(module: torch.fx.GraphModule) -> bool:
    """Give the weight casts that pad a pool of zero-filled buffers, so that padding runs no kernel of its own, and batch them.

    True if there are any.
    """
    graph = module.graph
    casts = graph.find_nodes(op="call_function", target=pad_cast)
    if not casts:
        return False
    setattr(module, _POOL, BufferPool())
    with graph.inserting_before(next(iter(graph.nodes))):
        pool = graph.create_node("get_attr", _POOL)
    for node in casts:
        node.kwargs = {**node.kwargs, "pool": pool}
    limits = BATCH.get(example_value(casts[0]).device.type, BATCH_ELSEWHERE)
    for run in by_grad_mode(graph, [node for node in casts if node.args[0].op == "placeholder" and node.args[2]]):
        for batch in cast_batches([hint(example_value(node).numel()) for node in run], *limits):
            _batch(graph, [run[place] for place in batch], pool)
    module.recompile()
    return True


def _batch(graph: torch.fx.Graph, casts: list[torch.fx.Node], pool: torch.fx.Node) -> None:
    """One node in place of `casts`, where more than one has the dtype and the factor of the first."""
    kind = _kind(casts[0])
    together = [cast for cast in casts if _kind(cast) == kind]
    if len(together) == 1:
        return
    dtype, inverse = kind
    with graph.inserting_before(together[0]):
        weights, layouts = tuple(cast.args[0] for cast in together), tuple(cast.args[2] for cast in together)
        many = graph.call_function(pad_cast_many, (weights, dtype, layouts, inverse, pool))
        many.meta = {key: value for key, value in together[0].meta.items() if key not in ("example_value", "val")}
        copies = [graph.call_function(operator.getitem, (many, place)) for place in range(len(together))]
    for copy, cast in zip(copies, together, strict=True):
        copy.meta = dict(cast.meta)
        cast.replace_all_uses_with(copy)
        graph.erase_node(cast)


def _kind(cast: torch.fx.Node) -> tuple[Any, Any]:
    return cast.args[1], cast.args[3] if len(cast.args) > 3 else None


__all__ = ["LendBuffers", "lend_buffers"]
