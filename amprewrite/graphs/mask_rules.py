"""Find out whether numbers beyond the low format's range, such as -1e9 in a mask, may be clamped to ±max of the format (bf16 or fp16).

The rules are the same for fx and ONNX graphs. Each kind of graph has a subclass of `MaskRules`, which finds the ops that read a value
(`Read` in `ir/evidence/range_rules.py`), and the operands of the op that makes a value.

This file has special code for the `softmax` after a mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from amprewrite.ir.evidence.range_rules import MAKES_SCORES, Read, only_blocks
from amprewrite.ir.op_graph import Reaches, reached
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import OpKind

FILLS, MAKE_MASKS = ops_with(Trait.FILLS), ops_with(Trait.MAKES_MASK)

Value = TypeVar("Value", bound=Hashable)


class MaskRules(ABC, Generic[Value]):
    """Decides whether numbers beyond a low format's range, such as -1e9 in a mask, may become ±max. A subclass reads the graph."""

    def __init__(self, low: Format) -> None:
        self.low = low
        self._blocking: set[tuple[Value, int]] = set()
        self.reaches_softmax = Reaches(self._scores, self._enters_softmax)
        """Function of a value: True if the value, or scores computed from it, are the input of a softmax or the mask of an attention op."""

    @abstractmethod
    def reads(self, value: Value) -> Iterable[Read[Value]]:
        """Yield a `Read` for each op that reads `value`: the facts that show how the op treats numbers beyond the low format's range."""

    @abstractmethod
    def made_of(self, value: Value) -> tuple[str, Iterable[Value]] | None:
        """Return (name of the op that makes `value`, its floating-point operands except constants); None if no op makes the value."""

    def only_block(self, value: Value, sides: Iterable[int]) -> bool:
        """True if the numbers in `value` that are beyond the low format's range are used only to block positions, as in a mask.

        `sides` selects such numbers above zero (ABOVE), below zero (BELOW), or both. If the low format has fp32's range, as bf16 does, the
        result is True for any value: such numbers may be clamped to ±max, which changes them by no more than a rounding.
        """
        return not self.low.narrow or only_blocks(value, sides, self.reads, self.low, self._blocking)

    def _scores(self, value: Value) -> Iterator[Value]:
        return (read.made for read in self.reads(value) if read.op in MAKES_SCORES)

    def _enters_softmax(self, value: Value) -> bool:
        return any(read.op == "softmax" or read.masks for read in self.reads(value))

    def feeds_product(self, value: Value) -> bool:
        """True if a matrix product or a convolution reads `value`."""
        return any(read.kind is OpKind.ALLOW for read in self.reads(value))

    def is_mask(self, value: Value) -> bool:
        """True if `value` is a mask, not data: all floats upstream of its op are constants or results of ops such as `full` and `where`."""
        makers = reached([value], lambda each: made[1] if (made := self.made_of(each)) is not None else ())
        return all((made := self.made_of(each)) is not None and (each is value or made[0] in MAKE_MASKS) for each in makers)

    def holds_mask(self, value: Value, op: str, kind: OpKind | None, far: bool, masks: bool, beside: bool) -> bool:
        """True if a cast of `value` to the low format should clamp numbers beyond its range to ±max, because they belong to a mask.

        `op` makes the value, and its `kind` tells whether it may run low. `far` is True if an argument of the op is a number beyond the
        range. `masks` is True if such a number is part of a mask. `beside` is True if an operand of the op may hold a mask already.

        Clamping is right in four cases: the op moves a mask, as `view` does; it fills a mask into a value that no matrix product reads; the
        value itself is a mask; or a softmax reads the value, which then holds scores plus a mask. In other arithmetic ±max would be a wrong
        number, and no overflow would show the error, because ±max is finite.
        """
        if kind not in (OpKind.CLEAR, OpKind.INFER) or not (masks or beside):
            return False
        if kind is OpKind.CLEAR and (not self.feeds_product(value) if masks and op in FILLS else not far):
            return True
        return self.is_mask(value) or self.reaches_softmax(value)
