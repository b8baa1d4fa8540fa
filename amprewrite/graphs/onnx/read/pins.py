"""What constants and sample runs say about the nodes of an ONNX graph: the pins that keep values in range.

1. A constant that the low format would lose keeps the ops that read it high, and those that divide by, or scale, the result.
2. A tensor that comes near the end of the low format's range in a sample run, or stays below its normal range, is neither
   made nor read low.
3. A difference that is far smaller than what it is taken of magnifies their rounding: it is not made of low values. Nor are the squared
   distances that torch's exporter makes of `cdist`, a product of `[-2a, a², 1]` and `[b, 1, b²]`.
4. An op that lists deny for what large values do is let be where those are seen not to occur: an op that the fp16 lists deny
   for its range alone, and an exp of small numbers.

By name it knows sums and differences (`add`, `sub`), `exp`, the bounds of `clamp` and `maximum`, `Cast`, an `einsum` that is a `mul`, and
`BatchNormalization`, whose further results are averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx_ir as ir

from amprewrite.graphs.onnx.further_on import Readers, before_a_pole, feeds_product, has_pole, is_mask, is_score_mask, reaches_softmax
from amprewrite.graphs.onnx.ops import Signature, constant_tensor, format_of, op_of
from amprewrite.graphs.onnx.read.weights import Facts, Loss, facts, loss_of
from amprewrite.graphs.onnx.run.samples import Range, Samples
from amprewrite.ir.evidence.range_rules import (
    ABOVE,
    BELOW,
    HEADROOM,
    MASK,
    POLES,
    bound_fits,
    drowns_in,
    hands_on_small,
    near_a_pole,
    near_the_end,
    thinned_out,
)
from amprewrite.ir.op_graph import Demand, Operand
from amprewrite.tables.formats import FORMATS, LOW_NAMES, Format
from amprewrite.tables.ops.onnx_names import FILLS, FLOW, SIDE_FOLLOWS
from amprewrite.tables.ops.op_lists import OpLists, Trait, find_op, ops_with
from amprewrite.tables.ops.products import sums_products
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

Pin = tuple[Colour, Reason, str]
MAGNIFIES = 16
"""Ratio of operand to difference, at the largest, from which on rounding counts as magnified: four bits are lost then."""
EXP_MOST = 8.0
"""An exp multiplies the relative error of its input by that input: about two where the largest result is this."""
BOUNDS = ops_with(Trait.BOUNDS)
"""Ops whose constants are bounds: beyond the range they become its ends. What is filled in becomes an end only if it is a mask."""
BORDERS = {op_type.lower() for op_type in FLOW}
"""What vertices at the border of a body are called."""
INVERSE, USES_SMALL = ops_with(Trait.INVERSE), ops_with(Trait.MAGNIFIES_SMALL)


class RangeFacts:
    """Facts gathered while the graph is read, in the order in which it is read."""

    def __init__(self, low: Format, lists: OpLists, samples: Samples, asked_ops: frozenset[str]) -> None:
        self.low, self.lists, self.asked_ops = low, lists, asked_ops
        self.ranges: Mapping[str, Range] = samples.ranges
        self.losses: dict[str, Loss] = {}
        self.out_of_range: dict[str, str] = {}
        """Vertices whose values do not fit the low format, with the reason."""
        self.saturating: set[str] = set()
        self.masked: set[str] = set()
        """Vertices where a mask's constant comes in, of which a low one holds the end of the range."""
        self.flush_sensitive: set[str] = set()
        """Vertices whose value hangs on a constant that the low format would flush."""
        self.lost: dict[str, str] = {}
        """Vertices that hold a constant from the other side of a border which the low format would lose, with the loss."""
        self.looked_at: dict[ir.Value, Facts] = {}
        self.cancels: dict[ir.Value, str] = {}
        """Values that a difference is made of, and the difference, with the reason why they must not be low."""
        self.readers = Readers(ir.Graph([], [], nodes=[]))

    # -- vertices as they are met -----------------------------------------------------
    def observe(self, name: str, value: ir.Value, saturates: bool) -> None:
        text = "" if saturates or constant_tensor(value) is not None else self.too_far(value)
        if text:
            self.out_of_range[name] = text
        if saturates:
            self.saturating.add(name)

    def settle(self, name: str, op: str, pinned: Pin | None, operands: tuple[Operand, ...]) -> None:
        """Note whether the result hangs on a constant that would be flushed, or holds one that came across a border."""
        row, text = find_op(op), self._lost_in(operands)
        if text and (op in BORDERS or (row is not None and row.kind is OpKind.CLEAR)):
            self.lost.setdefault(name, text)
        if pinned is None or pinned[1] is not Reason.CONSTANT:
            return
        inherited = any(o.value in self.flush_sensitive and o.value not in self.lost for o in operands)
        if not inherited or self._passes_small(op):
            self.flush_sensitive.add(name)

    def _passes_small(self, op: str) -> bool:
        return op in INVERSE or op in BORDERS or hands_on_small(op)

    # -- ranges ---------------------------------------------------------------------------
    def too_far(self, value: ir.Value) -> str:
        """Why a value must not be low, by the sample run; "" if it may."""
        seen = self.ranges.get(str(value.name))
        if seen is None:
            return ""
        if near_the_end(seen.largest, self.low):
            return f"{value.name} reaches {seen.largest:.3g} in a sample run, {self.low.name} ends at {self.low.max:g}"
        if thinned_out(seen.largest, self.low) and not self._drowned(value):
            thin = f"{self.low.name} thins out at {self.low.smallest_normal:.3g}"
            return f"{value.name} stays within {seen.largest:.3g} in a sample run, {thin}"
        return ""

    def _drowned(self, value: ir.Value, depth: int = 4) -> bool:
        """Whether a small value is only added to far larger ones, so that its rounding is nothing beside theirs."""
        for use in value.uses():
            result = use.node.outputs[0]
            seen = self.ranges.get(str(result.name))
            row = find_op(op_of(use.node))
            if op_of(use.node) in ("add", "sub"):
                if seen is None or not drowns_in(seen.largest, self.low):
                    return False
            elif row is None or row.kind is not OpKind.CLEAR or not depth or not self._drowned(result, depth - 1):
                return False
        return bool(value.uses()) and not value.is_graph_output()

    def pin_value(self, value: ir.Value) -> Pin | None:
        text = self.too_far(value)
        if text:
            return Colour.HIGH, Reason.OUT_OF_RANGE, text
        return (Colour.HIGH, Reason.CANCELS, self.cancels[value]) if value in self.cancels else None

    def begin(self, graph: ir.Graph) -> None:
        """Look at the graph as a whole, before anything is read."""
        self.readers = Readers(graph)
        self._find_cancelling(graph)

    def _find_cancelling(self, graph: ir.Graph) -> None:
        """Look for differences far smaller than their operands."""
        for node in graph:
            if op_of(node) not in ("add", "sub") or len(node.inputs) != 2:
                continue
            result = node.outputs[0]
            seen = self.ranges.get(str(result.name))
            if seen is None or not seen.largest:
                continue
            for operand in node.inputs:
                size = 0.0 if operand is None else self._size(operand)
                if operand is not None and MAGNIFIES * seen.largest < size < MASK:
                    text = f"{result.name} stays within {seen.largest:.3g}, {operand.name} reaches {size:.3g}"
                    self.cancels.setdefault(result, text)
                    self._keep_exact(operand, text)

    def _size(self, value: ir.Value) -> float:
        """Largest magnitude, or 0 if it is unknown or the value rounds to itself."""
        if constant_tensor(value) is not None:
            return self.facts(value).largest if format_of(value) == "fp32" and self.facts(value).error else 0.0
        seen, maker = self.ranges.get(str(value.name)), value.producer()
        if seen is None or (maker is not None and maker.op_type == "Cast" and self.pin_cast(maker) is None):
            return 0.0
        return seen.largest

    def _keep_exact(self, value: ir.Value | None, text: str) -> None:
        """Keep a value in fp32 for the reason `text`, and the value that it is a view of."""
        while value is not None and value not in self.cancels and constant_tensor(value) is None:
            self.cancels[value] = text
            maker = value.producer()
            row = find_op(op_of(maker)) if maker is not None else None
            if maker is None or row is None or row.kind is not OpKind.CLEAR:
                return
            value = maker.inputs[0]

    def pin_far(self, operands: tuple[Operand, ...]) -> Pin | None:
        for operand in operands:
            if operand.demand is Demand.COLOUR and operand.value in self.out_of_range:
                return Colour.HIGH, Reason.OUT_OF_RANGE, f"its input {self.out_of_range[operand.value]}"
        return None

    def pin_ranges(self, node: ir.Node, floats: list[ir.Value], operands: tuple[Operand, ...], saturates: bool) -> Pin | None:
        for value in () if saturates else floats:
            pinned = self.pin_value(value)
            if pinned is not None:
                return pinned
        for index, operand in enumerate(node.inputs):
            seen = self.ranges.get(str(operand.name)) if operand is not None and has_pole(op_of(node), index) else None
            if seen is not None and 0 < seen.smallest < self.low.smallest_subnormal:
                small = f"its input comes down to {seen.smallest:.3g}, which {self.low.name} flushes to zero"
                return Colour.HIGH, Reason.OUT_OF_RANGE, f"{op_of(node)} has a pole at zero, {small}"
        return self.pin_far(operands)

    def kind(self, op: str, node: ir.Node) -> OpKind | None:
        """The kind of the op by the lists; in fp16 that for bf16 if ranges were the reason and are seen to be kept.

        An einsum that sums over no dim of two operands, as an outer product, is no matrix product.
        """
        row = find_op(op)
        assert row is not None
        kind = self.lists.kind(row.name)
        if self.lists.rule != "cost" or row.name in self.asked_ops:
            return kind
        if kind is OpKind.ALLOW and op == "einsum" and not sums_products(node.attributes.get_string("equation", "")):
            return self.lists.kind("mul")
        if kind is not OpKind.DENY:
            return kind
        if row.narrow is OpKind.DENY and row.kind is not OpKind.DENY:
            return row.kind if self.low.narrow and self._in_range(op, node) else kind
        small_exp = op == "exp" and self._in_range(op, node) and self.ranges[str(node.outputs[0].name)].largest <= EXP_MOST
        return OpKind.INFER if small_exp else kind

    def _in_range(self, op: str, node: ir.Node) -> bool:
        read = [v for v in node.inputs if v is not None and format_of(v) == "fp32" and constant_tensor(v) is None]
        made = [v for v in node.outputs if format_of(v) == "fp32"]
        for value in (*read, *made):
            seen = self.ranges.get(str(value.name))
            if seen is None or self.too_far(value):
                return False
            if op in POLES and value in read and near_a_pole(seen.smallest, self.low):
                return False
        return bool(read)

    def pin_cast(self, node: ir.Node) -> Pin | None:
        """Pin a cast to fp32 high; None if it may go to the low format straight away and loses nothing."""
        source, result = format_of(node.inputs[0]), node.outputs[0]
        if source in ("fp32", self.low.name, "bool"):
            return None
        seen = self.ranges.get(str(result.name))
        narrow = FORMATS[source].narrow if source in LOW_NAMES else None
        if narrow or (narrow is False and seen is not None and not self.too_far(result)):
            return None  # one low format into the other
        if source.startswith(("int", "uint")) and seen is not None and seen.largest * HEADROOM <= 2 / self.low.eps:
            return None  # such integers are exact
        return Colour.HIGH, Reason.BOUNDARY, f"makes fp32 from {source}"

    # -- constants ------------------------------------------------------------------------
    def facts(self, value: ir.Value) -> Facts:
        if value not in self.looked_at:
            tensor = constant_tensor(value)
            assert tensor is not None
            self.looked_at[value] = facts(tensor.numpy(), self.low)
        return self.looked_at[value]

    def loss(self, value: ir.Value, node: ir.Node, op: str) -> Loss | None:
        found = self.facts(value)
        return loss_of(str(value.name), found, self.low, self._becomes_end(value, node, op), bool(found.overflow) and is_score_mask(value))

    def _becomes_end(self, value: ir.Value, node: ir.Node, op: str) -> bool:
        """Whether what exceeds the low range in a constant that `node` reads says the same as the end of the range."""
        if not self.facts(value).overflow:
            return False  # nothing does; an empty constant has no least and no most
        if op in BOUNDS and self._is_bound(value, node, op):
            return True
        blocks = self.facts(value).mask or (op in FILLS and self._ends(value)[1] <= self.low.max and reaches_softmax(node))
        return blocks and self._only_blocks(value, node, op)

    def _only_blocks(self, value: ir.Value, node: ir.Node, op: str) -> bool:
        """Whether the numbers beyond the range that a node gets from a constant block, whoever reads its results: none is computed with."""
        least, most = self._ends(value)
        sides = {side for side, far in ((BELOW, least < -self.low.max), (ABOVE, most > self.low.max)) if far}
        moved = op in FILLS or op in BORDERS or op == "add"
        return self.readers.only_block(node, sides if moved else {BELOW, ABOVE}, self.low)

    def _is_bound(self, value: ir.Value, node: ir.Node, op: str) -> bool:
        """Whether a constant is a bound on the side that it lies on: no value that the format holds goes beyond it."""
        least, most = self._ends(value)
        lower = op == "maximum" or (op == "clamp" and value is node.inputs[1])
        return op in BOUNDS and bound_fits(most if lower else least, lower, self.low)

    def _ends(self, value: ir.Value) -> tuple[float, float]:
        tensor = constant_tensor(value)
        assert tensor is not None
        return float(tensor.numpy().min()), float(tensor.numpy().max())

    def constants_of(self, node: ir.Node) -> list[tuple[int, ir.Value]]:
        return [
            (index, value)
            for index, value in enumerate(node.inputs)
            if value is not None and format_of(value) == "fp32" and constant_tensor(value) is not None
        ]

    def may_saturate(self, node: ir.Node, op: str, kind: OpKind | None, operands: tuple[Operand, ...]) -> bool:
        """Whether the result may hold what a mask's constant became, or scores beside one.

        Data that is computed with may not: what became the end of the range would be wrong, and finite.
        """
        if kind not in (OpKind.CLEAR, OpKind.INFER):
            return False
        far = any(self.saturates(value, node, op) for _, value in self.constants_of(node))
        if not far and not any(operand.value in self.saturating for operand in operands):
            return False
        moved = kind is OpKind.CLEAR and (not feeds_product(node) if op in FILLS and far else not far)
        return moved or is_mask(node) or reaches_softmax(node)

    def takes_mask(self, node: ir.Node, op: str) -> bool:
        """Whether `node` reads a mask, of which its result holds what it becomes."""
        return any(self.saturates(value, node, op) and not self._is_bound(value, node, op) for _, value in self.constants_of(node))

    def saturates(self, value: ir.Value, node: ir.Node, op: str) -> bool:
        """Whether `node` reads a constant whose numbers beyond the range become its ends."""
        return bool(self.facts(value).overflow) and self._becomes_end(value, node, op)

    def fixed_groups(self, node: ir.Node, sig: Signature, group: str) -> set[str]:
        """The type variables of an op that stay fp32 whatever its result does: their constants would be lost, or they are statistics."""
        if node.op_type not in SIDE_FOLLOWS:
            return set()
        if node.op_type == "BatchNormalization" and len(node.outputs) > 1:  # a step of training: its averages add up over many
            return {sig.output(index) for index in range(1, len(node.outputs))} - {group}
        lost = [
            (sig.input(index), loss)
            for index, value in self.constants_of(node)
            if sig.input(index) != group and sig.follows(node.op_type, index, group, self.low)
            and (loss := self.loss(value, node, node.op_type)) is not None and loss.kept
        ]  # fmt: skip
        for _, loss in lost:
            self.losses[loss.name] = loss
        return {name for name, _ in lost}

    def pin_constants(self, node: ir.Node, op: str, sig: Signature, group: str, operands: tuple[Operand, ...]) -> Pin | None:
        pinned = self._pin_small(op, operands)
        if pinned is not None:
            return pinned
        if self._lost_in(operands):
            return Colour.HIGH, Reason.CONSTANT, self._lost_in(operands)
        for index, value in self.constants_of(node):
            if sig.input(index) != group:
                continue
            loss = self.loss(value, node, op)
            if loss is not None and self.facts(value).flushed and has_pole(op, index):
                loss = self._at_a_pole(value, op)
            elif loss is None or (loss.kept and self._harmless(node, op, value)):
                continue
            if self._tell(loss):
                return Colour.HIGH, Reason.CONSTANT, str(loss).partition(";")[0]
        return None

    def pin_crossing(
        self, name: str, node: ir.Node, result: ir.Value, constants: list[ir.Value], operands: tuple[Operand, ...]
    ) -> Pin | None:
        """Pin a vertex at the border of a body if a constant that would be lost crosses there.

        What is done with it on the other side no sample need show: a branch may not be taken, and a body shows no ranges.
        """
        op = node.op_type.lower()
        for value in constants:
            loss = self.loss(value, node, op)
            if loss is not None and self.facts(value).flushed and before_a_pole(result):
                loss = self._at_a_pole(value, "an op behind it")
            if loss is not None and self._tell(loss):
                self.lost[name] = str(loss).partition(";")[0]
        text = self.lost.get(name, self._lost_in(operands))
        return (Colour.HIGH, Reason.CONSTANT, text) if text else self._pin_small(op, operands)

    def _lost_in(self, operands: tuple[Operand, ...]) -> str:
        return next((self.lost[o.value] for o in operands if o.demand is Demand.COLOUR and o.value in self.lost), "")

    def _pin_small(self, op: str, operands: tuple[Operand, ...]) -> Pin | None:
        for operand in operands:
            if operand.value in self.flush_sensitive and (op in USES_SMALL or self._passes_small(op)):
                return Colour.HIGH, Reason.CONSTANT, f"{operand.value} hangs on a value that {self.low.name} would flush"
        return None

    def _at_a_pole(self, value: ir.Value, reader: str) -> Loss:
        why = f"{self.facts(value).flushed} of its values vanish in {self.low.name}, and {reader} has a pole at zero"
        return Loss(str(value.name), why, kept=True)

    def misreads(self, node: ir.Node) -> bool:
        """Whether a node that gives no float, as a comparison, reads a constant that is another number in low, or none."""
        lost = [loss for _, value in self.constants_of(node) if (loss := self.loss(value, node, op_of(node))) is not None]
        for loss in lost:
            self._tell(replace(loss, kept=True))
        return bool(lost)

    def keep_fp32(self, value: ir.Value) -> None:
        """Say that a constant that was to be stored low stays fp32."""
        loss = self.losses.get(str(value.name))
        if loss is not None:
            self._tell(replace(loss, kept=True))

    def _tell(self, loss: Loss) -> bool:
        """Report a loss; whether the constant stays fp32 for it. What one reader keeps, no other takes back."""
        if not (loss.name in self.losses and self.losses[loss.name].kept):
            self.losses[loss.name] = loss
        return loss.kept

    def _harmless(self, node: ir.Node, op: str, value: ir.Value) -> bool:
        """Whether a constant may be rounded: a bias or scale that drowns in a sum, or an epsilon far below the smallest result seen.

        An epsilon in front of a pole is there for the values that no sample shows, such as a row of zeros: it must not vanish.
        """
        seen = self.ranges.get(str(node.outputs[0].name))
        found, row = self.facts(value), find_op(op)
        bias = row is not None and row.summands and node.inputs[2:] and node.inputs[2] is value and "beta" not in node.attributes
        if bias and seen is not None and not found.overflow and drowns_in(seen.largest, self.low):
            return True
        if not found.flushed and not found.overflow and self._drowned(node.outputs[0]):
            return True
        if op not in ops_with(Trait.TAKES_EPSILON) or seen is None or found.overflow or (found.flushed and before_a_pole(node.outputs[0])):
            return False
        return found.error * HEADROOM <= seen.smallest * self.low.eps
