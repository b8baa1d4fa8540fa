"""Ops whose low kernel, or its backward, treats values or gradients worse on a device than the fp32 kernel does.

1. The kernel adds up a gradient in the low format, or an op reads one value often.
2. The kernel rounds some elements twice, depending on their position.
3. The backward leaves gradients of *bare taps* unwritten. A bare tap is a weight of a convolution that meets padding alone, or a weight of
   a transposed one whose products are all cut off. oneDNN's bf16 kernels for strided convolutions then return old memory, at times NaN; so
   does torch.autocast. Tried with torch 2.13: kernels of 1, 2, 3 and 5, strides to 4, paddings and dilations to 2 and maps to 4 in one and
   two dims; all of these to 3 at most in three dims, and for transposed convolutions in one and two. No other padded convolution was wrong,
   except kernels in three dims that are wider than the map. A convolution that is padded by a separate op is right and runs low. A
   transposed one stays high; three dims are untried.

By name it knows `getitem`, which may take its indices from tensors.
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
    """Pin a transposed convolution high if its sizes are such that its low backward leaves weight gradients uninitialised."""
    if not _may_be_unset(fact.node, low) or not _has_bare_taps(fact.node, transposed=True):
        return None
    return Colour.HIGH, Reason.UNSET, f"{fact.op} in {low.name} on {device_of(fact.value)}"


def read_bare_taps(nodes: Mapping[str, torch.fx.Node], low: Format) -> tuple[str, ...]:
    """Convolutions of these sizes whose low backward leaves weight gradients uninitialised.

    Symbolic sizes count by their value at capture.
    """
    return tuple(name for name, node in nodes.items() if _may_be_unset(node, low) and _has_bare_taps(node, transposed=False))


def _may_be_unset(node: torch.fx.Node, low: Format) -> bool:
    """True if the low backward of an op on its device leaves gradients uninitialised for some sizes."""
    row = find_op(op_name(node.target)) if node.op == "call_function" else None
    return row is not None and f"{device_of(example_value(node))}:{low.name}" in row.unset


def _has_bare_taps(node: torch.fx.Node, transposed: bool) -> bool:
    """True if the sizes of a convolution give it bare taps. False if it is not `transposed` as asked."""
    given = named_arguments(node)
    x, weight = (example_value(given[name]) if isinstance(given.get(name), torch.fx.Node) else None for name in ("input", "weight"))
    if not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor) or isinstance(given.get("padding"), str):
        return False  # a padding given by name requires a stride of one
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
    """A setting of a convolution as a tuple with one entry for each dim."""
    each = tuple(setting) if isinstance(setting, list | tuple) else (setting,)
    return each * dims if len(each) == 1 else each


def _is_bare(size: int, kernel: int, stride: int, padding: int, dilation: int, transposed: bool) -> bool:
    """True if some tap of the kernel reads padding alone or, if `transposed`, writes only elements that are cut off."""
    reach = dilation * (kernel - 1)
    if transposed:
        turns, inside = size, (size - 1) * stride - 2 * padding + reach + 1
    else:
        turns, inside = (size + 2 * padding - reach - 1) // stride + 1, size
    places = (range(tap * dilation - padding, tap * dilation - padding + turns * stride, stride) for tap in range(kernel))
    return any(not any(0 <= place < inside for place in each) for each in places)


def pin_summing(fact: Fact, lists: OpLists, trained: Set[torch.fx.Node], learning: Set[torch.fx.Node]) -> Pin | None:
    """Pin an op high if it would add up the gradient of a trained value in the low format.

    Either its kernel does so, or it reads the value often and autograd does so. `learning` are all values that get gradients. `trained` are
    the values that torch.autocast holds in fp32: it adds up their gradients in fp32, and gradients of operands of ops on its fp32 list. The
    property of the kernel holds under all lists, also under lists that allow every op. It does not overrule an override for this op.
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
    """True if a getitem takes indices from a tensor, which may name an element more than once."""
    return any(isinstance(example_value(leaf), torch.Tensor) for leaf in tree_leaves(node.args[1:]) if isinstance(leaf, torch.fx.Node))


def pin_uneven(fact: Fact, kind: OpKind | None, lists: OpLists) -> Pin | None:
    """Pin an op high if its low kernel rounds by position; None if the user moved the op, or if painting rules decide instead of costs."""
    device = device_of(fact.value)
    if lists.rule != "cost" or kind not in (OpKind.INFER, OpKind.CLEAR, OpKind.INTERNAL) or fact.op in lists.asked:
        return None
    if fact.row is None or device not in fact.row.uneven:
        return None
    return Colour.HIGH, Reason.UNEVEN, f"{fact.op} on {device}"


__all__ = ["Pin", "per_dim", "pin_summing", "pin_uneven", "pin_unset", "read_bare_taps"]
