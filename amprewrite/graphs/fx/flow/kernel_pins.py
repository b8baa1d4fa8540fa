"""Find ops whose bf16 or fp16 kernel loses accuracy on a device, in its forward or its backward.

The accuracy is lost for one of four reasons. The functions `pin_...` return a *pin*, which forces an op to fp32.

1. A gradient is added up in the low format: by the kernel, or by autograd if the op takes one value as many arguments.
2. The kernel rounds some elements twice, depending on their position.
3. The backward leaves the gradients of *bare taps* unwritten. A bare tap is a weight of a convolution that is multiplied by padding alone,
   or a weight of a transposed convolution whose products are all cropped. For these weights oneDNN's bf16 kernels for strided convolutions
   return uninitialised memory, at times NaN. torch.autocast has the same error. Measured with torch 2.13: one and two dims (kernel
   sizes 1, 2, 3 and 5, strides up to 4, paddings and dilations up to 2, inputs of up to 4 elements a dim), three dims (each number up to
   3), and transposed convolutions in one and two dims (each number up to 3). Apart from bare taps, gradients of padded convolutions were
   wrong only in three dims with a kernel wider than the input. A convolution with bare taps runs low with a separate op for its padding,
   and then gets right gradients. A transposed convolution with bare taps stays fp32. In three dims it was not measured.
4. Each time step of a recurrent layer reads the weights, and autograd adds up the gradients of all steps in the low format. So the layer
   runs in parts of STEPS steps (`graphs/fx/run/recurrent_layers.py`). oneDNN's kernel for all steps of a bf16 LSTM adds up in fp32.

This file has special code for `getitem`, because its backward adds up gradients only if an index is a tensor.

`read_by_many` finds values with so many readers that adding up their gradients in a low format would lose accuracy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Set
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import Fact, arguments, device_of, differentiable, example_value, hint, hints, named_arguments, tensors
from amprewrite.graphs.fx.run.recurrent_layers import LAYERS, STEPS, is_packed_call
from amprewrite.ir.op_graph import OpGraph
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.list_presets import autocast_kinds
from amprewrite.tables.ops.op_lists import OpLists, Trait, find_op, op_name, ops_with
from amprewrite.tables.vocabulary import Colour, OpKind, Reason
from amprewrite.torch_internals.trees import tree_leaves

Pin = tuple[Colour, Reason, str]
"""A colour (low or high) that an op must have, as (colour, reason, detail of the reason)."""


def pin_unset(fact: Fact, low: Format) -> Pin | None:
    """Return a pin that forces a transposed convolution to fp32 if its low backward leaves weight gradients unwritten; otherwise None."""
    if not _may_be_unset(fact.node, low) or not _has_bare_taps(fact.node, transposed=True):
        return None
    return Colour.HIGH, Reason.UNSET, f"{fact.op} in {low.name} on {device_of(fact.value)}"


def read_bare_taps(nodes: Mapping[str, torch.fx.Node], low: Format) -> tuple[str, ...]:
    """Return the names of the convolutions whose low backward leaves the gradients of bare taps uninitialised.

    A bare tap is a position of the kernel that meets only padding. Padded convolutions in three dims with a kernel wider than the input
    are included, too. Transposed convolutions are left out. Symbolic sizes count by their value at capture.
    """
    return tuple(name for name, node in nodes.items() if _may_be_unset(node, low) and _has_bare_taps(node, transposed=False))


def read_run_by_steps(nodes: Mapping[str, torch.fx.Node], low: Format, trained: Set[str]) -> tuple[str, ...]:
    """Return the names of trained recurrent layers that run more than STEPS (16) time steps, with separate ops for each step.

    A layer is trained if one of its weights is in `trained`, the names of all values that get gradients. A layer on packed sequences is
    included even if it has fewer steps, or if its device has one kernel for all steps.
    """
    learning = {nodes[name] for name in trained}
    return tuple(name for name, node in nodes.items() if node.target in LAYERS and _runs_by_steps(node, low, learning))


def _runs_by_steps(node: torch.fx.Node, low: Format, learning: Set[torch.fx.Node]) -> bool:
    row, device = find_op(op_name(node.target)), device_of(example_value(node))
    args: tuple[Any, ...] = node.args
    if row is None or device not in row.by_steps or node.kwargs or len(args) != 9:
        return False
    if is_packed_call(args):
        return not learning.isdisjoint(args[3])
    x, _, weights, biased, layers, _, _, both, batch_first = args
    projected = len(weights) != layers * (1 + both) * (4 if biased else 2)
    one_kernel = f"{device}:{low.name}" in row.one_kernel and not projected
    return not one_kernel and hint(example_value(x).shape[1 if batch_first else 0]) > STEPS and not learning.isdisjoint(weights)


def _may_be_unset(node: torch.fx.Node, low: Format) -> bool:
    """True if, by the op table, the low backward of the op leaves gradients uninitialised on its device for some sizes of operands."""
    row = find_op(op_name(node.target)) if node.op == "call_function" else None
    return row is not None and bool(row.unset) and f"{device_of(example_value(node))}:{low.name}" in row.unset


def _has_bare_taps(node: torch.fx.Node, transposed: bool) -> bool:
    """True if a strided convolution has bare taps (weights multiplied by padding alone), or a padded 3-dim kernel is wider than its input.

    The low backward may give wrong gradients in both cases. If `transposed` is True, only transposed convolutions are checked,
    otherwise only plain ones. Any other op gives False.
    """
    given = named_arguments(node)
    x, weight = (example_value(given[name]) if isinstance(given.get(name), torch.fx.Node) else None for name in ("input", "weight"))
    if not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor) or ("output_padding" in given) is not transposed:
        return False
    dims = weight.dim() - 2
    settings = [per_dim(given.get(name) or 1, dims) for name in ("stride", "dilation")]
    for size, kernel, (_, padding), stride, dilation in zip(
        map(hint, x.shape[-dims:]), weight.shape[-dims:], padding_of(given, weight), *settings, strict=True
    ):
        if dims == 3 and padding and dilation * (kernel - 1) >= size:
            return True
        if stride > 1 and padding and _is_bare(size, kernel, stride, padding, dilation, transposed):
            return True
    return False


def per_dim(setting: Any, dims: int) -> tuple[Any, ...]:
    """Return a setting of a convolution, such as its stride, as a tuple with one entry for each of its `dims` dims."""
    each = tuple(setting) if isinstance(setting, list | tuple) else (setting,)
    return each * dims if len(each) == 1 else each


def padding_of(given: Mapping[str, Any], weight: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return, for each dim of a convolution with the arguments `given`, how many elements it pads before and after its input.

    For padding="same" with an odd number of elements in all, one more is padded after the input than before it, as PyTorch does.
    """
    dims, padding = weight.dim() - 2, given.get("padding") or 0
    if padding == "same":
        reaches = [each * (kernel - 1) for each, kernel in zip(per_dim(given.get("dilation") or 1, dims), weight.shape[2:], strict=True)]
        return tuple((reach // 2, reach - reach // 2) for reach in reaches)
    return tuple((each, each) for each in per_dim(0 if padding == "valid" else padding, dims))


def _is_bare(size: int, kernel: int, stride: int, padding: int, dilation: int, transposed: bool) -> bool:
    """True if, along one dim of a convolution, some position of the kernel reads only padding.

    For a transposed convolution: True if some position writes only elements that are cropped from the result. The arguments are the size of
    the input and the settings of the convolution along this dim.
    """
    reach = dilation * (kernel - 1)
    if transposed:
        turns, inside = size, (size - 1) * stride - 2 * padding + reach + 1
    else:
        turns, inside = (size + 2 * padding - reach - 1) // stride + 1, size
    places = (range(tap * dilation - padding, tap * dilation - padding + turns * stride, stride) for tap in range(kernel))
    return any(not any(0 <= place < inside for place in each) for each in places)


def pin_summing(fact: Fact, lists: OpLists, trained: Set[torch.fx.Node], learning: Set[torch.fx.Node]) -> Pin | None:
    """Return a pin that forces an op to fp32 if its backward adds up a gradient that torch.autocast adds up in fp32; otherwise None.

    If the op ran low, this gradient would be added up in the low format: by its backward kernel, as in `embedding`, or by autograd, because
    the op reads one value more than MOST_READERS times. `learning` are all values that get gradients, of which `trained` are fp32 under
    torch.autocast. The gradient must belong to a `trained` value, or to any `learning` value if torch.autocast runs the op itself in
    fp32 and its kernel adds up. Unlisted or denied ops, ops that the op table allows, and ops with a user's override get no pin.
    """
    if fact.row is None or fact.role != "op" or fact.kind in (None, OpKind.DENY) or fact.row.kind is OpKind.ALLOW or fact.op in lists.asked:
        return None
    device = device_of(fact.value) if fact.row.low_backward else ""
    sums = device in fact.row.low_backward and (fact.op != "getitem" or _takes_places(fact.node))
    sums = sums and (fact.op not in _WINDOWS or _windows_over(fact.node) > MOST_READERS)
    exact = learning if sums and autocast_kinds(device).get(fact.op) is OpKind.DENY else trained
    read = Counter(node for parameter, node in arguments(fact.node) if node in exact and parameter not in fact.row.data)
    times = max(read.values(), default=0)
    if (sums and times) or times > MOST_READERS:
        return Colour.HIGH, Reason.LOW_BACKWARD, f"{fact.op} on {device}" if sums else f"{fact.op} reads one value {times} times"
    return None


def _windows_over(node: torch.fx.Node) -> float:
    """Return how many windows of an op such as `avg_pool2d` or `unfold` contain one element of its operand, on average.

    For a 3 x 3 average pool this is nine with stride 1, and one with stride 3. Symbolic sizes count by their value at capture.
    """
    read, made = (next(t for each in nodes for t in tensors(example_value(each))) for nodes in (node.all_input_nodes, (node,)))
    given, dims = named_arguments(node), 0 if made.dim() != read.dim() else _POOLED.get(op_name(node.target), 0)
    inside = math.prod(map(hint, per_dim(given.get("kernel_size") or 1, dims)[:dims]))
    return inside * math.prod(hints(made)) / max(math.prod(hints(read)), 1)


def _takes_places(node: torch.fx.Node) -> bool:
    """True if an index of a getitem is a tensor. Such an index may select one element more than once."""
    return any(isinstance(example_value(leaf), torch.Tensor) for leaf in tree_leaves(node.args[1:]) if isinstance(leaf, torch.fx.Node))


def pin_uneven(fact: Fact, kind: OpKind | None, lists: OpLists) -> Pin | None:
    """Return a pin that forces an op to fp32 if its low kernel rounds some elements twice and all others once; otherwise None.

    With such a kernel, the result for a row depends on the row's place in the batch. Only the default planner (rule "cost" in `lists`)
    pins such ops, unless the user has an override for the op, or its `kind` in `lists` is ALLOW, DENY or None (unlisted).
    """
    if lists.rule != "cost" or kind not in (OpKind.INFER, OpKind.CLEAR, OpKind.INTERNAL) or fact.op in lists.asked:
        return None
    if fact.row is None or not fact.row.uneven or (device := device_of(fact.value)) not in fact.row.uneven:
        return None
    return Colour.HIGH, Reason.UNEVEN, f"{fact.op} on {device}"


_STOP, _WINDOWS = ops_with(Trait.STOPS_GRADIENT), ops_with(Trait.READS_WINDOWS)
_POOLED = {f"{kind}_pool{dims}d": dims for kind in ("avg", "max") for dims in (1, 2, 3)}
"""{pooling op with an argument `kernel_size`: number of dims of its windows}, for `_windows_over`."""
MOST_READERS = 8
"""Largest number of gradients of one value that may be added up in a low format.

Each addition rounds. In bf16, eight additions together have an error of 0.4 %, as large as the error of one product.
"""


def trained_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes that get gradients: parameters and inputs that require them, and values computed from these, up to a `detach`."""
    found: set[torch.fx.Node] = set()
    for node in graph.nodes:
        value = example_value(node)
        held = node.op in ("placeholder", "get_attr")
        learns = value.requires_grad if held and isinstance(value, torch.Tensor) else not found.isdisjoint(node.all_input_nodes)
        if learns and op_name(node.target) not in _STOP and any(map(differentiable, tensors(value))):
            found.add(node)
    return found


def trained_values(nodes: Mapping[str, torch.fx.Node]) -> frozenset[str]:
    """Return the names of the nodes among `nodes` whose values get gradients. All of `nodes` must belong to one graph."""
    trained = trained_nodes(next(iter(nodes.values())).graph) if nodes else set()
    return frozenset(name for name, node in nodes.items() if node in trained)


def read_by_many(graph: OpGraph, nodes: Mapping[str, torch.fx.Node], trained: Set[str]) -> tuple[str, ...]:
    """Return the names of fp32 values that get gradients from more than MOST_READERS readers. `trained`: names of values with gradients.

    One example is the result of an encoder, which every layer of a decoder reads: torch.autocast casts it anew for every reader, and adds
    up the gradients of these copies in fp32. Another example is the weight of a cell that a loop calls in each time step: torch.autocast
    makes only one copy of it, and so adds up the gradients of all steps in the low format.
    """
    names = {node: name for name, node in nodes.items()}
    found = list[str]()
    for name in trained:
        many = sum(names.get(user) in trained for user in nodes[name].users) > MOST_READERS
        if many and graph[name].carries_fp32:
            found.append(name)
    return tuple(sorted(found, key=graph.rank.__getitem__))
