"""Find the products of a captured graph that multiply counts, such as positions and lengths (`ir/evidence/counts.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import example_value, held_values, is_held, is_opaque, tensors, value_dtype
from amprewrite.graphs.fx.read.magnitudes import on_host
from amprewrite.graphs.fx.uncaptured import unselected
from amprewrite.ir.evidence.counts import Count, keep_counts, made_of, most_exact
from amprewrite.ir.op_graph import OpNode
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.torch_internals.dispatch import FakeTensor
from amprewrite.torch_internals.operators import HigherOrderOperator
from amprewrite.torch_internals.trees import tree_leaves

Counts = Mapping[torch.fx.Node, Count]
"""By node: the `Count` of its value, which says whether the value is made of whole numbers, and how large it may be."""


def read_counts(captured: Captured, inputs: Sequence[Any], around: Counts | None = None) -> None:
    """Mark the matrix products of a captured graph that multiply counts, which a low format would round, so that they stay fp32.

    A count is a value made of whole numbers, such as positions and lengths (rule 1 in `ir/evidence/counts.py`). Sets the field `counted` of
    these products in the problem's graph, and `captured.counts` to the `Count` of every value.

    `inputs` are the real inputs of the graph; () if they are not available. `around` has the `Count` of each input that an outer graph
    passes to a body graph. Constants are read on the host only if a product depends on their values, once for each device. Nothing is set
    for a graph without products and body graphs.
    """
    low, nodes = captured.problem.policy.low, captured.module.graph.nodes
    if not any(node.flops for node in captured.problem.graph) and not any(map(is_opaque, nodes)):
        return
    held = _held(captured.module.graph, inputs)
    # First suppose that all constants are large counts. Their values are read only if this marks a product, because the host must wait.
    supposed = _propagate(nodes, {**dict.fromkeys(held, Count.LARGE), **(around or {})}, low)
    graph = _kept(captured, supposed)
    if any(node.counted for node in graph):
        supposed = _propagate(nodes, {**_look(held, low), **(around or {})}, low)
        graph = _kept(captured, supposed)
    captured.counts = supposed
    captured.know(graph=graph)


def _kept(captured: Captured, counts: Counts) -> Any:
    """Return the op graph with `counted` set on every matrix product that must stay fp32 because it multiplies whole numbers."""
    by_name = {name: counts[node] for name, node in captured.nodes.items() if node in counts}
    return keep_counts(captured.problem.graph, by_name, _summed)


def _summed(node: OpNode) -> int:
    """Return the number of elements over which a matrix product sums: half its FLOPs for each element of its result."""
    return node.flops // (2 * max(node.numel, 1))


def _held(graph: torch.fx.Graph, inputs: Sequence[Any]) -> dict[torch.fx.Node, Any]:
    """Return {node: its value, or None if unknown} for the floating buffers and constants of the model. Trained parameters are left out."""
    found = {}
    for node, value in held_values(graph, [*inputs, *[None] * len(graph.nodes)]):
        example = example_value(node)
        example = value if example is None else example
        if is_held(node) and isinstance(example, Tensor) and example.is_floating_point() and not _learns(example, value):
            found[node] = value
    return found


def _learns(*values: Any) -> bool:
    return any(isinstance(each, torch.nn.Parameter) or (isinstance(each, Tensor) and each.requires_grad) for each in values)


def _look(held: Mapping[torch.fx.Node, Any], low: Format) -> dict[torch.fx.Node, Count]:
    """Return the `Count` of each constant of `held`, from its values.

    LARGE: whole numbers, some of them too large for `low` to hold exactly. WHOLE: smaller whole numbers. SMALL: fractions, and values that
    are unknown.
    """
    asked = dict[torch.fx.Node, Tensor]()
    with torch.no_grad(), unselected():
        for node, value in held.items():
            plain = type(value) in (Tensor, torch.nn.Buffer) and not isinstance(value, FakeTensor) and value.layout == torch.strided
            if plain and value.device.type != "meta" and value.numel():
                asked[node] = torch.stack([(value == value.round()).all(), value.abs().amax() > most_exact(low)])
        kinds = [(Count.LARGE if beyond else Count.WHOLE) if whole else Count.SMALL for whole, beyond in on_host(list(asked.values()))]
    return dict.fromkeys(held, Count.SMALL) | dict(zip(asked, kinds, strict=True))


def _propagate(nodes: Any, known: Counts, low: Format) -> dict[torch.fx.Node, Count]:
    """Return the `Count` of every value of a graph, from the `Count` of each input and constant (`known`)."""
    found = dict[torch.fx.Node, Count]()
    for node in nodes:
        value = example_value(node)
        if node in known:
            found[node] = known[node]
        elif node.op in ("call_function", "call_method") and not isinstance(node.target, HigherOrderOperator):
            given = [found[each] for each in node.all_input_nodes]
            numbers = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if type(leaf) in (int, float)]
            found[node] = made_of(op_name(node.target), _dtype(value), given, numbers, low)
        else:
            floating = any(each.is_floating_point() or each.is_complex() for each in tensors(value))
            found[node] = Count.NOT if floating or node.op == "output" else made_of("", _dtype(value), (), (), low)
    return found


def _dtype(value: Any) -> str:
    """Return the name of the dtype of `value`. A Python float counts as fp32."""
    return "fp32" if isinstance(value, float | torch.SymFloat) else value_dtype(value)
