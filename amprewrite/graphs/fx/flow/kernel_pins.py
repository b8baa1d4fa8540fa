"""Ops whose low kernels on a device, or their backward, do something to values or gradients that fp32 ones do not.

1. A gradient is added up in the low format: by the kernel, or as an op reads one value often.
2. Some elements are rounded twice, by their place.
3. Gradients of *bare taps* are not written: of weights of a convolution that meet padding alone, or of a transposed one whose products
   are all cut off. oneDNN's bf16 kernels leave what lay in that memory before, NaN at times, where the convolution strides; so does
   torch.autocast. Found by trying kernels of 1, 2, 3 and 5, strides to 4, paddings and dilations to 2 and maps to 4 in one and two dims,
   and all these to 3 at most in three dims and of transposed ones in one and two (torch 2.13): no other padded one was wrong, but for
   kernels in three dims that are wider than the map. Padded by an op of its own, a convolution is right and runs low; a transposed one
   is held high, in three dims untried.

By name it knows `getitem`, which may be told by tensors which places to take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.flow.readers import MOST_READERS
from amprewrite.graphs.fx.node_facts import Fact, arguments, device_of, example_value, hint, named_arguments
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.list_presets import autocast_kinds
from amprewrite.tables.ops.op_lists import OpLists, find_op, op_name
from amprewrite.tables.vocabulary import Colour, OpKind, Reason
from amprewrite.torch_internals.trees import tree_leaves

Pin = tuple[Colour, Reason, str]


def pin_unset(fact: Fact, low: Format) -> Pin | None:
    """Pin a transposed convolution high whose low backward would leave gradients unset, for its sizes."""
    if not _may_be_unset(fact.node, low) or not _has_bare_taps(fact.node, transposed=True):
        return None
    return Colour.HIGH, Reason.UNSET, f"{fact.op} in {low.name} on {device_of(fact.value)}"


def read_bare_taps(nodes: Mapping[str, torch.fx.Node], low: Format) -> tuple[str, ...]:
    """Convolutions whose low backward would leave gradients unset, for their sizes; what symbolic sizes were at capture counts."""
    return tuple(name for name, node in nodes.items() if _may_be_unset(node, low) and _has_bare_taps(node, transposed=False))


def _may_be_unset(node: torch.fx.Node, low: Format) -> bool:
    """Whether the low backward of an op on its device leaves gradients unset for some sizes."""
    row = find_op(op_name(node.target)) if node.op == "call_function" else None
    return row is not None and f"{device_of(example_value(node))}:{low.name}" in row.unset


def _has_bare_taps(node: torch.fx.Node, transposed: bool) -> bool:
    """Whether a convolution has sizes for which it does; False if it is not `transposed` as asked."""
    given = named_arguments(node)
    x, weight = (example_value(given[name]) if isinstance(given.get(name), torch.fx.Node) else None for name in ("input", "weight"))
    if not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor) or isinstance(given.get("padding"), str):
        return False  # a padding that is told by a name goes with a stride of one
    if ("output_padding" in given) is not transposed:
        return False
    dims = weight.dim() - 2
    settings = [per_dim(given.get(name) or default, dims) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    for size, kernel, stride, padding, dilation in zip(map(hint, x.shape[-dims:]), weight.shape[-dims:], *settings, strict=True):
        if dims == 3 and padding and dilation * (kernel - 1) >= size:
            return True
        if stride > 1 and padding and _is_bare(size, kernel, stride, padding, dilation, transposed):
            return True
    return False


def per_dim(setting: Any, dims: int) -> tuple[Any, ...]:
    """A setting of a convolution, for each dim."""
    each = tuple(setting) if isinstance(setting, list | tuple) else (setting,)
    return each * dims if len(each) == 1 else each


def _is_bare(size: int, kernel: int, stride: int, padding: int, dilation: int, transposed: bool) -> bool:
    """Whether some place of the kernel reads padding alone, or if `transposed` writes what is cut off alone."""
    reach = dilation * (kernel - 1)
    if transposed:
        turns, inside = size, (size - 1) * stride - 2 * padding + reach + 1
    else:
        turns, inside = (size + 2 * padding - reach - 1) // stride + 1, size
    places = (range(tap * dilation - padding, tap * dilation - padding + turns * stride, stride) for tap in range(kernel))
    return any(not any(0 <= place < inside for place in each) for each in places)


def pin_summing(fact: Fact, lists: OpLists, trained: Set[torch.fx.Node], learning: Set[torch.fx.Node]) -> Pin | None:
    """Pin an op high in which the gradient of a trained value would be added up low, term by term: by its kernel, or as it reads it often.

    `learning` are all values that get gradients, `trained` those that torch.autocast holds in fp32. It adds up the gradients of these in
    fp32, and those of what an op on its fp32 list reads. A fact of the kernel holds under all lists, also those that
    allow every op; it does not overrule what was asked of this very op.
    """
    if fact.row is None or fact.role != "op" or fact.kind in (None, OpKind.DENY) or fact.row.kind is OpKind.ALLOW or fact.op in lists.asked:
        return None
    device = device_of(fact.value)
    sums = device in fact.row.low_backward and (fact.op != "getitem" or _takes_places(fact.node))
    exact = learning if sums and autocast_kinds(device).get(fact.op) is OpKind.DENY else trained
    read = Counter(node for parameter, node in arguments(fact.node) if node in exact and parameter not in fact.row.data)
    times = max(read.values(), default=0)
    if (sums and times) or times > MOST_READERS:
        return Colour.HIGH, Reason.LOW_BACKWARD, f"{fact.op} on {device}" if sums else f"{fact.op} reads one value {times} times"
    return None


def _takes_places(node: torch.fx.Node) -> bool:
    """Whether a getitem is told by tensors which places to take, and may take one more than once."""
    return any(isinstance(example_value(leaf), torch.Tensor) for leaf in tree_leaves(node.args[1:]) if isinstance(leaf, torch.fx.Node))


def pin_uneven(fact: Fact, kind: OpKind | None, lists: OpLists) -> Pin | None:
    """Pin an op high whose low kernel rounds by position; None if the user moved it or other rules than ours decide."""
    device = device_of(fact.value)
    if lists.rule != "cost" or kind not in (OpKind.INFER, OpKind.CLEAR, OpKind.INTERNAL) or fact.op in lists.asked:
        return None
    if fact.row is None or device not in fact.row.uneven:
        return None
    return Colour.HIGH, Reason.UNEVEN, f"{fact.op} on {device}"


__all__ = ["Pin", "per_dim", "pin_summing", "pin_uneven", "pin_unset", "read_bare_taps"]
