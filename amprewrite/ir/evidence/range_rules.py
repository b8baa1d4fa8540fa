"""Rules on values that a format's range cannot hold, the same for PyTorch graphs, ONNX files and every kind of evidence.

Evidence is the largest and the smallest magnitude of a value: of a weight, on sample batches, or in a sample run.

Some ops are known by name. `neg`, `abs` and `sub` change the sign of a number beyond the range, and `div` may divide by it. Small values
are negligible in larger sums (`add`, `sub`), and `mul` passes them on.
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
"""A constant below -MASK in a sum or product is taken for a mask: so large a number has no other use."""
EXTREME = 1e30
"""A constant beyond this magnitude is taken for a mask, whatever its sign."""
BLOCKS = 88.0
"""A softmax gives no share to a score this far below the greatest: exp(-88) is below fp32's normal numbers."""
ROWS = 8
"""Fewest rows of a table for which a common offset is not chance."""
SHRINKS = 64
"""Scores and their masks may be divided by at most this: the end of the range, divided by it, still blocks a position."""
PASSES_MASK, MAKES_SCORES, SHARES_OUT = ops_with(Trait.PASSES_MASK), ops_with(Trait.MAKES_SCORES), ops_with(Trait.SHARES_OUT)
ADDS_UP, LOOKS_UP = ops_with(Trait.ADDS_UP), ops_with(Trait.LOOKS_UP)
BELOW, ABOVE = -1, 1
"""Sides of zero."""
_LEVELS = {BELOW: ops_with(Trait.LEVELS_BELOW), ABOVE: ops_with(Trait.LEVELS_ABOVE)}
_FILLS, _BOUNDS, _COMPARES = ops_with(Trait.FILLS), ops_with(Trait.BOUNDS), ops_with(Trait.COMPARES)
_SCALES = ops_with(Trait.SCALES)
_SHAPE_ONLY, _LIKE_SECOND = ops_with(Trait.TAKES_SHAPE_ONLY), ops_with(Trait.LIKE_SECOND)
_COUNTS = ops_with(Trait.HAS_STEPS, Trait.CONVERTS)
POLES = frozenset(name for name, row in OPS.items() if row.small == "pole")
"""Ops that return an infinity for an operand that was flushed to zero."""
PASSES_SMALL = frozenset(name for name, row in OPS.items() if row.small == "passes")
"""Ops, in addition to clear ops, whose result is small if their operand is."""
SUMS_SMALL = frozenset(name for name, row in OPS.items() if row.small == "sums")
"""Ops whose result is small only if all their summands are."""


class Fit(enum.Enum):
    """Whether the low format's range can hold a weight."""

    FITS = "fits"
    TOO_LARGE = "too large"
    FLUSHED = "flushed"
    """All of it is below the format's smallest number. A summand of a product may be: the sum's own rounding is larger."""


def fit(size: float, low: Format) -> Fit:
    """The fit of a weight with largest magnitude `size`. No headroom is needed, since all values of a weight are known."""
    if size > low.max:
        return Fit.TOO_LARGE
    return Fit.FLUSHED if 0 < size < low.smallest_subnormal else Fit.FITS


def means_mask(constant: float) -> bool:
    """Whether a constant of a sum or product is a mask. Results of masks may be clamped to the end of the range, other values not."""
    return abs(constant) >= EXTREME or constant <= -MASK


def bound_fits(bound: float, lower: bool, low: Format) -> bool:
    """Whether a bound may be clamped to the range of `low`: a lower bound to its lowest number, an upper bound to its highest."""
    return bound <= low.max if lower else bound >= -low.max


Node = TypeVar("Node")


@dataclass(frozen=True)
class Read(Generic[Node]):
    """One op that reads a value: the facts that show what it does with a number far beyond the range."""

    op: str
    kind: OpKind | None
    made: Node
    """The node of its result."""
    place: int = 0
    """Position of the value among the operands."""
    numbers: tuple[float, ...] = ()
    """The other operands that are numbers, without bounds, which are in `lower` and `upper`."""
    lower: tuple[float, ...] = ()
    upper: tuple[float, ...] = ()
    floating: bool = True
    """Whether its result is floating point."""
    masks: bool = False
    """Whether attention takes the value as its mask."""

    @property
    def factors(self) -> list[float]:
        """The numbers by which it multiplies the value."""
        if self.op not in _SCALES:
            return []
        return [1 / number if self.op == "div" and number else number for number in self.numbers]


def handed_on(read: Read[Any], side: int, low: Format) -> frozenset[int] | None:
    """The signs (BELOW, ABOVE) that the result of an op may have far beyond the range, if its operand is far beyond the range on `side`.

    Empty if an operand at the end of the range gives the same result, as in an op that reads the sign alone. None if it gives another one.
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
    """`handed_on` for bounds. A bound near zero on this side stops the number, a bound beyond the range passes it, any other gives None."""
    stops, others = (read.lower, read.upper) if side == BELOW else (read.upper, read.lower)
    near = low.max / SHRINKS
    if any(abs(bound) <= near for bound in stops):
        return frozenset()
    beyond = all(bound * side > low.max for bound in stops) and all(bound * side <= near for bound in others)
    return frozenset({side}) if beyond else None


def _scored(read: Read[Any], side: int, low: Format) -> frozenset[int] | None:
    """`handed_on` for the sums and products between scores, their mask and the softmax."""
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
    """Whether all readers use numbers far beyond the range, which `node` holds on `sides` of zero, only to block positions.

    The numbers may then be clamped to the range. `reads` gives the readers of a value; `known` collects values that passed.
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
    """Whether a value that reached `largest` in samples may leave the range of `low`."""
    return largest * HEADROOM > low.max


def thinned_out(largest: float, low: Format) -> bool:
    """Whether all of a value lies below the normal range of `low`, where it loses bits."""
    return 0 < largest < low.smallest_normal


def summands(graph: OpGraph) -> dict[str, bool]:
    """The values that are added or subtracted, each with whether softmaxes alone read the sums.

    A view of a weight counts as the weight.
    """
    scores: set[str] = set()
    for node in reversed(list(graph)):  # readers first: a chain may be as long as a scan, and its branches meet again
        if _are_scores(graph, node, scores):
            scores.add(node.name)
    found: dict[str, bool] = {}
    for node in graph:
        for operand in node.operands if node.op in ADDS_UP else ():
            name = graph.seen(operand.value).name
            found[name] = found.get(name, True) and node.name in scores
    return found


def rows_have_offset(table: Any) -> Any:
    """Whether the rows of a table have an offset each, or in common. A common offset needs `ROWS` rows, since few may agree by chance."""
    common = has_offset(table.swapaxes(-1, -2)) if table.shape[-2] >= ROWS else False
    return has_offset(table) | common


def tables(graph: OpGraph) -> set[str]:
    """The tables in which rows are looked up."""
    return {graph.seen(operand.value).name for node in graph if node.op in LOOKS_UP for operand in node.operands}


def _are_scores(graph: OpGraph, node: OpNode, scores: set[str]) -> bool:
    """Whether all readers of a value are softmaxes, or ops on scores that lead to softmaxes alone. `scores` holds such readers."""
    readers = list(graph.readers(node.name))
    return bool(readers) and all(each.op in SHARES_OUT or (each.op in MAKES_SCORES and each.name in scores) for each in readers)


def has_offset(values: Any, scores: bool = False) -> Any:
    """Whether the rows of a weight (a tensor or array with dims) have an offset: a mean that is larger than their spread.

    Mean and spread are compared as root mean squares. A norm then subtracts most of the value.
    With `scores`, softmaxes read the rows, and values that block positions do not count: an exporter may add a mask to a bias.
    """
    if scores:
        least = values.max() - BLOCKS
        values = values.clip(least) * (values > least)
    return 2 * (values.mean(-1) ** 2).mean() > (values**2).mean()


def drowns_in(largest_sum: float, low: Format) -> bool:
    """Whether the error of a flushed summand is negligible against the rounding of a sum that reaches `largest_sum`."""
    return largest_sum * low.eps >= HEADROOM * low.smallest_subnormal


def bias_drowns(result: ValueRange | None, low: Format) -> bool:
    """Whether the error of a bias below the range is negligible against the rounding of the sum. An unseen sum counts as large."""
    return result is None or drowns_in(result.amax, low)


def drowned(graph: OpGraph, node: OpNode, seen: Mapping[str, ValueRange], low: Format, depth: int = 4) -> bool:
    """Whether a small value, or its products, are only added to far larger values, so that its error is negligible.

    `seen`: ranges of values on samples, by vertex.
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
    """Whether an operand with smallest magnitude `smallest` may be flushed before an op of `POLES`."""
    return smallest < HEADROOM * low.smallest_normal


def hands_on_small(op: str) -> bool:
    """Whether the result of `op` is small if its operand is: the op moves values, or passes small values on."""
    row = find_op(op)
    return row is not None and (row.kind is OpKind.CLEAR or row.name in PASSES_SMALL)


__all__ = [
    "ABOVE", "BELOW", "HEADROOM", "PASSES_SMALL", "POLES", "SUMS_SMALL", "Fit", "Read", "bias_drowns", "drowned", "drowns_in", "fit",
    "handed_on", "hands_on_small", "has_offset", "near_a_pole", "near_the_end", "only_blocks", "summands", "thinned_out",
]  # fmt: skip
