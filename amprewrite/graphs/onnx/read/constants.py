"""Collect facts about the constants of an ONNX file: the errors of their low copies, and whether masks may be clamped to ±max.

This file has special code for the bounds of `clamp` and `maximum`, for `add`, which moves a mask, and for `BatchNormalization`, whose
results after the first are running averages.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from amprewrite.graphs.mask_rules import FILLS
from amprewrite.graphs.onnx.further_on import Readers, before_a_pole, has_pole
from amprewrite.graphs.onnx.ops import Signature, constant_tensor, format_of, op_of
from amprewrite.graphs.onnx.read.weights import Facts, facts, loss_of
from amprewrite.ir.evidence.constants import BORDERS, TAKES_EPSILON, ConstantRead, Loss
from amprewrite.ir.evidence.range_rules import ABOVE, BELOW, bound_fits, hands_on_small
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.onnx_names import SIDE_FOLLOWS
from amprewrite.tables.ops.op_lists import Trait, find_op, ops_with
from amprewrite.tables.vocabulary import OpKind

BOUNDS = ops_with(Trait.BOUNDS)
"""Ops whose constants are bounds. A bound beyond the low format's range becomes ±max; any other constant does so only if it is a mask."""


class ConstantFacts:
    """Finds facts about the constants of one model for one low format."""

    def __init__(self, model: ir.Model, low: Format) -> None:
        self.low = low
        self.readers = Readers(model.graph, low)
        self._looked_at: dict[ir.Value, Facts] = {}

    def facts(self, value: ir.Value) -> Facts:
        """Return the `Facts` about a constant in the low format, such as the number of its values that overflow. They are computed once."""
        if value not in self._looked_at:
            tensor = constant_tensor(value)
            assert tensor is not None
            self._looked_at[value] = facts(tensor.numpy(), self.low)
        return self._looked_at[value]

    def loss(self, value: ir.Value, node: ir.Node, op: str) -> Loss | None:
        """Return the `Loss` of a constant, the error of the low copy that `node` reads; None if it is no larger than one rounding."""
        found = self.facts(value)
        masks_scores = bool(found.overflow) and self.readers.masks_scores(value)
        return loss_of(str(value.name), found, self.low, self._becomes_end(value, node, op), masks_scores)

    def read(self, constant: str, value: ir.Value, reader: str, node: ir.Node, op: str, result: ir.Value, index: int) -> ConstantRead:
        """Return a `ConstantRead`: the facts about a constant that `node` reads as operand `index`, in the format in which `node` runs.

        `constant` and `reader` are the op-graph names of the constant and of `node`. `result` is the value that `node` makes of it.
        """
        row = find_op(op)
        summand = row is not None and bool(row.summands) and index == 2 and "beta" not in node.attributes
        pole = op if has_pole(op, index) else ""
        if not pole and (op in BORDERS or op in TAKES_EPSILON or hands_on_small(op)) and before_a_pole(result):
            pole = "an op behind it"
        return ConstantRead(
            constant=constant, reader=reader, follows=reader, loss=self.loss(value, node, op), summand=summand, pole=pole
        )  # fmt: skip

    def misreads(self, node: ir.Node) -> list[Loss]:
        """Return the `Loss` of each constant that a node without a float result, such as a comparison, must not read in a low copy."""
        lost = [loss for _, value in constants_of(node) if (loss := self.loss(value, node, op_of(node))) is not None]
        return [replace(loss, kept=True) for loss in lost]

    def fixed_groups(self, node: ir.Node, sig: Signature, group: str) -> dict[str, Loss | None]:
        """Return the type variables of an op that stay fp32 even if its result is low, each with the `Loss` of the constant that forces it.

        Statistics of a batch norm in training stay fp32, too; their `Loss` is None. The result is {} if all variables follow the result.
        """
        if node.op_type not in SIDE_FOLLOWS:
            return {}
        if node.op_type == "BatchNormalization" and len(node.outputs) > 1:  # fp32: roundings of running averages would add up
            return dict.fromkeys({sig.output(index) for index in range(1, len(node.outputs))} - {group})
        return {
            sig.input(index): loss
            for index, value in constants_of(node)
            if sig.input(index) != group and sig.follows(node.op_type, index, group, self.low)
            and (loss := self.loss(value, node, node.op_type)) is not None and loss.kept
        }  # fmt: skip

    # -- masks and bounds -----------------------------------------------------------------------
    def may_saturate(self, node: ir.Node, op: str, kind: OpKind | None, beside: bool) -> bool:
        """True if the result of `node` may hold numbers of a mask that are clamped to ±max, alone or added to scores.

        `beside` is True if an operand may hold such numbers.
        """
        far = any(self.saturates(value, node, op) for _, value in constants_of(node))
        return self.readers.holds_mask(node.outputs[0], op, kind, far, far, beside)

    def takes_mask(self, node: ir.Node, op: str) -> bool:
        """True if `node` reads a mask, not a bound, whose numbers beyond the range are clamped to ±max."""
        return any(self.saturates(value, node, op) and not self._is_bound(value, op, node) for _, value in constants_of(node))

    def saturates(self, value: ir.Value, node: ir.Node, op: str) -> bool:
        """True if `node` reads a constant whose numbers beyond the range are clamped to ±max."""
        return bool(self.facts(value).overflow) and self._becomes_end(value, node, op)

    def _becomes_end(self, value: ir.Value, node: ir.Node, op: str) -> bool:
        """True if a constant of `node` has numbers beyond the range, and clamping them to ±max does not change its meaning."""
        found = self.facts(value)
        if not found.overflow:
            return False
        if self._is_bound(value, op, node):
            return True
        blocks = found.mask or (op in FILLS and found.most <= self.low.max and self.readers.reaches_softmax(node.outputs[0]))
        return blocks and self._only_blocks(found, node, op)

    def _only_blocks(self, found: Facts, node: ir.Node, op: str) -> bool:
        """True if the readers of the results of `node` use the numbers beyond the range in its constant only to block positions.

        `found` holds the facts about the constant.
        """
        sides = {side for side, far in ((BELOW, found.least < -self.low.max), (ABOVE, found.most > self.low.max)) if far}
        moved = op in FILLS or op in BORDERS or op == "add"
        return self.readers.results_only_block(node, sides if moved else {BELOW, ABOVE})

    def _is_bound(self, value: ir.Value, op: str, node: ir.Node) -> bool:
        """True if a constant is a lower bound that is not above the low format's range, or an upper bound that is not below it.

        False if the op has no bounds.
        """
        lower = op == "maximum" or (op == "clamp" and value is node.inputs[1])
        return op in BOUNDS and bound_fits(self.facts(value).most if lower else self.facts(value).least, lower, self.low)


def constants_of(node: ir.Node) -> list[tuple[int, ir.Value]]:
    """Return the fp32 constants that a node reads, each as (position, value)."""
    return [
        (index, value)
        for index, value in enumerate(node.inputs)
        if value is not None and format_of(value) == "fp32" and constant_tensor(value) is not None
    ]
