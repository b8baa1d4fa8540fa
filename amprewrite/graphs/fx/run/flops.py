"""Compute the FLOPs of an fx node from the shapes of its operands and results.

For most products, traits in the op table tell which dims are summed. This file has special code for other products: `einsum`, `tensordot`,
`bilinear`, `linear_cross_entropy`, `_transformer_encoder_layer_fwd`, and convolutions. If the name of a convolution contains `transpose`,
its FLOPs follow from the size of its input, otherwise from the size of its result.
"""

from __future__ import annotations

import math
import string
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import example_value, hints, named_arguments, tensors
from amprewrite.tables.ops.op_lists import OPS, Trait, ops_with
from amprewrite.tables.ops.products import chain_flops, einsum_flops, pair_flops
from amprewrite.tables.vocabulary import OpKind
from amprewrite.torch_internals.trees import tree_leaves

_PRODUCTS = {name for name, row in OPS.items() if row.kind is OpKind.ALLOW} | ops_with(Trait.SUMS_LAST_DIM, Trait.ADDS_PRODUCT)
"""Names of the ops that may have FLOPs. An unlisted convolution has FLOPs, too: it is known by "conv" in its name."""


def flops(op: str, node: torch.fx.Node) -> int:
    """Return the FLOPs of `node`, a call of `op`, from the shapes of its tensors; 0 if `op` computes no product.

    Products are matrix products, convolutions, attention and recurrent layers. A multiply-add counts as two FLOPs.
    """
    if op not in _PRODUCTS and "conv" not in op:
        return 0
    leaves = tree_leaves((node.args, dict(node.kwargs)))  # unlike `all_input_nodes`, this lists an operand twice if it is passed twice
    shapes = [hints(t) for leaf in leaves if isinstance(leaf, torch.fx.Node) for t in tensors(example_value(leaf))[:1]]
    out = [math.prod(hints(t)) for t in tensors(example_value(node))[:1]]
    if not out or not shapes or not shapes[0]:
        return 0
    if op in ops_with(Trait.SUMS_LAST_DIM):
        grouped = all(len(shape) == 2 for shape in shapes[:2]) and len(hints(tensors(example_value(node))[0])) == 3
        # A grouped product has 2-dim operands and a 3-dim result. Each group sums only a part of the dim: divide by the number of groups.
        return 2 * out[0] * shapes[0][-1] // (hints(tensors(example_value(node))[0])[0] if grouped else 1)
    if op in ops_with(Trait.ADDS_PRODUCT) and len(shapes) > 1 and shapes[1]:
        return 2 * out[0] * shapes[1][-1]
    if op == "_transformer_encoder_layer_fwd":  # count products with its four weights, attention scores, and weighted sums of values
        rows, sizes = math.prod(shapes[0][:-1]), [math.prod(shape) for shape in shapes[1:] if len(shape) == 2]
        return 2 * rows * sum(sizes[:4]) + 4 * rows * shapes[0][-2] * shapes[0][-1]
    if op in ops_with(Trait.ATTENDS_AND_PROJECTS) and len(node.args) > 1:  # four projections, attention scores, weighted sums of values
        query, key = (hints(tensors(example_value(each))[0]) for each in node.args[:2])  # type: ignore[arg-type]
        # `query` and `key` are shapes: (length, batch, width) or (length, width)
        asked, keys = math.prod(query[:-1]), math.prod(key[:-1])
        return 4 * (asked + keys) * query[-1] ** 2 + 4 * asked * key[0] * query[-1]
    if op in ops_with(Trait.ATTENDS) and len(shapes) > 1:
        return 4 * math.prod(shapes[0]) * shapes[1][-2]
    if op == "linear_cross_entropy" and len(shapes) > 1:
        return 2 * math.prod(shapes[0]) * shapes[1][0]
    if "conv" in op and len(shapes) > 1 and len(shapes[1]) > 1:
        moved = math.prod(shapes[0]) if "transpose" in op else out[0]
        return 2 * moved * math.prod(shapes[1]) // max(shapes[1][0], 1)
    if op in ops_with(Trait.RECURRENT):
        steps = math.prod(shapes[0][:-1])
        return 2 * steps * sum(math.prod(s) for s in shapes[1:] if len(s) == 2)
    if op in ops_with(Trait.RECURRENT_STEP):
        given = named_arguments(node)
        weights = (tensors(example_value(given[name]))[0] for name in ("w_ih", "w_hh"))
        return 2 * math.prod(shapes[0][:-1]) * sum(math.prod(hints(weight)) for weight in weights)
    if op == "einsum":
        return einsum_flops(_equation(node), shapes)
    if op == "tensordot":
        return pair_flops(shapes[0], shapes[1], hints(tensors(example_value(node))[0]))
    if op == "bilinear" and len(shapes) > 2:
        return 2 * math.prod(shapes[0][:-1]) * math.prod(shapes[2])
    if op in ops_with(Trait.MULTIPLIES_ALL):
        return chain_flops(shapes)
    return 0


def _equation(node: torch.fx.Node) -> str:
    """Return the equation of an einsum as text, also for a call without text: "ab,bc" for `einsum(x, [0, 1], y, [1, 2])`."""
    first = node.kwargs.get("equation", node.args[0] if node.args else "")
    if isinstance(first, str):
        return first
    written = [_letters(each) for each in node.args[1::2]]
    return ",".join(written) + (f"->{_letters(node.args[-1])}" if len(node.args) % 2 else "")


def _letters(dims: Any) -> str:
    return "".join("..." if each is Ellipsis else string.ascii_letters[each] for each in dims)
