"""Find attention calls that would be faster with the original key and value heads instead of repeated ones, or with a contiguous mask.

Some calls read a copy of the key and value heads for each query head, although the kernel can read the original heads.

    keys = keys[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)         n copies of each of h heads

Models of the transformers library repeat heads if they have a mask, and otherwise pass `enable_gqa=True`
(integrations/sdpa_attention.py). A model that is being captured usually makes a mask, so captured graphs repeat heads.

This file looks for the ops above: `getitem` or `unsqueeze`, `expand`, and `reshape` or `flatten`. It does not look for `view`, because a
view cannot merge the copies.

Some masks are not contiguous along their last dim.

    bias = table(buckets).permute(2, 0, 1)          heads lie side by side in memory, keys do not
    scaled_dot_product_attention(q, k, v, where(allowed, bias, lowest))

Fused GPU kernels take no such mask (`check_last_dim_stride_equals_1_dense`, ATen/native/transformers/sdp_utils_cpp.h). Attention then
converts queries, keys and values to fp32, multiplies in fp32, and saves fp32 operands and attention weights for backward.

Elementwise ops give their result the strides of an operand. So the mask has its strides from an earlier value, here `bias`. A contiguous
copy is made of this value: it is smaller than the mask, and one copy serves all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor

from amprewrite.graphs.fx.node_facts import CONVERSIONS, comparable, example_value, memory_of, transformed_nodes, written_memory
from amprewrite.graphs.fx.ops.attention_masks import ATTENTION, argument, mask_readers, queries_and_keys
from amprewrite.graphs.fx.ops.scale_ops import cast_in, scale_gradient, unscale_gradient
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with

KEY, VALUE, GROUPED = (1, "key"), (2, "value"), "enable_gqa"
WIDEST = 256
"""Largest head size of flash attention (cuda/sdp_utils.cpp). Other kernels gain nothing: they repeat the original heads themselves."""
_CROSSINGS = (cast_in, scale_gradient, unscale_gradient)
_FULL = slice(None)


@dataclass(frozen=True)
class Way:
    """The ops that repeat the heads of the keys, or of the values, of one attention call. No other op reads their results."""

    whole: torch.fx.Node
    """The last op, `reshape` or `flatten`, which returns as many heads as the query has."""
    spread: torch.fx.Node
    """The `expand` that repeats each head."""
    between: tuple[torch.fx.Node, ...]
    """Conversions, and ops that apply the loss scale to gradients, between `lined` and `spread`. The last one comes first."""
    lined: torch.fx.Node
    """The first op, `unsqueeze` or `getitem`, which returns the heads with one more dim."""

    @property
    def heads(self) -> torch.fx.Node:
        """The node that computes the original heads, which the ops of this `Way` repeat."""
        return self.lined.all_input_nodes[0]

    @property
    def ops(self) -> tuple[torch.fx.Node, ...]:
        """All ops that repeat the heads, from the last one (`whole`) back to the first (`lined`)."""
        return self.whole, self.spread, *self.between, self.lined


def read_repeated_heads(graph: torch.fx.Graph) -> dict[torch.fx.Node, tuple[Way, Way]]:
    """Return {attention call: (ops that repeat its key heads, ops that repeat its value heads)}.

    The result has only calls that could read the original heads instead of the repeated ones, with `enable_gqa=True`.
    """
    apart = transformed_nodes(graph)
    changing = written_memory(graph)
    found: dict[torch.fx.Node, tuple[Way, Way]] = {}
    for call in graph.nodes:
        if op_name(call.target) != ATTENTION or call in apart or GROUPED in call.kwargs:
            continue
        keys, values = (_way_to(argument(call, which)) for which in (KEY, VALUE))
        if keys is None or values is None or keys.whole is values.whole:
            continue
        query = _sizes(argument(call, (0, "query")))
        alike = _sizes(keys.heads) == _sizes(values.heads) and _sizes(keys.whole)[:2] == query[:2]
        still = all(changing.isdisjoint(memory_of(node)) for node in (*keys.ops, *values.ops))
        if alike and still and type(query[-1]) is int and query[-1] <= WIDEST:
            found[call] = keys, values
    return found


def _way_to(whole: object) -> Way | None:
    """Return the ops that compute `whole`, the keys or values of an attention call, by repeating heads.

    Return None if `whole` is computed in another way, or if these ops must run in any case, because another op reads one of their results.
    """
    if not isinstance(whole, torch.fx.Node) or op_name(whole.target) not in ("reshape", "flatten"):
        return None
    spread, between = whole.all_input_nodes[0], list[torch.fx.Node]()
    if op_name(spread.target) != "expand":
        return None
    lined = spread.all_input_nodes[0]
    while op_name(lined.target) in CONVERSIONS or lined.target in _CROSSINGS:
        between.append(lined)
        lined = lined.all_input_nodes[0]
    if not _adds_a_dim(lined):
        return None
    way = Way(whole, spread, tuple(between), lined)
    few = _sizes(way.heads)
    times = _sizes(spread)[2] if len(few) == 4 and len(_sizes(spread)) == 5 else None
    if type(times) is not int or times < 2 or any(len(each.users) > 1 for each in way.ops):
        return None
    sizes = (few[0], few[1] * times, *few[2:]), (*few[:2], times, *few[2:]), (*few[:2], 1, *few[2:])
    return way if tuple(map(_sizes, (whole, spread, lined))) == sizes else None


def _adds_a_dim(node: torch.fx.Node) -> bool:
    """True if an op returns its whole operand with dims of size 1 added, such as `x[:, :, None]`."""
    if op_name(node.target) == "unsqueeze":
        return True
    index = node.args[1] if op_name(node.target) == "getitem" and len(node.args) == 2 else None
    return isinstance(index, tuple | list) and all(each is None or each == _FULL for each in index)


def _sizes(node: torch.fx.Node) -> tuple[Any, ...]:
    value = example_value(node)
    return tuple(map(comparable, value.shape)) if isinstance(value, torch.Tensor) else ()


_HANDS_LAYOUT_ON = ops_with(Trait.HANDS_LAYOUT_ON)


def read_strided_masks(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Return {value: the attention calls that could use a fused kernel if a contiguous copy replaced the value}.

    The value is the mask of these calls, or an earlier value from which the mask has its strides. Fused kernels take only queries of four
    dims, and only masks that are boolean or of the queries' dtype. Masks to which the graph writes are left out.
    """
    found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    strided = {mask: calls for mask, calls in mask_readers(graph).items() if _step(mask) not in (None, 1)}
    written, returned = (written_memory(graph), returned_memory(graph)) if strided else (set(), set())
    for mask, calls in strided.items():
        fusible = [call for call in calls if _may_fuse(mask, call)]
        if fusible and written.isdisjoint(memory_of(mask)):
            found.setdefault(_first(mask, written, returned), []).extend(fusible)
    return found


def returned_memory(graph: torch.fx.Graph) -> set[int]:
    """Return the ids of the storages that hold the results of a graph."""
    (output,) = graph.find_nodes(op="output")
    return {storage for node in output.all_input_nodes for storage in memory_of(node)}


def _may_fuse(mask: torch.fx.Node, call: torch.fx.Node) -> bool:
    of_mask, query = example_value(mask), example_value(queries_and_keys(call)[0])
    return query.dim() == 4 and of_mask.dtype in (torch.bool, query.dtype)


def _step(node: torch.fx.Node) -> Any:
    """Return the stride of the last dim of `node`; None if `node` has no strides, or if the size of this dim is 1."""
    value = example_value(node)
    rows = isinstance(value, Tensor) and value.layout == torch.strided and value.dim() > 0 and comparable(value.shape[-1]) != 1
    return comparable(value.stride(-1)) if rows else None


def _first(mask: torch.fx.Node, written: set[int], returned: set[int]) -> torch.fx.Node:
    """Return the earliest value from which `mask` has its strides: ops such as `add` give their result the strides of their operand.

    The search goes back from `mask`. It never selects a value to which the graph writes, because a copy would miss the write. It goes back
    no further than a value that the graph returns, because a result must keep its strides.
    """
    node = mask
    while op_name(node.target) in _HANDS_LAYOUT_ON and returned.isdisjoint(memory_of(node)):
        before = [each for each in node.all_input_nodes if _step(each) == _step(node)]
        if len(before) != 1 or not written.isdisjoint(memory_of(before[0])):
            break
        (node,) = before
    return node
