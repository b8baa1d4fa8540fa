"""The form of padding rules. A rule describes the effect of padded dims on one call of an op; `rules/table.py` has the rule of each op.

A rule has three parts. *Ties*: dims of operands and results that correspond, as columns of a and rows of b in a @ b. They are padded
together or not at all. A dim without a tie keeps its logical size, the size without padding. *Wants*: dims that should have a multiple
of a few elements, for the op's Tensor Core kernel. *Content*: the numbers in the result's padding, given those in the operands' padding.

The content is a number if all padding holds that number: 0.0 in weights, in pads and after ops that map zero to zero, 0.5 after a sigmoid.
It is MIXED if the padding holds finite and small, but different numbers. If an op would make the content or a gradient infinite, NaN or
large, as a square root does at zero, its rule raises Hazard: the padding is sliced off before the op. A matmul may sum over padding in
two cases: its weight is zero there and the other operand is finite, or both operands are activations that are zero there. So gradients of
padding are always zero: the backward of a slice returns zeros, and so does the backward of such a matmul.

A factor that is broadcast along a padded dim may be infinite after an overflow. Zeros in the padding times this factor are NaN. They do no
harm, because the other elements along the dim become infinite or NaN as well. A divisor may be zero without
an overflow, so a dim along which a divisor is broadcast is not padded.

The rules follow XLA's DynamicPadder (service/dynamic_padder.cc) for the ops that it knows. Each Hazard was verified by a measurement.

`Axes` finds which dims of a graph are the same axis, and which dims consist of several axes. A dim is an ordered list of axes, outer to
inner. For example, a view that splits a dim of 100 into (4, 25) shows that the dim consists of two axes. Axes that must have the same
extent are joined, as in union-find. An axis that turns out to consist of several axes is split wherever it is used. So three kinds of pads
are all described as a pad of one axis: at the end of a dim, inside every attention head, and inside every chunk of a fused weight.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amprewrite.ir.op_graph import Call, DisjointSets, Ref, Shape, Size

MIXED = "mixed"
Content = float | str
Slot = str | int
"""An operand of a call, given by the name of its value, or a result, given by its index."""
Part = tuple[Slot, int] | int
"""A part of a dim: (slot, dim), or the extent of an axis that is never padded, such as a number of gates."""
Leg = tuple[Part, ...]
"""One description of a dim: its parts, outer to inner. For example, (4, (state, 2)) describes a weight dim of an LSTM: four gates, each as
large as dim 2 of the operand called `state`, the hidden size."""
BROADCAST = "broadcast"
"""Content of an operand without padding that is broadcast along a padded dim of the result."""
LARGEST = 1e4
"""Largest magnitude that padding may hold. A larger number may overflow fp16 in the next op."""


class Hazard(Exception):
    """Raised by a padding rule if an op cannot take the numbers in the padding of its operands, such as zeros in a divisor.

    `why` is the reason in words. The padding of the operands named in `refs` is then sliced off before the op. If the op needs padding, it
    is padded anew with zeros. Without `refs` the operands and results of the op are not padded.
    """

    def __init__(self, why: str, refs: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.why, self.refs = why, tuple(refs)


Contents = Mapping[str, Content]
"""The numbers in the padding of each operand, by name: a number if all are equal, MIXED if they differ, BROADCAST if there is no padding
although the result has some."""


@dataclass
class Rule:
    """The padding rule of one call: which of its dims are padded together (`ties`), and for which sizes its kernel is fast (`wants`).

    Without ties no dim of the call may be padded.
    """

    ties: list[tuple[Leg, ...]] = field(default_factory=list)
    """Which dims of operands and results correspond, so that they are padded together. Each tie describes one such dim in several ways."""
    wants: list[tuple[Slot, int]] = field(default_factory=list)
    """Dims, as (slot, dim), for which the op's kernel is faster if their size is a multiple of a few elements."""
    content: Callable[[Contents], Content] = field(default=lambda contents: moved(contents))
    """Function from the numbers in the padding of the operands to the number in the padding of the results. It may raise Hazard."""
    whole: set[tuple[Slot, int]] = field(default_factory=set)
    """Dims, as (slot, dim), that may be padded only at their end, because the op takes elements along them by index, as embedding does."""
    ignored: set[str] = field(default_factory=set)
    """Names of operands that may have any size, because the op reads only their dtype or sizes, or pads them itself."""
    why_opaque: str = ""
    """The reason why some dims of the call must not be padded; "" if all may be padded, or if the reason is not recorded."""
    pointwise: bool = False
    """True if the op is element-wise: operands that lack a dim of the result are broadcast along it."""

    def tie(self, *legs: Leg) -> None:
        """Declare that dims of operands and results correspond: they have the same size and padding. Each of `legs` describes one dim."""
        self.ties.append(legs)


class View:
    """The call of an op for which a padding rule is made, with access to the shapes of its operands. (It is no view of a tensor.)"""

    def __init__(self, call: Call, calls: Mapping[str, Call]) -> None:
        self.call, self.calls = call, calls

    def shape(self, ref: Any) -> Shape | None:
        """Return the shape of the value that `ref` names; None if `ref` is no Ref, or names something other than one floating tensor."""
        found = self.calls.get(ref.name) if isinstance(ref, Ref) else None
        return found.shapes[0] if found and len(found.shapes) == 1 and not found.several and found.floating else None

    def is_tensor(self, ref: Any) -> bool:
        """True if `ref` names a value that consists of one or more tensors, of any dtype."""
        found = self.calls.get(ref.name) if isinstance(ref, Ref) else None
        return found is not None and bool(found.shapes)

    @property
    def out(self) -> Shape:
        """Shape of the result of the call; () if the result is something other than one floating tensor."""
        return self.call.shapes[0] if len(self.call.shapes) == 1 and not self.call.several and self.call.floating else ()


# -- content -----------------------------------------------------------------------------
def moved(contents: Contents) -> Content:
    """Return the number in the padding of the result of an op that only moves elements, such as a concatenation.

    It is the number in the padding of all operands. If their numbers differ, it is MIXED; if no operand is padded, 0.0.
    """
    found = {c for c in contents.values() if c != BROADCAST}
    return 0.0 if not found else found.pop() if len(found) == 1 else MIXED


def zero_keeping(contents: Contents) -> Content:
    """Return the number in the result's padding for an op that maps zero to zero: 0.0 if all operands have 0 there, otherwise MIXED."""
    found = [c for c in contents.values() if c != BROADCAST]
    return 0.0 if all(c == 0 for c in found) else MIXED


def all_zero(why: str, names: Container[str] | None = None) -> Callable[[Contents], Content]:
    """Return a function for `Rule.content` of an op that accepts only zeros in the padding of its operands, or of those in `names`.

    The function returns 0.0, the number in the padding of the result. For other padding it raises Hazard with the reason `why`.
    """

    def content(contents: Contents) -> Content:
        blamed = [name for name, c in contents.items() if c not in (0, BROADCAST) and (names is None or name in names)]
        if blamed:
            raise Hazard(why, blamed)
        return 0.0

    return content


# -- ties ---------------------------------------------------------------------------------
def aligned(view: View, rule: Rule, refs: Sequence[Any], out: Shape) -> None:
    """Declare in `rule` which dims of an element-wise op, with operands `refs` and result shape `out`, are padded together.

    Each dim of the result is tied to the same dim, counted from the right, of every operand that is not broadcast along it. A dim gets no
    tie, and so no padding, in three cases: its size is 1; or a floating operand has a size there that is neither 1 nor the result's size;
    or a non-floating operand, such as a boolean mask, is not broadcast along the dim. (Such operands cannot be padded.)
    """
    rule.pointwise = True
    for back in range(1, len(out) + 1):
        size = out[-back]
        if size == 1:
            continue
        legs: list[Leg] = [((0, len(out) - back),)]
        for ref in refs:
            if not view.is_tensor(ref) or ref.name in rule.ignored:
                continue
            shape = view.shape(ref)
            if shape is None:  # `ref` is not floating, for example a boolean mask
                masks = view.calls[ref.name].shapes
                if any(len(s) >= back and s[-back] != 1 for s in masks):
                    legs = []
                    break
                continue
            if len(shape) >= back and shape[-back] == size:
                legs.append(((ref.name, len(shape) - back),))
            elif len(shape) >= back and shape[-back] != 1:
                legs = []
                break
        if len(legs) > 1:
            rule.tie(*legs)


class Axes:
    """All axes of one graph. An axis is a dim that one or several tensors have, or one of the factors into which a view splits a dim.

    Each axis has a number, which the methods take and return. `unify` joins axes that turn out to be the same, and splits an axis that
    turns out to consist of two. So a number stored earlier may be out of date: pass stored axes through `leaves` before use.
    """

    def __init__(self) -> None:
        self._size: list[Size] = []
        self._joined = DisjointSets[int]()
        self._parts: dict[int, tuple[int, ...]] = {}
        """For each axis that was split: the (outer, inner) axes of which it consists."""

    def new(self, size: Size) -> int:
        """Add an axis of extent `size` and return its number."""
        self._size.append(size)
        return len(self._size) - 1

    def find(self, axis: int) -> int:
        """Return the number that stands for `axis` and for all axes that were joined to it."""
        return self._joined.find(axis)

    def size(self, axis: int) -> Size:
        return self._size[self.find(axis)]

    def leaves(self, axes: Sequence[int]) -> tuple[int, ...]:
        """Return the axes in `axes`, outer to inner. An axis that was split is replaced by the axes into which it was split."""
        found: list[int] = []
        stack = list(reversed(axes))
        while stack:
            axis = self.find(stack.pop())
            parts = self._parts.get(axis)
            if parts is None:
                found.append(axis)
            else:
                stack.extend(reversed(parts))
        return tuple(found)

    def unify(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Make two lists of axes of one dim the same: join axes of equal size, and split an axis where the other list is finer.

        Return False, and change nothing, if the sizes do not allow this.
        """
        left, right = list(self.leaves(one)), list(self.leaves(other))
        if not self._feasible([self.size(a) for a in left], [self.size(a) for a in right]):
            return False
        while left and right:
            a, b = self.find(left.pop()), self.find(right.pop())
            a_parts, b_parts = self._parts.get(a), self._parts.get(b)
            if a_parts is not None or b_parts is not None:  # an axis was split earlier: compare its parts instead
                left += a_parts or (a,)
                right += b_parts or (b,)
                continue
            size_a, size_b = self.size(a), self.size(b)
            if a == b:
                continue
            if size_a == size_b:
                self._joined.join(a, b)
            elif isinstance(size_a, int) and isinstance(size_b, int) and size_a > size_b:
                left += self._split(a, size_b)
                right.append(b)
            else:
                right += self._split(b, size_a)
                left.append(a)
        return True

    def _split(self, axis: int, inner: Size) -> tuple[int, int]:
        size = self.size(axis)
        assert isinstance(size, int) and isinstance(inner, int)
        parts = (self.new(size // inner), self.new(inner))
        self._parts[axis] = parts
        return parts

    @staticmethod
    def _feasible(left: list[Size], right: list[Size]) -> bool:
        left, right = list(left), list(right)
        while left and right:
            a, b = left.pop(), right.pop()
            if a == b:
                continue
            if not isinstance(a, int) or not isinstance(b, int) or min(a, b) < 2:
                return False
            if max(a, b) % min(a, b):
                return False
            if a > b:
                left += [a // b, b]
                right.append(b)
            else:
                right += [b // a, a]
                left.append(a)
        return not left and not right
