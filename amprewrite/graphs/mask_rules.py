"""Numbers beyond the low format's range in a graph of any kind: the values that hold them, and whether ±max may replace them.

A kind of graph implements the readers of a value (`Read` in `ir/evidence/range_rules.py`), and the operands that make a value.

By name it knows the `softmax` that a mask is made for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from amprewrite.ir.evidence.range_rules import MAKES_SCORES, Read, only_blocks
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import OpKind

FILLS, MAKE_MASKS = ops_with(Trait.FILLS), ops_with(Trait.MAKES_MASK)

Value = TypeVar("Value", bound=Hashable)


class MaskRules(ABC, Generic[Value]):
    """The masks of one graph and one format. A subclass reads its ops."""

    def __init__(self, low: Format) -> None:
        self.low = low
        self._blocking: set[tuple[Value, int]] = set()

    @abstractmethod
    def reads(self, value: Value) -> Iterable[Read[Value]]:
        """The reads of a value."""

    @abstractmethod
    def made_of(self, value: Value) -> tuple[str, Iterable[Value]] | None:
        """The op that makes a value, and its floating operands without constants; None if the value is from outside."""

    def only_block(self, value: Value, sides: Iterable[int]) -> bool:
        """True if every reader of `value` uses its numbers beyond the range, on `sides` of zero, only to block positions.

        In a format with fp32's range ±max differs from such numbers by a rounding at most.
        """
        return not self.low.narrow or only_blocks(value, sides, self.reads, self.low, self._blocking)

    def reaches_softmax(self, value: Value) -> bool:
        """True if a softmax reads scores made of a value, or attention adds it to its scores."""
        seen, waiting = {value}, [value]
        while waiting:
            for read in self.reads(waiting.pop()):
                if read.op == "softmax" or read.masks:
                    return True
                if read.op in MAKES_SCORES and read.made not in seen:
                    seen.add(read.made)
                    waiting.append(read.made)
        return False

    def feeds_product(self, value: Value) -> bool:
        """True if a matrix product or a convolution reads a value."""
        return any(read.kind is OpKind.ALLOW for read in self.reads(value))

    def is_mask(self, value: Value) -> bool:
        """True if a value is made of numbers and masks alone, without data."""
        waiting, seen = [value], {value}
        while waiting:
            at = waiting.pop()
            made = self.made_of(at)
            if made is None or (at is not value and made[0] not in MAKE_MASKS):
                return False
            fresh = set(made[1]) - seen
            seen |= fresh
            waiting += fresh
        return True

    def holds_mask(self, value: Value, op: str, kind: OpKind | None, far: bool, masks: bool, beside: bool) -> bool:
        """True if a low copy may clamp the numbers beyond the range in a value to ±max: numbers of a mask, or of values made of one.

        `far`: the op that makes it reads a number beyond the range. `masks`: such a number blocks. `beside`: an operand holds such numbers.
        Data added to a mask, for example scores with blocked positions, may be clamped if it is only moved or if a softmax reads it. Data
        that enters arithmetic may not: ±max would be wrong, and finite.
        """
        if kind not in (OpKind.CLEAR, OpKind.INFER) or not (masks or beside):
            return False
        if kind is OpKind.CLEAR and (not self.feeds_product(value) if masks and op in FILLS else not far):
            return True
        return self.is_mask(value) or self.reaches_softmax(value)


__all__ = ["FILLS", "MaskRules"]
