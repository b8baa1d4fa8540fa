"""Padding rules (`padding/rule.py`) of ops that return their operands' elements in another shape: views, pieces, and joined tensors.

This file knows some ops by name: `t`, `permute` and `transpose` for their order of dims, `unbind`, which removes the dim that it cuts,
`chunk`, which may give fewer pieces than asked for, and `constant_pad_nd`, whose value is its third argument.
"""

from __future__ import annotations

import math
from typing import Any

from amprewrite.ir.op_graph import Call, Ref, Shape
from amprewrite.planner.padding.rule import MIXED, Rule, View, aligned, zero_keeping


# -- the same elements in another shape ----------------------------------------------------------
def _others(view: View, source: Any) -> set[str]:
    """Return the names of the operands of a view or conversion except `source`. The op reads only their dtype or sizes, no elements."""
    found = {ref.name for ref in (*view.call.args[1:], *view.call.kwargs.values()) if isinstance(ref, Ref)}
    return found - {getattr(source, "name", "")}


def like(view: View) -> Rule:
    """Return the padding rule of copies and conversions, which return the same shape and elements. All dims may be padded."""
    source = view.call.get(0, "input", view.call.kwargs.get("self"))
    rule = Rule()
    rule.ignored = _others(view, source)
    shape = view.shape(source)
    if shape is None or shape != view.out:
        return Rule(why_opaque="it does more than copy", ignored=rule.ignored)
    for dim, size in enumerate(shape):
        if size != 1:
            rule.tie(((source.name, dim),), ((0, dim),))
    return rule


def groups_of(before: Shape, after: Shape) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return pairs (neighbouring dims before a reshape, neighbouring dims after it) in which the products of the sizes are equal.

    For example, [2, 3, 5] and [6, 5] give ((0, 1), (0,)) and ((2,), (1,)). Dims of size 1 are left out. A symbolic size matches only
    itself; dims that cannot be matched are left out as well.
    """
    left = [d for d, s in enumerate(before) if s != 1]
    right = [d for d, s in enumerate(after) if s != 1]
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    tail: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    while left and right and isinstance(before[left[0]], str) and before[left[0]] == after[right[0]]:
        found.append(((left.pop(0),), (right.pop(0),)))
    while left and right:
        a, b = [left.pop()], [right.pop()]
        while True:
            sizes = [before[d] for d in a], [after[d] for d in b]
            if any(isinstance(s, str) for s in (*sizes[0], *sizes[1])):
                if sizes[0] == sizes[1]:
                    break
                return found + tail[::-1]
            one, other = (math.prod(int(s) for s in side) for side in sizes)
            if one == other:
                break
            if (one < other and not left) or (one > other and not right):
                return found + tail[::-1]
            if one < other:
                a.insert(0, left.pop())
            else:
                b.insert(0, right.pop())
        tail.append((tuple(a), tuple(b)))
    return found + tail[::-1]


def reshape(view: View) -> Rule:
    """Return the padding rule of a reshape. A dim before the reshape and the dim after it with the same elements are padded together.

    For example, [2, 3, 5] becomes [6, 5]. If dim 1 is padded from 3 to 4, then [2, 4, 5] becomes [8, 5]: the new dim 0 is padded, too.
    """
    source = view.call.get(0, "input", view.call.kwargs.get("self"))
    shape = view.shape(source)
    if shape is None or not view.call.shapes:
        return Rule(why_opaque="it reshapes something other than a single tensor")
    if not all(isinstance(a, int | str | tuple | Ref) for a in (*view.call.args[1:], *view.call.kwargs.values())):
        return Rule(why_opaque="it looks at the bits as another dtype")
    rule = Rule()
    rule.ignored = _others(view, source)
    for before, after in groups_of(shape, view.out):
        rule.tie(tuple((source.name, d) for d in before), tuple((0, d) for d in after))
    return rule


def permuted(view: View) -> Rule:
    """Return the padding rule of a permutation. All dims may be padded; padding moves to the new place of its dim."""
    call = view.call
    source = call.get(0, "input", call.kwargs.get("self"))
    shape = view.shape(source)
    if shape is None:
        return Rule(why_opaque="it permutes something other than a single tensor")
    order = permutation(call, len(shape))
    if order is None:
        return Rule(why_opaque="its order of dims is unknown")
    rule = Rule()
    for after, before in enumerate(order):
        rule.tie(((source.name, before),), ((0, after),))
    return rule


def permutation(call: Call, rank: int) -> list[int] | None:
    """Return the operand's dims in the order of the result of `t`, `permute` or `transpose`; None if the arguments are no plain numbers."""
    order = list(range(rank))
    if call.op == "t":
        return order[::-1] if rank <= 2 else [*order[:-2], order[-1], order[-2]]
    if call.op == "permute":
        dims = call.args[1:] if len(call.args) > 2 else call.get(1, "dims", ())
        dims = (dims,) if isinstance(dims, int) else dims
        if isinstance(dims, tuple) and len(dims) == 1 and isinstance(dims[0], tuple):
            dims = dims[0]
        known = isinstance(dims, tuple) and len(dims) == rank and all(isinstance(d, int) for d in dims)
        return [d % rank for d in dims] if known else None
    if call.op == "transpose":
        one, other = call.get(1, "dim0", call.kwargs.get("axis0")), call.get(2, "dim1", call.kwargs.get("axis1"))
        if not isinstance(one, int) or not isinstance(other, int) or not rank:
            return None
        order[one], order[other] = order[other], order[one]
        return order
    return None


def expand(view: View) -> Rule:
    """Return the padding rule of an expand. A dim may be padded if the op does not expand it."""
    source = view.call.get(0, "input", view.call.kwargs.get("self"))
    rule = Rule()
    rule.ignored = _others(view, source)
    if view.shape(source) is None:
        return Rule(why_opaque="it expands something other than a single tensor")
    aligned(view, rule, [source], view.out)
    return rule


def zeros(view: View) -> Rule:
    """Return the padding rule of `zeros`, with which models make initial states, for example. All dims may be padded with further zeros."""
    rule = Rule(content=lambda contents: 0.0)
    rule.ignored = {ref.name for ref in view.call.args if isinstance(ref, Ref)}
    for dim, size in enumerate(view.out):
        if isinstance(size, int) and size > 1:
            rule.tie(((0, dim),))
    return rule


# -- pieces ------------------------------------------------------------------------------------
def piece(start: int, stop: int, size: Any) -> tuple[int, int] | None:
    """Return (n, index) if [start, stop) is piece `index` of n equal pieces of a dim of `size`: (3, 1) for [4, 8) of 12. Otherwise None."""
    if not isinstance(size, int) or stop <= start or size % (stop - start) or start % (stop - start):
        return None
    return size // (stop - start), start // (stop - start)


def index_of(call: Call, shape: Shape) -> list[tuple[int, Any]] | None:
    """Return the index of a getitem as a list: (dim, int or slice) for each dim of the operand, (-1, None) for a new dim.

    None if the index holds anything but ints, None, Ellipsis, and slices with constant bounds.
    """
    index = call.args[1]
    index = index if isinstance(index, tuple) else (index,)
    if any(not (i is None or i is Ellipsis or type(i) is int or isinstance(i, slice)) for i in index):
        return None
    if any(isinstance(i, slice) and any(not (x is None or type(x) is int) for x in (i.start, i.stop, i.step)) for i in index):
        return None
    taken = sum(i is not None and i is not Ellipsis for i in index)
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    found: list[tuple[int, Any]] = []
    dim = 0
    for i in index:
        if i is Ellipsis:
            for _ in range(len(shape) - taken):
                found.append((dim, slice(None)))
                dim += 1
        elif i is None:
            found.append((-1, None))
        else:
            found.append((dim, i))
            dim += 1
    return found


def getitem(view: View) -> Rule:
    """Return the padding rule of getitem on a tensor or on a tuple of results.

    A dim of a tensor may be padded if it is taken in full, or if the slice is one of several equal pieces of the dim. If the operand is a
    tuple, all dims of the result that is picked may be padded.
    """
    call = view.call
    if call.item is not None and isinstance(call.args[0], Ref):
        rule, source = Rule(), call.args[0]
        for dim, size in enumerate(view.out):
            if size != 1:
                rule.tie(((f"{source.name}#{call.item}", dim),), ((0, dim),))
        return rule
    source = call.args[0]
    shape = view.shape(source)
    index = None if shape is None else index_of(call, shape)
    if shape is None or index is None or not view.out:
        return Rule(why_opaque="an index that is more than slices needs logical places")
    rule, after = Rule(), 0
    for dim, i in index:
        if type(i) is int:
            continue
        if i is not None:
            _slice_tie(rule, source.name, dim, shape[dim], i, after)
        after += 1
    return rule


def _slice_tie(rule: Rule, name: str, dim: int, size: Any, cut: slice, after: int) -> None:
    if cut == slice(None):
        rule.tie(((name, dim),), ((0, after),))
    elif isinstance(size, int):
        start, stop, step = cut.indices(size)
        found = piece(start, stop, size) if step == 1 else None
        if found is not None and stop - start > 1:
            rule.tie(((name, dim),), (found[0], (0, after)) if found[0] > 1 else ((0, after),))


def narrow(view: View) -> Rule:
    """Return the padding rule of `narrow`. All dims may be padded, but the cut dim only if the piece is one of several equal pieces."""
    call = view.call
    source = call.get(0, "input", call.kwargs.get("self"))
    dim, start, length = call.get(1, "dim"), call.get(2, "start"), call.get(3, "length")
    shape = view.shape(source)
    if shape is None or not all(isinstance(x, int) for x in (dim, start, length)):
        return Rule(why_opaque="a narrow with unknown places")
    rule = Rule()
    for d, size in enumerate(shape):
        if d != dim % len(shape):
            rule.tie(((source.name, d),), ((0, d),))
        elif isinstance(size, int):
            start = start + size if start < 0 else start
            _slice_tie(rule, source.name, d, size, slice(start, start + length), d)
    return rule


def select(view: View) -> Rule:
    """Return the padding rule of `select`. All dims except the selected dim may be padded."""
    call = view.call
    source, dim = call.get(0, "input", call.kwargs.get("self")), call.get(1, "dim")
    shape = view.shape(source)
    if shape is None or not isinstance(dim, int):
        return Rule(why_opaque="a select with unknown places")
    rule, dim = Rule(), dim % len(shape)
    for d in range(len(shape)):
        if d != dim:
            rule.tie(((source.name, d),), ((0, d - (d > dim)),))
    return rule


def chunks(view: View) -> Rule:
    """Return the padding rule of chunk, split and unbind. All dims but the cut dim may be padded.

    The cut dim of a split may be padded if the sizes of all pieces are multiples of the smallest, and the cut dim of a chunk if the call
    gives as many pieces as it asks for, all equal. Each piece is then padded.
    """
    call = view.call
    source = call.get(0, "input", call.kwargs.get("self", call.kwargs.get("tensor")))
    shape = view.shape(source)
    dim = call.get(1 if call.op == "unbind" else 2, "dim", 0)
    if shape is None or not isinstance(dim, int) or not call.floating:
        return Rule(why_opaque="it cuts something other than a single tensor")
    rule, dim, outs = Rule(), dim % len(shape), range(len(call.shapes))
    for d in range(len(shape)):
        if d != dim:
            at = d - (d > dim) if call.op == "unbind" else d
            rule.tie(((source.name, d),), *(((i, at),) for i in outs))
    if call.op == "unbind":
        return rule
    sizes = [s[dim] for s in call.shapes]
    if call.op == "chunk" and (len(set(sizes)), len(sizes)) != (1, call.get(1, "chunks")):
        return rule  # chunk(5) of 12 elements gives 4 pieces of 3: with padding, the number of pieces might differ
    if not all(isinstance(s, int) and s > 0 for s in sizes):
        return rule
    unit = math.gcd(*sizes)  # type: ignore[arg-type]
    if len(set(sizes)) == 1:
        rule.tie(((source.name, dim),), (len(sizes), (0, dim)))
        rule.tie(*(((i, dim),) for i in outs))
    elif unit > 1:
        first = next((i for i in outs if sizes[i] == unit), None)
        if first is not None:  # all sizes are multiples of the smallest (a QKV weight with fewer key heads): tie each piece to the smallest
            rule.tie(((source.name, dim),), (sum(sizes) // unit, (first, dim)))  # type: ignore[arg-type]
            for i in outs:
                if i != first:
                    rule.tie(((i, dim),), (sizes[i] // unit, (first, dim)) if sizes[i] != unit else ((first, dim),))  # type: ignore[operator]
    return rule


def cat(view: View) -> Rule:
    """Return the padding rule of a concatenation. All dims may be padded, but the joined dim only if its size is equal in all operands."""
    call = view.call
    tensors_, dim = call.get(0, "tensors"), call.get(1, "dim", call.kwargs.get("axis", 0))
    shapes = [view.shape(t) for t in tensors_] if isinstance(tensors_, tuple) else [None]
    if any(s is None for s in shapes) or not isinstance(dim, int) or len({len(s) for s in shapes if s}) != 1:
        return Rule(why_opaque="it joins something other than plain tensors")
    rule, dim = Rule(), dim % len(view.out)
    for d in range(len(view.out)):
        if d != dim:
            rule.tie(((0, d),), *(((t.name, d),) for t in tensors_))
    sizes = {s[dim] for s in shapes if s}
    if len(sizes) == 1 and isinstance(next(iter(sizes)), int):
        rule.tie(((0, dim),), (len(tensors_), (tensors_[0].name, dim)))
        if len(tensors_) > 1:
            rule.tie(*(((t.name, dim),) for t in tensors_))
    return rule


def stack(view: View) -> Rule:
    """Return the padding rule of a stack. All dims of its operands may be padded."""
    call = view.call
    tensors_, dim = call.get(0, "tensors"), call.get(1, "dim", 0)
    if not isinstance(tensors_, tuple) or not all(view.shape(t) is not None for t in tensors_) or not isinstance(dim, int):
        return Rule(why_opaque="it joins something other than plain tensors")
    rule, dim = Rule(), dim % len(view.out)
    for d in range(len(view.out) - 1):
        rule.tie(((0, d + (d >= dim)),), *(((t.name, d),) for t in tensors_))
    return rule


def padded(view: View) -> Rule:
    """Return the padding rule of a `pad` in the model's own code. Dims that this op neither pads nor crops may be padded.

    If the model pads with 0, zeros in the operand's padding stay zeros. Otherwise the numbers in the padding are unknown (MIXED).
    """
    call = view.call
    source, sizes = call.get(0, "input"), call.get(1, "pad")
    value = call.get(2 if call.op == "constant_pad_nd" else 3, "value")
    shape = view.shape(source)
    if shape is None or not isinstance(sizes, tuple) or not all(isinstance(size, int) for size in sizes):
        return Rule(why_opaque="it pads something other than a single tensor by numbers")
    rule = Rule(content=zero_keeping if not value else lambda contents: MIXED)
    for dim in range(len(shape)):
        place = 2 * (len(shape) - 1 - dim)  # the argument `pad` lists the last dim first
        if not any(sizes[place : place + 2]):  # test both numbers: (1, -1) keeps the size of the dim, but moves its padding
            rule.tie(((source.name, dim),), ((0, dim),))
    return rule
