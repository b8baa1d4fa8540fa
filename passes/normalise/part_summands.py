"""Split `baddbmm` and `addmm` if the summand holds counts, such as positions: the product may then run low, and the sum stays fp32.

    before   y = baddbmm(alibi, q, k, alpha=0.1)
    after    p = bmm(q, k); y = add(alibi, p, alpha=0.1)

torch.autocast rounds the summand and the sum. For example, ALiBi adds multiples of positions to attention scores. Beyond 256, bf16 makes
neighbouring positions equal, and fp16 rounds sums to multiples of 1/4. `amprewrite/ir/evidence/counts.py` defines which values hold counts.
In-place calls are left alone.

Op names hard-coded in this pass: `bmm`, `mm`, `baddbmm`, `addmm`, `add`, `mul`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Reading
from amprewrite.graphs.fx.node_facts import example_value, in_autocast, named_arguments, transformed_nodes, written
from amprewrite.graphs.fx.read.number_facts import Counts, find_counts
from amprewrite.ir.evidence.counts import Count
from amprewrite.ir.pass_base import Pass
from amprewrite.tables.formats import FP32
from amprewrite.tables.ops.op_lists import op_name

ALONE: dict[str, Callable[..., torch.Tensor]] = {"baddbmm": torch.bmm, "addmm": torch.mm}
"""{op that adds a summand to a product: the product alone}."""
FACTORS = ("batch1", "batch2", "mat1", "mat2")
"""Names of the arguments of `baddbmm` and `addmm` that are factors of the product."""


class PartSummands(Pass[Reading, EditedGraph]):
    def __call__(self, reading: Reading, edited: EditedGraph) -> None:
        graph, ops = edited.module.graph, ALONE.keys() - reading.lists.asked
        sums = [node for node in graph.nodes if op_name(node.target) in ops and not written(node) and "out_dtype" not in node.kwargs]
        if not sums or reading.low is FP32 or reading.lists.rule != "cost":
            return

        def that_count(counts: Counts) -> list[torch.fx.Node]:
            parts = {node: _parts(node) for node in sums}
            return [node for node, (summand, _, beta, _) in parts.items() if counts.get(summand) is Count.LARGE and beta != 0]

        fixed = in_autocast(graph) | transformed_nodes(graph)
        counts = find_counts(graph, reading.inputs, reading.handed, that_count)
        found = [node for node in that_count(counts) if node not in fixed]
        if found:
            copy_of = edited.make_own()
            for node in found:
                _part(copy_of(node))
            edited.module.recompile()


def _parts(node: torch.fx.Node) -> tuple[Any, tuple[Any, ...], Any, Any]:
    """Return (summand, matrices, beta, alpha) of `node`, a `baddbmm` or `addmm`: `beta * summand + alpha * (product of the matrices)`."""
    given = {name: value for name, value in named_arguments(node).items() if value is not None}
    matrices = tuple(given[name] for name in FACTORS if name in given)
    return given.get("input", given.get("self")), matrices, given.get("beta", 1), given.get("alpha", 1)


def _part(node: torch.fx.Node) -> None:
    """Turn `node`, a product plus a summand, into a sum. A new node in front of it computes the product."""
    summand, factors, beta, alpha = _parts(node)
    with node.graph.inserting_before(node):
        product = node.graph.call_function(ALONE[op_name(node.target)], factors)
        product.meta = {**node.meta, "example_value": _like(example_value(node))}
        if beta != 1:
            scaled = node.graph.call_function(torch.mul, (summand, beta))
            scaled.meta = {**node.meta, "example_value": _like(example_value(summand))}
            summand = scaled
    node.op, node.target, node.args, node.kwargs = "call_function", torch.add, (summand, product), {} if alpha == 1 else {"alpha": alpha}


def _like(value: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like `value`, with memory of its own."""
    return torch.empty_like(value, requires_grad=value.requires_grad)
