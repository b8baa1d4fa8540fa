"""When a format's range cannot hold a value: the one set of rules, for PyTorch graphs and ONNX files, whatever the evidence.

Evidence is the largest and the smallest magnitude of a value: of a weight, on sample batches, or in a sample run.

By name it knows what becomes of the sign of a far number: `neg`, `abs`, `sub`, and `div`, which may divide by it; sums, in which small
values drown (`add`, `sub`), and `mul`, which hands them on.
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
"""How many times larger or smaller than in the samples a value may get."""
MASK = 1e8
"""A negative constant beyond it, in a sum or product, is a mask: nothing else is meant by so large a number."""
EXTREME = 1e30
"""So large is a mask of either sign."""
BLOCKS = 88.0
"""A softmax gives no share to a score so far below the greatest: exp(-88) is below fp32's normal numbers."""
ROWS = 8
"""So many rows with something in common are no chance."""
SHRINKS = 64
"""Scores, and what blocks among them, may be divided by as much: what is left of the end of the range is far from zero still."""
PASSES_MASK, MAKES_SCORES, SHARES_OUT = ops_with(Trait.PASSES_MASK), ops_with(Trait.MAKES_SCORES), ops_with(Trait.SHARES_OUT)
ADDS_UP, LOOKS_UP = ops_with(Trait.ADDS_UP), ops_with(Trait.LOOKS_UP)
BELOW, ABOVE = -1, 1
"""Sides of zero."""
_LEVELS = {BELOW: ops_with(Trait.LEVELS_BELOW), ABOVE: ops_with(Trait.LEVELS_ABOVE)}
_FILLS, _BOUNDS, _COMPARES = ops_with(Trait.FILLS), ops_with(Trait.BOUNDS), ops_with(Trait.COMPARES)
_SCALES = ops_with(Trait.SCALES)
_SHAPE_ONLY, _COUNTS = ops_with(Trait.TAKES_SHAPE_ONLY), ops_with(Trait.HAS_STEPS, Trait.CONVERTS)
POLES = frozenset(name for name, row in OPS.items() if row.small == "pole")
"""Ops that make an infinity of a flushed operand."""
PASSES_SMALL = frozenset(name for name, row in OPS.items() if row.small == "passes")
"""Ops, beside the clear ones, whose result is small if their operand is."""
SUMS_SMALL = frozenset(name for name, row in OPS.items() if row.small == "sums")
"""Ops whose result is small only if all that they add up is."""


class Fit(enum.Enum):
    """Whether a low copy of a weight says what the weight says."""

    FITS = "fits"
    TOO_LARGE = "too large"
    FLUSHED = "flushed"
    """All of it is below the smallest number of the format. That harms no summand of a product: the sum's own rounding is larger."""


def fit(size: float, low: Format) -> Fit:
    """The fit of a weight whose largest magnitude is `size`. A weight is what it is: no tail, no headroom."""
    if size > low.max:
        return Fit.TOO_LARGE
    return Fit.FLUSHED if 0 < size < low.smallest_subnormal else Fit.FITS


def means_mask(constant: float) -> bool:
    """Whether a constant of a sum or product is a mask: what it makes may become the end of a range, and other values not."""
    return abs(constant) >= EXTREME or constant <= -MASK


def bound_fits(bound: float, lower: bool, low: Format) -> bool:
    """Whether the end of `low` may stand for a bound beyond it: the lowest for a lower bound, the highest for an upper one."""
    return bound <= low.max if lower else bound >= -low.max


Node = TypeVar("Node")


@dataclass(frozen=True)
class Read(Generic[Node]):
    """One op that reads a value, as far as it says what a number far beyond the range is for."""

    op: str
    kind: OpKind | None
    made: Node
    """What it makes."""
    place: int = 0
    """Which of its operands the value is."""
    numbers: tuple[float, ...] = ()
    """Its other operands, where they are numbers; bounds are in `lower` and `upper`."""
    lower: tuple[float, ...] = ()
    upper: tuple[float, ...] = ()
    floating: bool = True
    """Whether it gives numbers with fractions."""
    masks: bool = False
    """Whether attention takes the value for its mask."""

    @property
    def factors(self) -> list[float]:
        """The numbers that it multiplies the value by."""
        if self.op not in _SCALES:
            return []
        return [1 / number if self.op == "div" and number else number for number in self.numbers]


def handed_on(read: Read[Any], side: int, low: Format) -> frozenset[int] | None:
    """On which sides the result holds numbers far beyond the range, if what is read does on `side`; none if it asks for the side alone.

    None: it computes with the number itself, for which the end of the range would be another.
    """
    op, near = read.op, low.max / SHRINKS
    if read.masks or op in _LEVELS[side] or op in _SHAPE_ONLY:
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
    """`handed_on` for bounds: one near zero on this side ends it, one beyond the range lets it by, any other may be its own number."""
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
    """Whether numbers far beyond the range, which `node` holds on `sides` of zero, block and do nothing else, whoever reads them.

    The end of the range may stand for them then. `reads` gives the readers of a value; `known` are values found to be such, and grows.
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
    """Whether all of a value lies below the normal range of `low`, where bits are lost."""
    return 0 < largest < low.smallest_normal


def summands(graph: OpGraph) -> dict[str, bool]:
    """What is added to something, or taken from it, and whether softmaxes alone read the sums.

    A weight that is seen otherwise there counts as itself.
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
    """Whether the rows of a table each have an offset, or one in common; of a few rows chance alone would say so."""
    common = has_offset(table.swapaxes(-1, -2)) if table.shape[-2] >= ROWS else False
    return has_offset(table) | common


def tables(graph: OpGraph) -> set[str]:
    """What rows are looked up in."""
    return {graph.seen(operand.value).name for node in graph if node.op in LOOKS_UP for operand in node.operands}


def _are_scores(graph: OpGraph, node: OpNode, scores: set[str]) -> bool:
    """Whether softmaxes alone read a value, or what may stand in front of them; `scores` are those of its readers that are such."""
    readers = list(graph.readers(node.name))
    return bool(readers) and all(each.op in SHARES_OUT or (each.op in MAKES_SCORES and each.name in scores) for each in readers)


def has_offset(values: Any, scores: bool = False) -> Any:
    """Whether the rows of a weight, a tensor or an array of one dim or more, have more in common than they differ by.

    Their means are then larger than what is left without them, as root mean squares: what a norm takes away is most of them.
    `scores`: softmaxes read them; what blocks a position, as masks do that an exporter adds to a bias, is then no offset.
    """
    if scores:
        least = values.max() - BLOCKS
        values = values.clip(least) * (values > least)
    return 2 * (values.mean(-1) ** 2).mean() > (values**2).mean()


def drowns_in(largest_sum: float, low: Format) -> bool:
    """Whether the rounding of a small summand is nothing beside that of a sum that reaches `largest_sum`."""
    return largest_sum * low.eps >= HEADROOM * low.smallest_subnormal


def bias_drowns(result: ValueRange | None, low: Format) -> bool:
    """Whether the error of a bias below the range is nothing beside the rounding of the sum. An unseen sum is taken to be large."""
    return result is None or drowns_in(result.amax, low)


def drowned(graph: OpGraph, node: OpNode, seen: Mapping[str, ValueRange], low: Format, depth: int = 4) -> bool:
    """Whether a small value, or its products, are only added to far larger ones, so that its rounding is nothing beside theirs.

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
    """Whether an operand that comes down to `smallest` may be flushed before an op of `POLES`."""
    return smallest < HEADROOM * low.smallest_normal


def hands_on_small(op: str) -> bool:
    """Whether the result of `op` is small if its operand is: it moves values, or shrinks or grows them by themselves."""
    row = find_op(op)
    return row is not None and (row.kind is OpKind.CLEAR or row.name in PASSES_SMALL)


__all__ = [
    "ABOVE", "BELOW", "HEADROOM", "PASSES_SMALL", "POLES", "SUMS_SMALL", "Fit", "Read", "bias_drowns", "drowned", "drowns_in", "fit",
    "handed_on", "hands_on_small", "has_offset", "near_a_pole", "near_the_end", "only_blocks", "summands", "thinned_out",
]  # fmt: skip
