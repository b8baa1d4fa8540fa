"""Rules for values that the range of a low format cannot hold. They are the same for PyTorch graphs and ONNX files.

The rules need the largest and the smallest magnitude of a value. They are computed for weights, and measured in sample runs for others.

The rules know some ops by name. `neg`, `abs` and `sub` change the sign of a number beyond the range, and `div` may divide by it. Small
values are negligible in larger sums (`add`, `sub`), and `mul` passes small values on.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from amprewrite.ir.evidence.ranges import ValueRange
from amprewrite.ir.op_graph import OpGraph, OpNode
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import OPS, Trait, find_op, ops_with
from amprewrite.tables.vocabulary import OpKind

HEADROOM = 4
"""Margin for unseen data: a value may become this many times larger or smaller than in the samples."""
MASK = 1e8
"""A constant of -MASK or less in a sum or product is taken for a mask, since such large numbers have no other use."""
EXTREME = 1e30
"""A constant of at least this magnitude is taken for a mask, whatever its sign."""
BLOCKS = 88.0
"""A softmax returns about zero for a score that is this far below the greatest score: exp(-88) is below fp32's normal numbers."""
ROWS = 8
"""Least number of rows of a table whose rows are tested for a common offset: with fewer rows, chance alone could make one."""
SHRINKS = 64
"""Largest number by which masked scores may be divided. After this division a mask number of -max still blocks its position."""
PASSES_MASK, MAKES_SCORES, SHARES_OUT = ops_with(Trait.PASSES_MASK), ops_with(Trait.MAKES_SCORES), ops_with(Trait.SHARES_OUT)
ADDS_UP, LOOKS_UP = ops_with(Trait.ADDS_UP), ops_with(Trait.LOOKS_UP)
BELOW, ABOVE = -1, 1
"""The two sides of zero, as signs: numbers below zero and numbers above zero."""
_LEVELS = {BELOW: ops_with(Trait.LEVELS_BELOW), ABOVE: ops_with(Trait.LEVELS_ABOVE)}
_FILLS, _BOUNDS, _COMPARES = ops_with(Trait.FILLS), ops_with(Trait.BOUNDS), ops_with(Trait.COMPARES)
_SCALES = ops_with(Trait.SCALES)
_SHAPE_ONLY, _LIKE_SECOND = ops_with(Trait.TAKES_SHAPE_ONLY), ops_with(Trait.LIKE_SECOND)
_COUNTS = ops_with(Trait.HAS_STEPS, Trait.CONVERTS)
POLES = frozenset(name for name, row in OPS.items() if row.small == "pole")
"""Ops that return an infinity for zero, so also for a small operand that was flushed to zero."""
PASSES_SMALL = frozenset(name for name, row in OPS.items() if row.small == "passes")
"""Ops whose result is small if their operand is small. Ops that only move values (kind CLEAR) have this property, too, but are not listed.
"""
SUMS_SMALL = frozenset(name for name, row in OPS.items() if row.small == "sums")
"""Ops whose result is small only if all their summands are small."""


class Fit(enum.Enum):
    """Whether the low format's range can hold a weight."""

    FITS = "fits"
    TOO_LARGE = "too large"
    FLUSHED = "flushed"
    """All values of the weight are below the format's smallest number and would become zero. That is harmless for a weight that is only
    added to a product, because the rounding of the sum is larger."""


def fit(size: float, low: Format) -> Fit:
    """Return the `Fit` of a weight with the largest magnitude `size`: FITS, TOO_LARGE, or FLUSHED if all its values would become zero.

    No headroom is needed, since all values of a weight are known."""
    if size > low.max:
        return Fit.TOO_LARGE
    return Fit.FLUSHED if 0 < size < low.smallest_subnormal else Fit.FITS


def means_mask(constant: float) -> bool:
    """True if a constant in a sum or product can only be a number of a mask, such as -1e9, because of its size (see MASK and EXTREME)."""
    return abs(constant) >= EXTREME or constant <= -MASK


def bound_fits(bound: float, lower: bool, low: Format) -> bool:
    """True if clamping a bound, such as an argument of clamp, to the range of `low` does not change the result of the op in `low`.

    For a lower bound (`lower` is True) this holds unless the bound is above the range: -1e9, for example, may become -max, because no low
    value is below either. For an upper bound this holds unless the bound is below the range.
    """
    return bound <= low.max if lower else bound >= -low.max


Node = TypeVar("Node")


@dataclass(frozen=True)
class Read(Generic[Node]):
    """One op that reads a value. Its attributes show how the op treats numbers of the value far beyond the low format's range."""

    op: str
    kind: OpKind | None
    made: Node
    """The node of the op's result."""
    place: int = 0
    """Position of the value among the operands of the op."""
    numbers: tuple[float, ...] = ()
    """The numbers among the operands of the op, without its bounds."""
    lower: tuple[float, ...] = ()
    """Lower bounds of the result, such as `min` of clamp."""
    upper: tuple[float, ...] = ()
    """Upper bounds of the result, such as `max` of clamp."""
    floating: bool = True
    """Whether the op's result is floating point."""
    masks: bool = False
    """Whether the op is an attention that takes the value as its mask."""

    @property
    def factors(self) -> list[float]:
        """The numbers by which the op multiplies the value: 1 / n for a division by n; [] if it neither multiplies nor divides."""
        if self.op not in _SCALES:
            return []
        return [1 / number if self.op == "div" and number else number for number in self.numbers]


def handed_on(read: Read[Any], side: int, low: Format) -> frozenset[int] | None:
    """Return on which sides of zero (BELOW, ABOVE) an op's result may be far beyond the range of `low`, if its operand is so on `side`.

    `read` describes the op. The set is empty if clamping the operand to the range does not change the result: for example, the op reads
    only the operand's sign. The result is None if clamping would change the op's result in a way that matters.
    """
    op, near = read.op, low.max / SHRINKS
    if read.masks or op in _LEVELS[side] or op in _SHAPE_ONLY or (read.place and op in _LIKE_SECOND):
        return frozenset()
    if not read.floating:
        if op in _COMPARES:
            return frozenset() if read.numbers and all(abs(number) <= near for number in read.numbers) else None
        return None if op in _COUNTS else frozenset()
    if op in _BOUNDS:
        return _bounded(read, side, low)
    if op == "neg":
        return frozenset({-side})
    if op == "abs":
        return frozenset({ABOVE})
    if read.kind is OpKind.CLEAR or op in _FILLS:
        return frozenset({side})
    return _scored(read, side, low) if op in MAKES_SCORES else None


def _bounded(read: Read[Any], side: int, low: Format) -> frozenset[int] | None:
    """Return the result of `handed_on` for an op that bounds its result, such as clamp. Its operand is far beyond the range on `side`.

    For the side BELOW: the set is empty if a lower bound is near zero, that is, at most low.max / SHRINKS in magnitude. The op's result is
    then this bound, whether the operand is clamped or not. The set is {BELOW} if all lower bounds are below the range, and all upper bounds
    are at least -low.max / SHRINKS. In other cases return None. ABOVE is the mirror image.
    """
    stops, others = (read.lower, read.upper) if side == BELOW else (read.upper, read.lower)
    near = low.max / SHRINKS
    if stops and all(abs(bound) <= near for bound in stops):
        return frozenset()
    beyond = all(bound * side > low.max for bound in stops) and all(bound * side <= near for bound in others)
    return frozenset({side}) if beyond else None


def _scored(read: Read[Any], side: int, low: Format) -> frozenset[int] | None:
    """Return the result of `handed_on` for an op that computes attention scores: a sum, a product or a division.

    A sum keeps the operand's side of zero. If the operand is subtracted, or a factor is negative, the side changes. If a factor is a
    tensor, its sign is unknown, so both sides are returned. The result is None if the scores may no longer block a position in a softmax.
    This is so if the op adds a large number of the opposite sign, divides by the operand, or multiplies it by less than 1 / SHRINKS.
    """
    if read.op in ADDS_UP:
        side = -side if read.op == "sub" and read.place else side
        added = [-number if read.op == "sub" and not read.place else number for number in read.numbers]
        return None if any(number * side < -low.max / 2 for number in added) else frozenset({side})
    if read.op == "div" and read.place:
        return None
    if any(abs(factor) * SHRINKS < 1 for factor in read.factors):
        return None
    signs = {side if factor > 0 else -side for factor in read.factors}
    return frozenset(signs or {BELOW, ABOVE})


def only_blocks(
    node: Node, sides: Iterable[int], reads: Callable[[Node], Iterable[Read[Node]]], low: Format, known: set[tuple[Node, int]]
) -> bool:
    """True if `node`, which holds numbers far beyond the range on `sides` of zero, may be clamped to the range of `low`.

    This is the case if all ops downstream use these numbers as masks do: only to block positions in a softmax. `reads` returns the `Read`s
    of a value, one for each op that reads it. `known` caches the (value, side) pairs for which the answer is True; the call adds pairs.
    """
    waiting = [(node, side) for side in sides]
    seen = set(waiting)
    while waiting:
        at, side = waiting.pop()
        for read in reads(at) if (at, side) not in known else ():
            handed = handed_on(read, side, low)
            if handed is None:
                return False
            fresh = {(read.made, each) for each in handed} - seen
            seen |= fresh
            waiting += fresh
    known |= seen
    return True


def near_the_end(largest: float, low: Format) -> bool:
    """True if a value whose largest magnitude in samples is `largest` may leave the range of `low` on other data."""
    return largest * HEADROOM > low.max


def added_values(graph: OpGraph) -> dict[str, bool]:
    """Return {name of a value that ops of `graph` add or subtract: True if all these sums lead only to softmaxes}.

    For example, a bias that is only added to attention scores gets True. A sum with a view of a value counts as a sum with the value.
    """
    scores: set[str] = set()
    for node in reversed(list(graph)):  # visit the readers of a value before the op that makes it, so that one pass suffices
        if _are_scores(graph, node, scores):
            scores.add(node.name)
    found: dict[str, bool] = {}
    for node in graph:
        for operand in node.operands if node.op in ADDS_UP else ():
            name = graph.seen(operand.value).name
            found[name] = found.get(name, True) and node.name in scores
    return found


def rows_have_offset(table: Any) -> Any:
    """True if the rows or the columns of a table have an offset: a mean that is larger than their spread (`has_offset`).

    Columns have an offset if all rows have a large part in common. They are tested only in tables of at least `ROWS` rows, because a few
    rows may have a common part by chance.
    """
    common = has_offset(table.swapaxes(-1, -2)) if table.shape[-2] >= ROWS else False
    return has_offset(table) | common


def tables(graph: OpGraph) -> set[str]:
    """Return the names of the tables in which ops of `graph` look up rows."""
    return {graph.seen(operand.value).name for node in graph if node.op in LOOKS_UP for operand in node.operands}


def _are_scores(graph: OpGraph, node: OpNode, scores: set[str]) -> bool:
    """True if the result of `node` only reaches softmaxes: each reader is a softmax, or an op in `scores`. False without readers.

    `scores` names the ops downstream whose results only reach softmaxes.
    """
    readers = list(graph.readers(node.name))
    return bool(readers) and all(each.op in SHARES_OUT or (each.op in MAKES_SCORES and each.name in scores) for each in readers)


def has_offset(values: Any, scores: bool = False) -> Any:
    """True if the rows of a weight (a tensor or array with dims) have an offset: a mean that is larger than their spread.

    Mean and spread are compared as root mean squares. With an offset, a norm subtracts most of the value, so that rounding errors grow.
    Set `scores` if softmaxes read the rows. Numbers far below the largest of their row are then left out, because the softmax makes them
    zero: for example, the -1e9 of a mask that an exporter has added to a bias.
    """
    if not scores:
        return 2 * (values.mean(-1) ** 2).mean() > (values**2).mean()
    most = values.amax(-1, keepdim=True) if hasattr(values, "amax") else values.max(-1, keepdims=True)
    least = most.clip(-MASK) - BLOCKS  # the clip makes `least` finite for rows that hold only -inf
    seen = values > least
    values, count = values.clip(least) * seen, seen.sum(-1).clip(1)
    return 2 * ((values.sum(-1) / count) ** 2).mean() > ((values**2).sum(-1) / count).mean()


def drowns_in(largest_sum: float, low: Format) -> bool:
    """True if `low` may flush a small summand to zero without harm: rounding the sum, of size `largest_sum`, causes a larger error."""
    return largest_sum * low.eps >= HEADROOM * low.smallest_subnormal


def bias_drowns(result: ValueRange | None, low: Format) -> bool:
    """True if `low` may flush a small bias to zero without harm: rounding the sum of product and bias causes a larger error.

    `result` is the range of this sum. If it is unknown (None), the answer is True, because almost every sum is large enough.
    """
    return result is None or drowns_in(result.amax, low)


def drowned(graph: OpGraph, node: OpNode, seen: Mapping[str, ValueRange], low: Format, depth: int = 4) -> bool:
    """True if the small result of `node` is negligible, because it is only added, perhaps after multiplications, to far larger values.

    `seen` holds the ranges of values on samples, by name. The search for a sum follows at most `depth` ops.
    """
    readers = list(graph.readers(node.name))
    for reader in readers:
        result = seen.get(reader.name)
        if reader.op in ("add", "sub"):
            if result is None or not drowns_in(result.amax, low):
                return False
        elif not (reader.kind is OpKind.CLEAR or reader.op == "mul") or not depth or not drowned(graph, reader, seen, low, depth - 1):
            return False
    return bool(readers)


def near_a_pole(smallest: float, low: Format) -> bool:
    """True if `low` may flush small elements of a value to zero. An op in `POLES`, such as a logarithm, would then return infinities.

    `smallest` is the smallest magnitude of the value in sample runs.
    """
    return smallest < HEADROOM * low.smallest_normal


def hands_on_small(op: str) -> bool:
    """True if the result of `op` is small whenever its operand is small. False for an op without a row in the op table."""
    row = find_op(op)
    return row is not None and (row.kind is OpKind.CLEAR or row.name in PASSES_SMALL)
