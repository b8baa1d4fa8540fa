"""Find constants beyond the low format's range in a captured graph, and force to fp32 the ops that compute with such constants.

A constant is clamped to ±max of the low format if that keeps its meaning: if every reader uses the constant to block positions, as a mask
does, or if the constant is a bound of its op. Any other constant is a number to compute with. Its op stays fp32, and so do the ops that
read the result: a clamped value would be wrong, and no overflow would show the error, because the value is finite.

This file has special code for `mul` and `div`, which scale values, for `clamp_max`, whose only bound is an upper one, and for the ops that
make attention scores: `add`, `softmax`, `scaled_dot_product_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import Fact, arguments, example_value, is_checkpoint, tensors, written
from amprewrite.graphs.mask_rules import FILLS, MaskRules
from amprewrite.ir.evidence.range_rules import ABOVE, ADDS_UP, BELOW, MAKES_SCORES, PASSES_MASK, Read, bound_fits, handed_on, means_mask
from amprewrite.ir.op_graph import reached
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import Op, Trait, find_op, op_name, ops_with
from amprewrite.tables.vocabulary import Colour, Reason
from amprewrite.torch_internals.trees import tree_leaves

_ORDINARY = 64
"""Magnitude of an ordinary activation. A `mul` by a constant stays fp32 if it would take this magnitude beyond the low format's range."""
_FLUSHES = ops_with(Trait.ZERO_MATTERS)
_BOUNDS = ops_with(Trait.BOUNDS)
_SCALES, _WRITE_DOWN = ops_with(Trait.SCALES), ops_with(Trait.FILLS, Trait.HOLDS_NUMBERS)
_TAKE_NUMBERS = _WRITE_DOWN | _BOUNDS | _SCALES | ADDS_UP


class FarNumbers(MaskRules[torch.fx.Node]):
    """Collects the values of a graph that hold constants beyond the low format's range. Call `look_at` for each op, in graph order."""

    def __init__(self, low: Format) -> None:
        super().__init__(low)
        self.sides: dict[torch.fx.Node, frozenset[int]] = {}
        """{value: signs of its constants beyond the low format's range: ABOVE for positive ones, BELOW for negative ones, or both}."""
        self.sizes: dict[torch.fx.Node, float] = {}
        """{value: upper bound of the magnitudes of its constants beyond the low format's range}."""
        self.computed_with: set[torch.fx.Node] = set()
        """The nodes in `sides` whose constants some op may compute with. In the others, constants only block positions, as in a mask."""

    def reads(self, value: torch.fx.Node) -> Iterator[Read[torch.fx.Node]]:
        """Yield a `Read` for each use of `value` as an operand. It says how the op treats numbers beyond the low format's range.

        An in-place op gives one `Read` for the value that it returns, and another for the tensor that it writes. An op that is missing in
        the op table gives a `Read` without an op name, to which no rule applies. The call of an activation checkpoint gives no `Read`.
        """
        for user in value.users:
            row = _row(user)
            if row is None and not is_checkpoint(user):
                yield Read("", None, user)
            elif row is not None:
                for place in _places(value, user):
                    for made in (user, *written(user)):
                        yield _read(value, user, row, made, place)

    def made_of(self, value: torch.fx.Node) -> tuple[str, list[torch.fx.Node]] | None:
        if value.op not in ("call_function", "call_method"):
            return None
        floating = [each for each in value.all_input_nodes if any(t.is_floating_point() for t in tensors(example_value(each)))]
        return op_name(value.target), floating

    def look_at(self, fact: Fact) -> None:
        """If the result of the op `fact` holds constants beyond the low format's range, record their signs and largest magnitude.

        Nothing is recorded if the low format has fp32's range.
        """
        if fact.role != "op" or fact.row is None or not self.low.narrow:
            return
        sides, size = self._written_down(fact)
        for given in fact.node.all_input_nodes if fact.dtype == "fp32" or written(fact.node) else ():
            if given in self.sides:
                handed, scaled = self._handed_on(given, fact)
                sides, size = sides | handed, max(size, scaled)
        if not sides or size <= self.low.max:
            return
        for node in (fact.node, *written(fact.node)):
            self.sides[node] = sides | self.sides.get(node, frozenset())
            self.sizes[node] = max(size, self.sizes.get(node, 0.0))
            if not self.only_block(node, self.sides[node]):
                self.computed_with.add(node)

    def _written_down(self, fact: Fact) -> tuple[frozenset[int], float]:
        """Return (signs, largest magnitude) of the numbers beyond the low format's range that an op's own constants put in its result.

        The op writes such a constant to the result, adds it to an operand, or scales a mask by it. In the last two cases both signs are
        returned, because the sign of the result is not known. Without such constants, the set of signs is empty and the magnitude 0.
        """
        far = [constant for constant in _constants(fact.node) if abs(constant) > self.low.max]
        size = max(map(abs, far), default=0.0)
        if fact.op in _WRITE_DOWN:
            return frozenset(ABOVE if constant > 0 else BELOW for constant in far), size
        if far and (fact.op in ADDS_UP or (fact.op in _SCALES and self.is_mask(fact.node))):
            return frozenset({ABOVE, BELOW}), size
        return frozenset(), 0.0

    def _handed_on(self, given: torch.fx.Node, fact: Fact) -> tuple[frozenset[int], float]:
        """Return (signs, largest magnitude) of the far constants (beyond the range) that the op passes from operand `given` to its result.

        If the op passes no such constant on, the set of signs is empty.
        """
        sides, size = set[int](), 0.0
        for read in (each for each in self.reads(given) if each.made is fact.node):
            size = max(size, self.sizes[given] * max(map(abs, read.factors), default=1.0))
            for side in self.sides[given]:
                handed = handed_on(read, side, self.low)
                if handed is None and (read.op in MAKES_SCORES or read.op in _BOUNDS):
                    handed = frozenset({ABOVE, BELOW})
                sides |= handed or frozenset()
        return frozenset(sides), size

    def pin(self, fact: Fact) -> tuple[Colour, Reason, str] | None:
        """Return (high, reason, detail), to force the op to fp32, if a constant does not fit the low format; otherwise None.

        A constant argument does not fit if it becomes zero in an op for which zero matters, such as `div`, or if it exceeds the range and
        cannot be clamped to ±max. A factor of `mul` does not fit if 64 (`_ORDINARY`) times the factor exceeds the range. A factor, or 1 / a
        divisor, does not fit if it is below the smallest normal number, because the product loses bits there. An operand does not fit if
        it holds constants beyond the range and an op may compute with them, instead of using them as a mask.
        """
        low = self.low
        for constant in _constants(fact.node):
            size = abs(constant)
            if 0 < size < low.smallest_subnormal and fact.op in _FLUSHES:
                return Colour.HIGH, Reason.CONSTANT, f"{constant:g} vanishes in {low.name}"
            if size > low.max and not self._becomes_end(fact, constant):
                return Colour.HIGH, Reason.CONSTANT, f"{constant:g} exceeds {low.name}"
            if size * _ORDINARY > low.max and fact.op == "mul":
                return Colour.HIGH, Reason.CONSTANT, f"{constant:g} times an ordinary activation exceeds {low.name}"
            if size and _shrinks(fact, constant) < low.smallest_normal:
                return Colour.HIGH, Reason.CONSTANT, f"an ordinary activation scaled by {constant:g} is below {low.name}'s normal numbers"
        for given in fact.node.all_input_nodes:
            if given in self.computed_with:
                return Colour.HIGH, Reason.CONSTANT, f"its input holds {self.sizes[given]:g}, which exceeds {low.name}"
        return None

    def _becomes_end(self, fact: Fact, constant: float) -> bool:
        """True if the op may run low with its argument `constant` clamped to ±max, the end of the low format's range.

        In an op with bounds, such as `clamp`, this holds if the clamped bounds change no result. In an op that fills a tensor, it holds if
        the constant only blocks positions, as in a mask. It never holds for an integer, because no pass edits integers.
        """
        if type(constant) is int:
            return False
        if fact.op in FILLS:
            return self._blocks(fact.node, constant) and fact.node not in self.computed_with
        if fact.op not in _BOUNDS:
            return False
        return all(bound_fits(bound, lower, self.low) for bound, lower in _bounds(fact.op, fact.node) if isinstance(bound, float))

    def may_saturate(self, fact: Fact, facts: Mapping[torch.fx.Node, Fact]) -> bool:
        """True if a low copy of the op's result should clamp numbers beyond the range to ±max, because they belong to a mask."""
        if fact.role in ("input", "buffer", "constant") and fact.dtype == "fp32" and not any(t.requires_grad for t in tensors(fact.value)):
            return self._may_be_mask(fact.node)
        if fact.role != "op" or fact.dtype != "fp32" or fact.row is None or fact.node in self.computed_with:
            return False
        far = [constant for constant in _constants(fact.node) if abs(constant) > self.low.max]
        masks = any(self._blocks(fact.node, constant) if fact.op in FILLS else means_mask(constant) for constant in far)
        beside = any(facts[node].may_saturate for _, node in arguments(fact.node))
        return self.holds_mask(fact.node, fact.op, fact.row.kind, bool(far), masks, beside)

    def _blocks(self, node: torch.fx.Node, constant: float) -> bool:
        """True if `constant`, with which `node` fills a tensor, blocks positions of attention, as a mask does.

        It must be so large that it can only be a mask (`means_mask`), or be negative and reach a softmax.
        """
        return means_mask(constant) or (constant < 0 and self.reaches_softmax(node))

    def _may_be_mask(self, node: torch.fx.Node) -> bool:
        """True if `node`, an input, a buffer or a constant, is added to attention scores, so that it may be a mask.

        A mask must be clamped: fp32's lowest number would become -inf in a low format. The softmax of a row in which all positions are
        blocked, as for a padded query, would then be NaN, and so would every value computed from it.
        """
        for reader in reached([node], _hand_on_masks):
            if any(_takes_as_mask(user, reader) or (op_name(user.target) == "add" and self.reaches_softmax(user)) for user in reader.users):
                return True
        return False


def _constants(node: torch.fx.Node) -> list[float]:
    """Return the numbers among the arguments of an op: finite floats, and integers that are neither sizes nor indices."""
    found: list[float] = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, float) and math.isfinite(leaf)]
    whole: list[float] = [each for each in (*node.args, *node.kwargs.values()) if type(each) is int]
    return found + whole if whole and op_name(node.target) in _TAKE_NUMBERS else found


def _shrinks(fact: Fact, constant: float) -> float:
    """Return by what factor the op scales: |constant| if it multiplies by `constant`, 1 / |constant| if it divides by it, otherwise 1."""
    if fact.op == "div" and constant in (*fact.node.args[1:2], fact.node.kwargs.get("other")):
        return 1 / abs(constant)
    return abs(constant) if fact.op == "mul" else 1.0


def _numbers(values: Any) -> tuple[float, ...]:
    return tuple(float(each) for each in values if isinstance(each, int | float) and not isinstance(each, bool))


def _bounds(op: str, node: torch.fx.Node) -> Iterator[tuple[Any, bool]]:
    """Yield (bound, True if it is a lower bound) for each bound of an op such as `clamp`. A bound may be None, a number or a node."""
    args, named = node.args, node.kwargs
    yield from zip(args[1:3], (False,) if op == "clamp_max" else (True, False), strict=False)
    yield from ((named.get(name), name.startswith("min")) for name in ("min", "min_val", "max", "max_val"))


def _read(node: torch.fx.Node, user: torch.fx.Node, row: Op, made: torch.fx.Node, place: int) -> Read[torch.fx.Node]:
    """Return a `Read`, which says how the op `user` treats constants beyond the low format's range in its operand `node`.

    `row` is the op's row in the op tables, and `place` the position of `node` among its operands. `made` is the result that the `Read`
    describes: `user` itself, or a tensor to which the op writes. If the op has an `alpha` other than 1, as in `add(x, y, alpha=2)`, the
    `Read` has the op name "", because the rules for single ops assume that no operand is scaled.
    """
    op = "" if user.kwargs.get("alpha", 1) != 1 else row.name
    bounds = list(_bounds(row.name, user)) if row.name in _BOUNDS else []
    lower, upper = (_numbers(bound for bound, is_lower in bounds if is_lower is wanted) for wanted in (True, False))
    floating = bool(written(user)) or any(t.is_floating_point() for t in tensors(example_value(user)))
    numbers = _numbers((*user.args, *user.kwargs.values()))
    return Read(op, row.kind, made, place, numbers, lower, upper, floating, _takes_as_mask(user, node))


def _places(node: torch.fx.Node, user: torch.fx.Node) -> Iterator[int]:
    """Yield the positions at which `user` takes `node` as an operand.

    A keyword operand has position 0 if it is called `input` or `self`, and otherwise position 1.
    """
    for place, argument in enumerate(user.args):
        if any(leaf is node for leaf in tree_leaves(argument)):
            yield place
    for name, argument in user.kwargs.items():
        if any(leaf is node for leaf in tree_leaves(argument)):
            yield 0 if name in ("input", "self") else 1


def _row(node: torch.fx.Node) -> Op | None:
    return find_op(op_name(node.target)) if node.op in ("call_function", "call_method") else None


def _takes_as_mask(node: torch.fx.Node, value: torch.fx.Node) -> bool:
    """True if `node` is an attention call that adds `value` to its scores as a mask."""
    mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    return op_name(node.target) == "scaled_dot_product_attention" and mask is value


def _hand_on_masks(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the readers of `node` that return the values of a mask unchanged, such as `view` and `expand`."""
    return (user for user in node.users if user.op in ("call_function", "call_method") and op_name(user.target) in PASSES_MASK)
