"""The effect of every op on a padded dim: one row an op.

A rule has three parts. *Ties*: dims of operands and results that are the same dim, so that they are padded together or not at all. A dim
without a tie keeps its logical size. *Wants*: dims that the op's Tensor Core kernel wants to be a multiple. *Content*: the numbers in the
padding of the result, given the content of the operands.

Content is a number if all padding holds that number (0.0 from weights, pads and ops that keep zero; 0.5 after a sigmoid), or MIXED: finite
and small, but not one number. An op that would make it infinite, NaN or large, or would give such a gradient (the square root of zero),
raises Hazard, and the padding is sliced off first. Gradients of padding are always zero: a slice gives zeros, a product with zero weights
gives zeros, and products of two activations require zero in both. So a matmul may contract padding if its weight is zero there and the
other side finite, or if both sides are zero.

An infinity in real data (an overflow) may put NaN into the padding of the same row. That row then has no finite result anyway.

The rules follow XLA's DynamicPadder (service/dynamic_padder.cc) where it has one. Hazards were measured one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amprewrite.ir.op_calls import Call, Ref, Shape

MIXED = "mixed"
Content = float | str
Slot = str | int
"""An operand by the name of its value, or a result by its index."""
Part = tuple[Slot, int] | int
"""One dim of a slot, or a fixed extent: the weights of an LSTM have the dim (4, H)."""
Leg = tuple[Part, ...]
BROADCAST = "broadcast"
"""Content of an operand that is not padded where the result is: it has one row for all columns."""
LARGEST = 1e4
"""Content beyond this may overflow fp16 in the next op."""


class Hazard(Exception):
    """Padding cannot pass an op. The padding of the operands in `refs` is replaced by zeros; without `refs` it is sliced off."""

    def __init__(self, why: str, refs: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.why, self.refs = why, tuple(refs)


Contents = Mapping[str, Content]
"""Content of every operand that has padding; BROADCAST for an unpadded tensor where the result has some."""


@dataclass
class Rule:
    """Rule of one call for padded dims."""

    ties: list[tuple[Leg, ...]] = field(default_factory=list)
    wants: list[tuple[Slot, int]] = field(default_factory=list)
    content: Callable[[Contents], Content] = field(default=lambda contents: moved(contents))
    ignored: set[str] = field(default_factory=set)
    """Operands that are read for their dtype alone, or that the op pads itself: they may have any size."""
    why_opaque: str = ""
    pointwise: bool = False
    """True if operands without a dim of the result are broadcast along it."""

    def tie(self, *legs: Leg) -> None:
        self.ties.append(legs)


class View:
    """A call with the shapes of its operands."""

    def __init__(self, call: Call, calls: Mapping[str, Call]) -> None:
        self.call, self.calls = call, calls

    def shape(self, ref: Any) -> Shape | None:
        """Shape of the one floating tensor that `ref` names; None for anything else."""
        found = self.calls.get(ref.name) if isinstance(ref, Ref) else None
        return found.shapes[0] if found and len(found.shapes) == 1 and not found.several and found.floating else None

    def is_tensor(self, ref: Any) -> bool:
        found = self.calls.get(ref.name) if isinstance(ref, Ref) else None
        return found is not None and bool(found.shapes)

    @property
    def out(self) -> Shape:
        return self.call.shapes[0] if len(self.call.shapes) == 1 and not self.call.several and self.call.floating else ()


# -- content -----------------------------------------------------------------------------
def moved(contents: Contents) -> Content:
    """Content of the padding after an op that only moves numbers."""
    found = {c for c in contents.values() if c != BROADCAST}
    return 0.0 if not found else found.pop() if len(found) == 1 else MIXED


def zero_keeping(contents: Contents) -> Content:
    """Content of the padding after an op that maps zeros to zero: sums and averages of padding alone, weights of zero."""
    found = [c for c in contents.values() if c != BROADCAST]
    return 0.0 if all(c == 0 for c in found) else MIXED


def all_zero(why: str) -> Callable[[Contents], Content]:
    """A content rule: every padded operand must be zero in its padding, otherwise Hazard blames it with `why`."""

    def content(contents: Contents) -> Content:
        blamed = [name for name, c in contents.items() if c not in (0, BROADCAST)]
        if blamed:
            raise Hazard(why, blamed)
        return 0.0

    return content


# -- ties ---------------------------------------------------------------------------------
def aligned(view: View, rule: Rule, refs: Sequence[Any], out: Shape) -> None:
    """Tie every dim of the result to the same dim, counted from the right, of each operand that has it in full."""
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
            if shape is None:  # a mask: if it has this dim in full, it would have to be padded too
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
