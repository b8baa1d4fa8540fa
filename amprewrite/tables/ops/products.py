"""Compute the FLOPs of products of tensors from their shapes. A multiply and an add count as two FLOPs.

A product of two operands takes one multiply and one add for every combination of indices of all their dims. If no dim is summed, as in an
outer product, nothing is added. Such a product is no matrix product and counts as 0 FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Shape = Sequence[int]


def einsum_flops(equation: str, shapes: Sequence[Shape]) -> int:
    """Return the FLOPs of an einsum whose operands are multiplied from left to right; 0 if the equation does not fit the shapes."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = [_spelled(term, len(shape)) for term, shape in zip(inputs.split(","), shapes, strict=False)]
    if len(terms) != len(shapes) or any(len(term) != len(shape) for term, shape in zip(terms, shapes, strict=True)):
        return 0
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for letter, size in zip(term, shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    letters = [letter for term in terms for letter in term]
    # without an arrow, the result has the letters that occur once, and all dims of an ellipsis, which are spelt as digits
    wanted = set(output) if arrow else {letter for letter in letters if letters.count(letter) == 1}
    if "..." in output or not arrow:
        wanted |= {letter for letter in letters if letter.isdigit()}
    return sum(_pair(left, right, later, sizes) for left, right, later in _steps([set(term) for term in terms], wanted))


def sums_products(equation: str) -> bool:
    """True if the equation of an einsum sums over a dim that two or more of its operands have, as a matrix product does."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = [term.replace("...", ".") for term in inputs.split(",")]
    shared = {letter for letter in "".join(terms) if sum(letter in term for term in terms) > 1}
    return bool(shared - set(output if arrow else "."))


def pair_flops(left: Shape, right: Shape, result: Shape) -> int:
    """Return the FLOPs of a product of two operands, from the three shapes. The operands share no dims except the summed dims."""
    summed = math.isqrt(math.prod(left) * math.prod(right) // max(math.prod(result), 1))
    return 2 * math.prod(result) * summed


def chain_flops(shapes: Sequence[Shape]) -> int:
    """Return the FLOPs of a chain of matrices that are multiplied from left to right; 0 for fewer than two.

    The first operand may be a vector, which counts as a row, and the last operand a vector, which counts as a column.
    """
    dims = [tuple(shape) for shape in shapes]
    if len(dims) < 2 or not all(dims):
        return 0
    rows = dims[0][0] if len(dims[0]) > 1 else 1
    return sum(2 * rows * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in dims[1:])


def _spelled(term: str, rank: int) -> str:
    """Return an einsum term with a digit for each dim that its ellipsis stands for: "...ij" becomes "10ij" for an operand of four dims.

    The last of these dims always gets "0", because einsum aligns ellipses at their last dims. `rank` is the number of dims of the operand.
    A term stays the same if it has no ellipsis or does not fit the rank.
    """
    before, dots, after = term.partition("...")
    missing = rank - len(before) - len(after)
    return before + "".join(map(str, range(missing - 1, -1, -1))) + after if dots and 0 <= missing <= 10 else term


def _steps(terms: list[set[str]], wanted: set[str]) -> Iterator[tuple[set[str], set[str], set[str]]]:
    """Split an einsum into products of two operands. For each, yield three sets of letters.

    They are the letters of the left operand, of the right operand, and those needed later. The left operand is the product of all operands
    so far. A letter is needed later if a later operand or the result of the einsum (`wanted`) has it. `terms` holds each operand's letters.
    """
    there = terms[0]
    for place, term in enumerate(terms[1:], 1):
        later = wanted.union(*terms[place + 1 :])
        yield there, term, later
        there = (there | term) & later


def _pair(left: set[str], right: set[str], later: set[str], sizes: dict[str, int]) -> int:
    """Return the FLOPs of one product of two operands in an einsum.

    `later` holds the letters that later operands or the einsum's result have. A letter that only one operand has and that is not in `later`
    does not count, since it is summed before the product.
    """
    shared, summed = left & right, (left & right) - later
    multiplied = math.prod(sizes[letter] for letter in shared | ((left | right) & later))
    return 2 * multiplied if summed else 0
