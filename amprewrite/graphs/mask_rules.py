"""Numbers beyond the low format's range in a graph of any kind: who holds them, and whether the end of the range says the same.

A kind of graph says who reads a value (`Read` in `ir/evidence/range_rules.py`), and what a value is made of.

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
        """The ops that read a value."""

    @abstractmethod
    def made_of(self, value: Value) -> tuple[str, Iterable[Value]] | None:
        """The op that makes a value, and its floating operands that are no constants; None if it comes from outside."""

    def only_block(self, value: Value, sides: Iterable[int]) -> bool:
        """Whether numbers beyond the range, which a value holds on `sides` of zero, block and do nothing else, whoever reads them.

        The end of a wide format differs from them by a rounding, in fp32, at most.
        """
        return not self.low.narrow or only_blocks(value, sides, self.reads, self.low, self._blocking)

    def reaches_softmax(self, value: Value) -> bool:
        """Whether scores are made of a value, and a softmax of those, or attention adds it to its scores."""
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
        """Whether a matrix product or a convolution reads a value."""
        return any(read.kind is OpKind.ALLOW for read in self.reads(value))

    def is_mask(self, value: Value) -> bool:
        """Whether a value is made of numbers and masks alone, without data."""
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
        """Whether the numbers beyond the range that a value may hold become its end in a low copy: a mask's, and those made of one.

        `far`: the op that makes it reads a number beyond the range; `masks`: such a number blocks; `beside`: an operand holds such numbers.
        Data beside a mask, as scores in which positions are blocked, may become the end if it is only moved or if a softmax reads it. Data
        that is computed with may not: the end of the range would be wrong, and finite.
        """
        if kind not in (OpKind.CLEAR, OpKind.INFER) or not (masks or beside):
            return False
        if kind is OpKind.CLEAR and (not self.feeds_product(value) if masks and op in FILLS else not far):
            return True
        return self.is_mask(value) or self.reaches_softmax(value)


__all__ = ["FILLS", "MaskRules"]
