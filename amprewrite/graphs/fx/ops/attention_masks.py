"""Find attention masks that allow all positions or are exactly causal, so that attention calls can run without a mask.

In eager mode a model may read the values of such a mask and then pass no mask. Capture cannot read values, so the captured graph builds
and passes the mask. A mask rules out the fastest attention kernels, which take no mask but support `is_causal`
(ATen/native/transformers/cuda/sdp_utils.cpp: flash attention refuses `attn_mask`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.fx
from torch import Tensor

from amprewrite.graphs.fx.node_facts import example_value, memory_of, transformed_nodes, written_memory
from amprewrite.graphs.fx.ops.on_device import recording
from amprewrite.tables.formats import saturate
from amprewrite.tables.ops.op_lists import Trait, is_inplace, op_name, ops_with
from amprewrite.tables.vocabulary import Edit
from amprewrite.torch_internals.dispatch import disable_dispatch_modes, is_plain

PURE = ops_with(Trait.MAKES_MASK) | {saturate.__name__}
"""Names of the ops that `sources_of` accepts: they build a mask, or clamp it before its low copy, where `insert-casts` puts a clamp."""
MOST_ELEMENTS = 1 << 27
"""Largest number of elements of a mask whose values are read. The check takes three bytes of memory for each element."""
_BLOCKED = -6e4
"""Highest number that, added to an attention score, blocks a position: exp of the sum is 0. fp16's lowest number, -65504, is below it."""


class Kind(Enum):
    """The positions that an attention mask allows. Attention needs no mask for ALL, and only `is_causal` for CAUSAL."""

    ALL = "all positions"
    CAUSAL = "causal"
    OTHER = "something else"


def sources_of(mask: torch.fx.Node) -> tuple[tuple[torch.fx.Node, ...], tuple[torch.fx.Node, ...]] | None:
    """Return (nodes that compute `mask`, in graph order; sizes that these nodes read), or None if `mask` depends on more than sizes.

    The result is also None if an op writes in place to one of the nodes.
    """
    inner: set[torch.fx.Node] = set()
    sizes: dict[torch.fx.Node, None] = {}
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        if node in inner or node in sizes:
            continue
        if isinstance(example_value(node), int | torch.SymInt):
            sizes[node] = None
            continue
        if node.op not in ("call_function", "call_method") or op_name(node.target) not in PURE or is_inplace(node.target):
            return None
        inner.add(node)
        waiting += node.all_input_nodes
    if not written_memory(mask.graph).isdisjoint(storage for node in inner for storage in memory_of(node)):
        return None
    return tuple(node for node in mask.graph.nodes if node in inner), tuple(sizes)


ATTENTION = "scaled_dot_product_attention"
MASK, CAUSAL = (3, "attn_mask"), (5, "is_causal")
"""(position, name) of the mask and of the causal flag among the arguments of torch.nn.functional.scaled_dot_product_attention."""


def read_masks(graph: torch.fx.Graph, around: Mapping[torch.fx.Node, torch.fx.Node]) -> dict[torch.fx.Node, Edit]:
    """Return, for each attention call of `graph` that may run without its mask, the edit that makes this possible.

    A mask that depends on fixed sizes alone is dropped if it is causal or allows all positions. A mask that `graph` computes from symbolic
    sizes is tested by the rewritten graph, once for each new set of sizes. Any other boolean mask on a CPU is tested in each call, unless
    it is written in place. Calls with other masks get no edit. If `graph` is the body graph of a checkpoint, `around` maps each input of
    `graph` to the value that the outer graph passes. Otherwise `around` is {}.
    """
    found: dict[torch.fx.Node, Edit] = {}
    for mask, calls in mask_readers(graph).items():
        outer = around.get(mask, mask)
        sources = sources_of(outer) if not (outer is not mask and _is_written(mask)) else None
        if sources is not None and not sources[1]:
            masks = Masks(*sources)
            found |= {call: edit for call in calls if (edit := _of_fixed_sizes(call, masks)) is not None}
        elif sources is not None and outer is mask:
            found |= dict.fromkeys(calls, Edit.LOOK_UP_MASK)
        elif _may_look(mask):
            found |= dict.fromkeys(calls, Edit.LOOK_AT_MASK)
    return found


def mask_readers(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Return {mask: the attention calls of `graph` that read this mask}.

    Left out are calls with `is_causal`, and calls under a torch.func transform, where no code can read the values of a mask.
    """
    found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    transformed = transformed_nodes(graph)
    for node in graph.nodes:
        if op_name(node.target) == ATTENTION and not argument(node, CAUSAL) and node not in transformed:
            mask = argument(node, MASK)
            if isinstance(mask, torch.fx.Node):
                found.setdefault(mask, []).append(node)
    return found


def argument(call: torch.fx.Node, which: tuple[int, str]) -> Any:
    """Return the argument of `call` at `which`, a pair (position, name); None if the call does not give this argument."""
    at, name = which
    return call.args[at] if len(call.args) > at else call.kwargs.get(name)


def queries_and_keys(call: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node]:
    """Return the query and the key operand of an attention call."""
    return argument(call, (0, "query")), argument(call, (1, "key"))


def _of_fixed_sizes(call: torch.fx.Node, masks: Masks) -> Edit | None:
    lengths = tuple(example_value(x).shape[-2] for x in queries_and_keys(call))
    kind = masks.kind((), lengths) if all(type(length) is int for length in lengths) else Kind.OTHER  # type: ignore[arg-type]
    return {Kind.CAUSAL: Edit.DROP_CAUSAL_MASK, Kind.ALL: Edit.DROP_FULL_MASK}.get(kind)


def _may_look(mask: torch.fx.Node) -> bool:
    value = example_value(mask)
    plain = isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.device.type == "cpu"
    return plain and not _is_written(mask)


def _is_written(mask: torch.fx.Node) -> bool:
    return not written_memory(mask.graph).isdisjoint(memory_of(mask))


class Masks:
    """Computes one mask of a graph from sizes, and caches its `Kind` (all positions, causal, other) for each set of sizes."""

    def __init__(self, nodes: Sequence[torch.fx.Node], sizes: Sequence[torch.fx.Node]) -> None:
        graph = torch.fx.Graph()
        made = {size: graph.placeholder(size.name) for size in sizes}
        for node in nodes:
            made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(made[nodes[-1]])
        self._module = torch.fx.GraphModule({}, graph)
        self._kinds: dict[tuple[tuple[int, ...], tuple[int, int]], Kind] = {}

    def kind(self, sizes: tuple[int, ...], lengths: tuple[int, int]) -> Kind:
        """Return the `Kind` of the mask that is computed from `sizes`, for `lengths` = (number of queries, number of keys)."""
        key = (sizes, lengths)
        found = self._kinds.get(key)
        if found is None:
            with disable_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
                found = self._kinds[key] = kind_of(self._module(*sizes), lengths)
        return found

    def find(self, lengths: tuple[int, int], sizes: tuple[Any, ...], device: torch.device) -> tuple[Tensor | None, bool]:
        """Return (mask to pass to attention, value of `is_causal`). The mask is None if attention needs none.

        The first call with new sizes reads the values of the mask, so the host waits for the device. If the values cannot be read,
        because sizes are symbolic or a CUDA graph is recorded, the mask itself is returned.
        """
        known = all(type(size) is int for size in (*sizes, *lengths))
        may_look = known and ((sizes, lengths) in self._kinds or not recording(device))
        kind = self.kind(sizes, lengths) if may_look else Kind.OTHER
        return (self._module(*sizes), False) if kind is Kind.OTHER else (None, kind is Kind.CAUSAL)


def find_mask(masks: Masks, sizes: tuple[Any, ...], query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
    """Return (mask to pass to attention, value of `is_causal`) for `query`, `key` and a mask that `masks` computes from `sizes`.

    The mask is None if attention needs none. Rewritten graphs call this function.
    """
    return masks.find((query.shape[-2], key.shape[-2]), tuple(sizes), query.device)


def look_at_mask(mask: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
    """Return (mask to pass to attention, value of `is_causal`). The mask is None if its values show that attention needs none.

    Only the values of a plain tensor on a CPU are read, because reading them waits for no device. Any other mask is returned.
    """
    kind = kind_of(mask, (query.shape[-2], key.shape[-2])) if mask.is_cpu and is_plain(mask) else Kind.OTHER
    return (mask, False) if kind is Kind.OTHER else (None, kind is Kind.CAUSAL)


def kind_of(mask: Tensor, lengths: tuple[int, int]) -> Kind:
    """Return which positions `mask` allows: ALL, CAUSAL (for each query, its own and earlier positions), or OTHER.

    `mask` broadcasts to (..., queries, keys), and `lengths` is (number of queries, number of keys). True in a boolean mask, or 0 in a mask
    that is added to scores, allows a position. Masks with numbers that neither allow nor block, or over MOST_ELEMENTS elements, are OTHER.
    """
    mask = mask.detach()[tuple(0 if step == 0 and at < mask.dim() - 2 else slice(None) for at, step in enumerate(mask.stride()))]
    if mask.numel() > MOST_ELEMENTS:
        return Kind.OTHER
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((allowed | (mask <= _BLOCKED)).all()):
        return Kind.OTHER
    if bool(allowed.all()):
        return Kind.ALL
    queries, keys = lengths
    if queries != keys or tuple(allowed.shape[-2:]) != lengths or bool(allowed[..., 0, -1].any()):
        return Kind.OTHER
    causal = torch.ones(lengths, dtype=torch.bool, device=mask.device).tril()
    return Kind.CAUSAL if torch.equal(allowed, causal.expand_as(allowed)) else Kind.OTHER
