"""Attention masks that allow all positions or are plainly causal: find them, so that calls can do without.

Outside of capture a model looks at the values of such a mask and leaves it out. Capture cannot look, so the captured graph builds the mask
and passes it. That rules out the fastest attention kernels, which take no mask but know `is_causal`
(ATen/native/transformers/cuda/sdp_utils.cpp: flash attention refuses `attn_mask`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.fx
from torch import Tensor

from amprewrite.graphs.fx.node_facts import example_value, transformed_nodes
from amprewrite.graphs.fx.ops.cuda_graphs import recording
from amprewrite.graphs.fx.ops.fused_copy import is_plain
from amprewrite.tables.formats import saturate
from amprewrite.tables.ops.op_lists import Trait, is_inplace, op_name, ops_with
from amprewrite.tables.vocabulary import Edit
from amprewrite.torch_internals.dispatch import disable_dispatch_modes

PURE = ops_with(Trait.MAKES_MASK) | {saturate.__name__}
"""Ops that build masks, and the clamp that `insert-casts` puts before a low copy of one."""
MOST_ELEMENTS = 1 << 27
"""Largest mask whose values are read. Reading takes three bytes an element."""
_BLOCKED = -6e4
"""Highest number that blocks a position when added to a score: its exponential is 0. fp16's lowest, -65504, is below it."""


class Kind(Enum):
    """The positions that a mask allows."""

    ALL = "all positions"
    CAUSAL = "causal"
    OTHER = "something else"


def sources_of(mask: torch.fx.Node) -> tuple[tuple[torch.fx.Node, ...], tuple[torch.fx.Node, ...]] | None:
    """(nodes that compute `mask`, in order; sizes they read); None if it reads anything else or is written in place."""
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
    if any(writes_to(node, inner) for node in mask.graph.nodes):
        return None
    return tuple(node for node in mask.graph.nodes if node in inner), tuple(sizes)


def writes_to(node: torch.fx.Node, known: set[torch.fx.Node]) -> bool:
    """True if `node` writes in place to one of `known`, directly or through views."""
    if node.op not in ("call_function", "call_method"):
        return False
    if not (is_inplace(node.target) or node.kwargs.get("inplace") or "out" in node.kwargs):
        return False
    written: Any = node.kwargs.get("out", node.args[0] if node.args else None)
    while isinstance(written, torch.fx.Node):
        if written in known:
            return True
        written = written.args[0] if written.args else None
    return False


ATTENTION = "scaled_dot_product_attention"
MASK, CAUSAL = (3, "attn_mask"), (5, "is_causal")
"""Position and name of arguments of torch.nn.functional.scaled_dot_product_attention."""


def read_masks(graph: torch.fx.Graph, around: Mapping[torch.fx.Node, torch.fx.Node]) -> dict[torch.fx.Node, Edit]:
    """The edit that is possible for the mask of each attention call of a graph. Calls that need their mask are left out.

    `around` maps each input of a checkpoint's body to its value in the outer graph.
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
    """The attention calls that read each mask. Calls under torch.func transforms are left out: no code can read a mask's values there."""
    found: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    transformed = transformed_nodes(graph)
    for node in graph.nodes:
        if op_name(node.target) == ATTENTION and not argument(node, CAUSAL) and node not in transformed:
            mask = argument(node, MASK)
            if isinstance(mask, torch.fx.Node):
                found.setdefault(mask, []).append(node)
    return found


def argument(call: torch.fx.Node, which: tuple[int, str]) -> Any:
    """An argument of a call by its position or its name; None if it is not given."""
    at, name = which
    return call.args[at] if len(call.args) > at else call.kwargs.get(name)


def queries_and_keys(call: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node]:
    """The first two operands of an attention call."""
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
    return any(writes_to(node, {mask}) for node in mask.graph.nodes)


class Masks:
    """A mask of a graph as a function of sizes, with a cache of its kind for each set of sizes."""

    def __init__(self, nodes: Sequence[torch.fx.Node], sizes: Sequence[torch.fx.Node]) -> None:
        graph = torch.fx.Graph()
        made = {size: graph.placeholder(size.name) for size in sizes}
        for node in nodes:
            made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(made[nodes[-1]])
        self._module = torch.fx.GraphModule({}, graph)
        self._kinds: dict[tuple[tuple[int, ...], tuple[int, int]], Kind] = {}

    def kind(self, sizes: tuple[int, ...], lengths: tuple[int, int]) -> Kind:
        """Kind of the mask at these `sizes`, for `lengths` (queries, keys)."""
        key = (sizes, lengths)
        found = self._kinds.get(key)
        if found is None:
            with disable_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
                found = self._kinds[key] = kind_of(self._module(*sizes), lengths)
        return found

    def find(self, lengths: tuple[int, int], sizes: tuple[Any, ...], device: torch.device) -> tuple[Tensor | None, bool]:
        """(mask to pass on, is_causal). Reading a mask waits for the device, once for each set of sizes."""
        known = all(type(size) is int for size in (*sizes, *lengths))
        may_look = known and ((sizes, lengths) in self._kinds or not recording(device))
        kind = self.kind(sizes, lengths) if may_look else Kind.OTHER
        return (self._module(*sizes), False) if kind is Kind.OTHER else (None, kind is Kind.CAUSAL)


def find_mask(masks: Masks, sizes: tuple[Any, ...], query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
    """`Masks.find` in the form that a graph calls."""
    return masks.find((query.shape[-2], key.shape[-2]), tuple(sizes), query.device)


def look_at_mask(mask: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
    """(mask to pass on, is_causal) from the values of a boolean `mask` on a CPU, where reading them waits for no device."""
    kind = kind_of(mask, (query.shape[-2], key.shape[-2])) if mask.is_cpu and is_plain(mask) else Kind.OTHER
    return (mask, False) if kind is Kind.OTHER else (None, kind is Kind.CAUSAL)


def kind_of(mask: Tensor, lengths: tuple[int, int]) -> Kind:
    """Kind of `mask`, broadcast over (..., queries, keys).

    A position is allowed by True in a boolean mask, and by zero in a mask to be added.
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


__all__ = [
    "CAUSAL", "MASK", "Kind", "Masks", "argument", "find_mask", "kind_of", "look_at_mask", "mask_readers", "queries_and_keys", "read_masks",
    "sources_of", "writes_to",
]  # fmt: skip
