"""Find values that count something (positions, lengths, steps), and the products in which a low format would round them.

Positions, distances, lengths, indices and time steps are whole numbers. fp32 holds them exactly up to 2**24, bf16 up to 256, fp16 up to
2048. torch.autocast rounds them at the first product. Two positions then become equal, and angles made of them are wrong by whole turns.

1. A value is *counted* if it is computed only from whole numbers, numbers in the code and constants of the model. Random draws and rows
   looked up in a table are not counted, and neither is any value downstream of an fp32 input or a parameter. Some operands are ignored:
   indices, sizes, and tensors of which an op takes only the shape or dtype. Uninitialised memory counts as what is written into it.
2. A counted value is LARGE if it may exceed 256: positions, sums over many elements, integers of more than 8 bits, and copies, sums and
   multiples of such values. fp16 holds numbers up to 2048, but not the sums of their products, so the bound is the same. A value is SMALL
   if it cannot exceed 256 but may have fractions: sines, shares, frequencies. It is WHOLE if it cannot exceed 256 and has no fractions:
   booleans, bytes, remainders, one-hot rows, masks.
3. A product runs in fp32 if one of its factors is LARGE. The same holds for a LARGE summand, as in `addmm`, unless
   `passes/normalise/part_summands.py` has made the sum a separate op. A product that sums over at most `FEW` elements also runs in fp32 if
   all of its factors are counted: its result needs exact operands, and costs few FLOPs. For example, angles are positions times
   frequencies.
4. A product also runs in fp32 if all of its factors are WHOLE: a triangle of ones times a mask gives positions, a mask times itself gives
   lengths. The low format holds the factors exactly, but not the result.

Attention and recurrent layers do not count as products here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum

from amprewrite.ir.op_graph import OpGraph, OpNode
from amprewrite.tables.ops.op_lists import OPS, Trait, find_op, ops_with
from amprewrite.tables.vocabulary import OpKind

FEW = 16
"""A product of numbers that count something, such as positions, stays fp32 if each element of its result sums at most this many products.
Coordinates are summed over two or three, positions times frequencies over one."""
EXACT = 256
"""All low formats hold all whole numbers up to this one exactly. It is the limit of bf16. The limit of fp16 is 2048."""
UNSET, LOOKS_UP = ops_with(Trait.UNSET), ops_with(Trait.LOOKS_UP)
RANDOM = ops_with(Trait.RANDOM) - UNSET
NO_FACTORS = ops_with(Trait.ATTENDS, Trait.ATTENDS_AND_PROJECTS, Trait.RECURRENT, Trait.RECURRENT_STEP)
PLACES, TOTALS, WITHIN_ONE, BELOW = (ops_with(each) for each in (Trait.NUMBERS, Trait.TOTALS, Trait.WITHIN_ONE, Trait.STAYS_BELOW))
MOVES = ops_with(Trait.LINEAR_IN_FIRST, Trait.JOINS, Trait.CONVERTS) - TOTALS
BOUNDS, UNIFORM, FILLS, RANKS = (ops_with(each) for each in (Trait.BOUNDS, Trait.UNIFORM, Trait.FILLS, Trait.RANKS))
READS_FIRST = ops_with(Trait.LINEAR_IN_FIRST) - ops_with(Trait.SCALES)
"""Ops that compute their result from elements of the first operand alone. Other operands give indices, sizes, a shape or a dtype."""
HOLDS, INVERSE, DIVIDES = (ops_with(each) for each in (Trait.HOLDS_NUMBERS, Trait.INVERSE, Trait.DIVIDES))
GROWS = PLACES | FILLS | HOLDS | ops_with(Trait.ADDS_UP, Trait.IN_POLYNOMIALS)
"""Ops whose result may exceed EXACT if a number among their arguments does, such as the end of an `arange`."""
ASKS = frozenset(name for name, row in OPS.items() if row.asks)
STAYS_WHOLE = GROWS | ASKS | UNIFORM | (MOVES - ops_with(Trait.SCALES, Trait.AVERAGES))
"""Ops that return whole numbers for whole numbers. They include the ops that read an attribute of a tensor (ASKS), because an attribute
such as `x.mT` holds the elements of `x`."""
BYTES = frozenset({"bool", "uint8", "int8", "uint4", "int4", "uint2", "int2"})
FRACTIONS = ("fp", "bf", "float", "double", "complex", "sparse", "nested")
"""Prefixes of the names of dtypes that can hold fractions."""


class Count(IntEnum):
    """Whether a value is counted (computed only from whole numbers and constants), and how large it may be (rules 1 and 2 of this file)."""

    NOT = 0
    """Not counted."""
    SMALL = 1
    """Counted, at most EXACT, perhaps with fractions."""
    WHOLE = 2
    """Counted, at most EXACT, without fractions."""
    LARGE = 3
    """Counted, perhaps larger than EXACT."""


def made_of(op: str, dtype: str, given: Sequence[Count], numbers: Collection[float]) -> Count:
    """Return the `Count` of an op's result: whether it is made of whole numbers and constants only, and how large it may be.

    `op` is the ATen base name of the op. `dtype` is the name of the result's dtype; "" if the result is no tensor. `given` holds the
    `Count`s of the op's operands, and `numbers` the Python numbers among its arguments.
    """
    whole = not dtype.startswith(FRACTIONS)
    row, largest = find_op(op), max(map(abs, numbers), default=0)
    given = given[:1] if op in READS_FIRST else () if op in UNSET | (UNIFORM - FILLS) else given
    exact = op in STAYS_WHOLE and all(each >= Count.WHOLE for each in given) and all(float(number).is_integer() for number in numbers)
    small = Count.WHOLE if whole or exact else Count.SMALL
    if dtype in BYTES:
        return Count.WHOLE
    if not whole and (row is None or op in RANDOM | LOOKS_UP or Count.NOT in given):
        return Count.NOT
    # one bound, as in `clamp(min=0)`, does not limit the other side, and a negative number, as in `x & -2`, limits neither side
    bounded = op in BELOW and largest <= EXACT and (len(numbers) > 1 if op in BOUNDS else min(numbers, default=-1) >= 0)
    if op in WITHIN_ONE | INVERSE or bounded:
        return small
    # a quotient, such as a mask divided by its sum, counts as no larger than its dividend
    large = given[:1] if op in DIVIDES and len(given) > 1 else given
    if Count.LARGE in large or op in TOTALS | RANKS or (row is not None and row.kind is OpKind.ALLOW):
        return Count.LARGE
    if whole and op not in PLACES and (op not in MOVES or Count.NOT in given or not given):
        return Count.LARGE  # an integer such as a result of argmax, a size of a tensor or an input of the graph may have any magnitude
    return Count.LARGE if op in GROWS and largest > EXACT else small


def written_over(held: Count, written: Count) -> Count:
    """Return the `Count` of a tensor after an in-place write. `held` is its `Count` before, `written` that of the written numbers."""
    least = min(held, written)
    return max(held, written) if least is not Count.NOT and Count.LARGE in (held, written) else least


def keep_counts(graph: OpGraph, counts: Mapping[str, Count], summed: Callable[[OpNode], int]) -> OpGraph:
    """Return a copy of `graph` in which `OpNode.counted` marks each product that would round whole numbers if it ran low.

    A fill, such as `x.new_full(size, 1001.0)`, is also marked if its number reaches such a product. `counts` has the `Count` of each value
    by name. A value without an entry is not counted. `summed` returns the number of elements over which a product sums.
    """
    found, readers = dict[str, OpNode](), dict[str, str]()  # `readers`: {LARGE value that reaches a marked product: an op that reads it}
    for node in reversed(list(graph)):
        text = _counted(node, counts, summed) or (readers.get(node.name, "") if node.op in UNIFORM & FILLS else "")
        if text or node.name in readers:
            readers |= {each.value: node.name for each in node.operands if counts.get(each.value) is Count.LARGE}
        found |= {node.name: replace(node, counted=text)} if text != node.counted else {}
    return graph.exchanged(found) if found else graph


def _counted(node: OpNode, counts: Mapping[str, Count], summed: Callable[[OpNode], int]) -> str:
    """Return the name of an operand for which the matrix product `node` must run in fp32; "" if `node` may run low, or is no product.

    For example, the operand holds positions, which the low format would round (rules 3 and 4 of this file).
    """
    if node.kind is not OpKind.ALLOW or not node.flops or node.op in NO_FACTORS:
        return ""
    large = next((operand.value for operand in node.operands if counts.get(operand.value) is Count.LARGE), None)
    if large is not None:
        return large
    factors = [operand.value for operand in node.operands if not operand.summand]
    least = min((counts.get(each, Count.NOT) for each in factors), default=Count.NOT)
    return factors[0] if least is Count.WHOLE or (least and summed(node) <= FEW) else ""
