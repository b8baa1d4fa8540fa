"""Find attention masks whose rows do not lie in memory one element after another.

    bias = table(buckets).permute(2, 0, 1)          element (head, query, key) lies beside (head + 1, query, key)
    scaled_dot_product_attention(q, k, v, where(allowed, bias, lowest))

Fused GPU kernels take no such mask (`check_last_dim_stride_equals_1_dense`, ATen/native/transformers/sdp_utils_cpp.h). Attention then
converts queries, keys and values to fp32, multiplies in fp32, and keeps its fp32 operands and shares for backward.

Elementwise ops hand the layout of an operand on to their result. So the value to copy is the first with this layout, here `bias`: it is
smaller than the mask, and a copy of it serves all layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch import Tensor

from amprewrite.graphs.fx.node_facts import comparable, example_value, memory_of, written_memory
from amprewrite.graphs.fx.ops.attention_masks import mask_readers, queries_and_keys
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with

_HANDS_LAYOUT_ON = ops_with(Trait.HANDS_LAYOUT_ON)


def read_strided_masks(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Return {value: attention calls}: if the readers of the value in the graph read a contiguous copy, the calls can have a fused kernel.

    Calls are left out if their mask has another dtype than the queries, which fused kernels refuse, or if the graph writes to the mask.
    """
    found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    strided = {mask: calls for mask, calls in mask_readers(graph).items() if _is_strided(mask)}
    written, returned = (written_memory(graph), returned_memory(graph)) if strided else (set(), set())
    for mask, calls in strided.items():
        fusible = [call for call in calls if _may_fuse(mask, call)]
        if fusible and written.isdisjoint(memory_of(mask)):
            found.setdefault(_first(mask, written, returned), []).extend(fusible)
    return found


def returned_memory(graph: torch.fx.Graph) -> set[int]:
    """Return the ids of the storages of the results of a graph."""
    (output,) = graph.find_nodes(op="output")
    return {storage for node in output.all_input_nodes for storage in memory_of(node)}


def _may_fuse(mask: torch.fx.Node, call: torch.fx.Node) -> bool:
    of_mask, query = example_value(mask), example_value(queries_and_keys(call)[0])
    return query.dim() == 4 and of_mask.dtype in (torch.bool, query.dtype)


def _is_strided(node: torch.fx.Node) -> bool:
    """True if `node` is a tensor in which the elements of a row do not lie side by side in memory."""
    return _step(node) not in (None, 1)


def _step(node: torch.fx.Node) -> Any:
    """Return how far apart the elements of a row of `node` lie in memory; None if `node` has no rows of several elements."""
    value = example_value(node)
    rows = isinstance(value, Tensor) and value.layout == torch.strided and value.dim() > 0 and comparable(value.shape[-1]) != 1
    return comparable(value.stride(-1)) if rows else None


def _first(mask: torch.fx.Node, written: set[int], returned: set[int]) -> torch.fx.Node:
    """Return the first value that hands its layout on to `mask`. The graph does not write to it, and returns no value on the way."""
    node = mask
    while op_name(node.target) in _HANDS_LAYOUT_ON and returned.isdisjoint(memory_of(node)):
        before = [each for each in node.all_input_nodes if _step(each) == _step(node)]
        if len(before) != 1 or not written.isdisjoint(memory_of(before[0])):
            break
        (node,) = before
    return node
