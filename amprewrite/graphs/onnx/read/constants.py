"""Round constants of an ONNX file to a low format. Find the error of a low copy, and whether a mask may be clamped to ±max of the format.

This file has special code for the bounds of `clamp` and `maximum`, for `add`, which keeps the sign of large mask numbers, and for
`BatchNormalization`, whose results after the first are running averages.

`Readers`, `before_a_pole` and `is_distance` search the graph forward from a value: for its readers, for a softmax, for an op that returns
an infinity at zero (a pole), and for the square root that ends the computation of a distance. They have special code for powers (`pow`),
bounds (`clamp`, `maximum`), the `softmax` after a mask, `scaled_dot_product_attention`, and the ops that compute distances (`matmul`,
`cat`, `sum`, `sqrt`).

Rounding is to nearest even. Signs, infinities and NaN are kept. Finite numbers of masks and bounds beyond the range become ±max. In a
mask of scores before a softmax they become less than half of ±max: the sum with a score or a second mask must not be an infinity, because
the softmax of a fully blocked row would then be NaN. An op stays fp32 if a constant that it reads would overflow and is neither a mask nor
a bound, or if the constant would lose too many bits to underflow.

`Kinds` tells if an op may run low. It reads the op's name and attributes, and the values in sample runs. It has special code for `exp`, for
an `einsum` that is a `mul`, and for `Cast`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from amprewrite.graphs.mask_rules import FILLS, MaskRules
from amprewrite.graphs.onnx.ops import Signature, bodies, constant_tensor, format_of, is_float, op_of
from amprewrite.graphs.onnx.run.samples import Samples
from amprewrite.ir.evidence.constants import BORDERS, TAKES_EPSILON, ConstantRead, Loss
from amprewrite.ir.evidence.counts import BYTES
from amprewrite.ir.evidence.range_rules import (
    ABOVE,
    BELOW,
    EXTREME,
    MASK,
    POLES,
    Read,
    bound_fits,
    hands_on_small,
    near_a_pole,
    near_the_end,
)
from amprewrite.ir.evidence.ranges import ValueRange
from amprewrite.ir.op_graph import reached
from amprewrite.tables.formats import FORMATS, LOW_FORMATS, LOW_NAMES, Format
from amprewrite.tables.ops.onnx_names import DOMAIN, SIDE_FOLLOWS
from amprewrite.tables.ops.op_lists import OpLists, Trait, find_op, ops_with
from amprewrite.tables.ops.products import sums_products
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

BOUNDS = ops_with(Trait.BOUNDS)
"""Ops with bounds, such as clamp. Of all constants beyond the low format's range, only bounds and masks may become ±max."""


class ConstantFacts:
    """Finds the errors that the constants of one model would have in one low format, and the constants that may be clamped to its range."""

    def __init__(self, model: ir.Model, low: Format) -> None:
        self.low = low
        self.readers = Readers(model.graph, low)
        self._looked_at: dict[ir.Value, Facts] = {}

    def facts(self, value: ir.Value) -> Facts:
        """Return the `Facts` about a constant in the low format, such as the number of its elements that overflow. The result is cached."""
        if value not in self._looked_at:
            tensor = constant_tensor(value)
            assert tensor is not None
            self._looked_at[value] = facts(tensor.numpy(), self.low)
        return self._looked_at[value]

    def loss(self, value: ir.Value, node: ir.Node, op: str) -> Loss | None:
        """Return the error of the constant `value`, which `node` reads, in the low format, as a `Loss`; None if it is only rounded."""
        found = self.facts(value)
        masks_scores = bool(found.overflow) and self.readers.masks_scores(value)
        return loss_of(str(value.name), found, self.low, self.saturates(value, node, op), masks_scores)

    def read(self, constant: str, value: ir.Value, reader: str, node: ir.Node, op: str, result: ir.Value, index: int) -> ConstantRead:
        """Return the `ConstantRead` of operand `index` of `node`, the constant `value`. The constant follows the format of `node`.

        `constant` and `reader` are the names of the op-graph nodes of `value` and `node`. `result` is the value that `node` computes.
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
        """Return a `Loss` (error of a low copy) for each constant of `node` whose low copy would have more than rounding errors.

        `node` is an op without a float result, such as a comparison. These constants must stay fp32.
        """
        lost = [loss for _, value in constants_of(node) if (loss := self.loss(value, node, op_of(node))) is not None]
        return [replace(loss, kept=True) for loss in lost]

    def fixed_groups(self, node: ir.Node, sig: Signature, group: str) -> dict[str, Loss | None]:
        """Return {type variable: `Loss`} for the operands and results of `node` that stay fp32 even if its first result is low.

        A constant operand, such as the exponent of Pow, stays fp32 if its low copy would lose too much; `Loss` says how much. The running
        averages of a batch norm in training stay fp32, with None as `Loss`. `group` is the type variable, such as "T", of the first result.
        """
        if node.op_type not in SIDE_FOLLOWS:
            return {}
        if node.op_type == "BatchNormalization" and len(node.outputs) > 1:  # the roundings of low running averages would add up over steps
            return dict.fromkeys({sig.output(index) for index in range(1, len(node.outputs))} - {group})
        return {
            sig.input(index): loss
            for index, value in constants_of(node)
            if sig.input(index) != group and sig.follows(node.op_type, index, group, self.low)
            and (loss := self.loss(value, node, node.op_type)) is not None and loss.kept
        }  # fmt: skip

    # -- masks and bounds -----------------------------------------------------------------------
    def may_saturate(self, node: ir.Node, op: str, kind: OpKind | None, beside: bool) -> bool:
        """True if a low copy of the result of `node` should clamp numbers beyond the low range to ±max, because they belong to a mask.

        The mask may be a constant operand of `node`. `beside` is True if an operand that is no constant may hold a mask, too.
        """
        far = any(self.saturates(value, node, op) for _, value in constants_of(node))
        return self.readers.holds_mask(node.outputs[0], op, kind, far, far, beside)

    def takes_mask(self, node: ir.Node, op: str) -> bool:
        """True if `node` reads a constant mask with numbers beyond the range, which become ±max. The bounds of a clamp are no mask."""
        return any(self.saturates(value, node, op) and not self._is_bound(value, op, node) for _, value in constants_of(node))

    def fill_range(self, name: str, node: ir.Node) -> dict[str, ValueRange]:
        """Return {`name`: range of the fill number} for a ConstantOfShape; {} if the number fits the low format, or fills a mask."""
        number = fill_of(node)
        found = facts(number, self.low)
        sides = {ABOVE if found.most > 0 else BELOW}
        loss = loss_of(node.op_type, found, self.low, found.mask and self.readers.only_block(node.outputs[0], sides))
        return {name: ValueRange.of(torch.tensor(number, device="cpu"))} if loss is not None and loss.kept else {}

    def saturates(self, value: ir.Value, node: ir.Node, op: str) -> bool:
        """True if a constant exceeds the low range but may be clamped to ±max, because `node` uses it as a bound or a mask of positions."""
        found = self.facts(value)
        if not found.overflow:
            return False
        if self._is_bound(value, op, node):
            return True
        blocks = found.mask or (op in FILLS and found.most <= self.low.max and self.readers.reaches_softmax(node.outputs[0]))
        return blocks and self._only_blocks(found, node, op)

    def _only_blocks(self, found: Facts, node: ir.Node, op: str) -> bool:
        """True if numbers beyond the range in a constant of `node` only block positions, as -1e9 does before a softmax.

        `found` holds the `Facts` about the constant, such as its least number. The test follows all readers of the results of `node`.
        """
        sides = {side for side, far in ((BELOW, found.least < -self.low.max), (ABOVE, found.most > self.low.max)) if far}
        moved = op in FILLS or op in BORDERS or op == "add"
        return self.readers.results_only_block(node, sides if moved else {BELOW, ABOVE})

    def _is_bound(self, value: ir.Value, op: str, node: ir.Node) -> bool:
        """True if `value` is a bound of `node` that may be clamped to the low format's range without changing the result.

        A lower bound may be clamped unless it lies above the range, an upper bound unless it lies below the range.
        """
        lower = op == "maximum" or (op == "clamp" and value is node.inputs[1])
        return op in BOUNDS and bound_fits(self.facts(value).most if lower else self.facts(value).least, lower, self.low)


def fill_of(node: ir.Node) -> np.ndarray:
    """Return the number with which a ConstantOfShape fills its result, as an array of one element."""
    held = node.attributes.get("value")
    return np.zeros(1, np.float32) if held is None else held.as_tensor().numpy()


def constants_of(node: ir.Node) -> list[tuple[int, ir.Value]]:
    """Return the fp32 constants that a node reads, each as (index of the operand, value)."""
    return [
        (index, value)
        for index, value in enumerate(node.inputs)
        if value is not None and format_of(value) == "fp32" and constant_tensor(value) is not None
    ]


DIVIDES, SCALES = ops_with(Trait.DIVIDES), ops_with(Trait.SCALES)
LOOKED_INTO = BOUNDS | ops_with(Trait.MAKES_SCORES, Trait.COMPARES)
"""Ops that clamp, compare, or compute attention scores. Their constants tell whether a number beyond the range may become ±max."""
MASK_OF_ATTENTION, MASK_OF_CONTRIB = 3, 5
"""Index of the mask among the operands of attention: in onnx's own op `Attention`, and in the ops of ONNX Runtime's own domain."""


def has_pole(op: str, index: int) -> bool:
    """True if an op returns an infinity (has a pole) where its operand `index` is zero: the operand of log, for example, or a divisor."""
    return op in POLES or (op in DIVIDES and index == 1)


def before_a_pole(value: ir.Value) -> bool:
    """True if an op that returns inf at zero, such as log, reads `value`, directly or through ops such as views and `sqrt`."""
    small = reached([value], lambda each: (use.node.outputs[0] for use in each.uses() if hands_on_small(op_of(use.node))))
    return any(_is_pole(use.node, use.idx) for each in small for use in each.uses())


def _is_pole(node: ir.Node, index: int) -> bool:
    """True if a node returns an infinity where its operand `index` is zero. A power counts, unless its exponents are positive constants."""
    return has_pole(op_of(node), index) or (op_of(node) == "pow" and index == 0 and not _is_positive(node.inputs[1]))


def _is_positive(value: ir.Value | None) -> bool:
    """True if a value is a constant of positive numbers alone."""
    tensor = constant_tensor(value) if value is not None else None
    return tensor is not None and bool((tensor.numpy() > 0).all())


class Readers(MaskRules[ir.Value]):
    """Finds the readers of the values of a graph, including readers in the bodies (subgraphs) of its loops and branches."""

    def __init__(self, graph: ir.Graph, low: Format) -> None:
        super().__init__(low)
        self._leaving: dict[ir.Value, list[ir.Value]] = {}
        """Maps each output of a subgraph to values that it may become: results of the outer node, and inputs of the next iteration."""
        for node in graph.all_nodes():
            for body in bodies(node):
                for value in body.outputs:
                    self._leaving.setdefault(value, []).extend((*node.outputs, *body.inputs))

    def reads(self, value: ir.Value) -> Iterator[Read[ir.Value]]:
        """Yield a `Read` (one use of `value`) for each op that reads `value`. An output of a graph or subgraph counts as an op named ""."""
        for made in self._leaving.get(value, [value] if value.is_graph_output() else []):
            yield Read("", OpKind.CLEAR if made is not value else None, made, floating=is_float(made))
        for use in value.uses():
            inner = [each for body in bodies(use.node) for each in body.inputs]
            for made in (*use.node.outputs, *inner):
                yield _read(use.node, use.idx, made, crosses=bool(inner))

    def made_of(self, value: ir.Value) -> tuple[str, list[ir.Value]] | None:
        """Return (name of the op that makes `value`, its floating-point operands except constants); None if no op makes the value."""
        maker = value.producer()
        if maker is None:
            return None
        return op_of(maker), [each for each in maker.inputs if each is not None and is_float(each) and constant_tensor(each) is None]

    def results_only_block(self, node: ir.Node, sides: Set[int]) -> bool:
        """True if numbers beyond the low format's range in the results of `node` only block positions, as -1e9 does before a softmax.

        `sides` selects the numbers: above zero, below zero, or both.
        """
        made = [*node.outputs, *(each for body in bodies(node) for each in body.inputs)]
        return all(self.only_block(each, sides) for each in made if is_float(each))

    def masks_scores(self, value: ir.Value) -> bool:
        """True if `value` can only mask attention scores: all its readers compute scores for a softmax, and none uses it as a bound."""
        uses = value.uses()
        return bool(uses) and all(op_of(use.node) not in BOUNDS and self.reaches_softmax(use.node.outputs[0]) for use in uses)


def _read(node: ir.Node, place: int, made: ir.Value, crosses: bool) -> Read[ir.Value]:
    """Return a `Read`: how `node` uses operand `place` to make `made`. `crosses` is True if `node` passes the operand to a subgraph."""
    op = op_of(node)
    row = find_op(op)
    kind = OpKind.CLEAR if crosses else row.kind if row is not None else None
    beside = [each for index, each in enumerate(node.inputs) if index != place and each is not None]
    numbers = _ends(beside, of_one_sign=op in SCALES) if op in LOOKED_INTO else ()
    lower, upper = (numbers, ()) if op == "maximum" else ((), numbers)
    if op == "clamp":
        lower, upper = (_ends([each for each in node.inputs[at : at + 1] if each is not None and at != place]) for at in (1, 2))
    masks = op == "scaled_dot_product_attention" and place == (MASK_OF_CONTRIB if node.domain == DOMAIN else MASK_OF_ATTENTION)
    return Read(op, kind, made, place, numbers, lower, upper, is_float(made), masks)


def _ends(values: Sequence[ir.Value], of_one_sign: bool = False) -> tuple[float, ...]:
    """Return the least and the greatest finite number of each constant among `values`, as one tuple; () if there is none.

    With `of_one_sign`, the result is also () if the numbers have both signs or include zero.
    """
    held = [tensor.numpy() for tensor in map(constant_tensor, values) if tensor is not None and tensor.size]
    finite = [each[np.isfinite(each)] for each in held if each.dtype.kind == "f"]
    ends = [float(end(each)) for each in finite if each.size for end in (np.min, np.max)]
    return () if of_one_sign and ends and min(ends) * max(ends) <= 0 else tuple(ends)


def is_distance(node: ir.Node) -> bool:
    """True if a node is the matrix product in a computation of the distances between the rows of a and of b.

    The computation is `sqrt(clamp(cat(-2 * a, sum(a**2), 1) @ cat(b, 1, sum(b**2)).T, 0))`; `@` is the product.
    """
    if op_of(node) != "matmul" or not all(_holds_sum(value) for value in node.inputs):
        return False
    bounded = [use.node for use in node.outputs[0].uses()]
    roots = [use.node for each in bounded for use in each.outputs[0].uses()]
    return bool(roots) and all(op_of(each) in BOUNDS for each in bounded) and all(op_of(each) == "sqrt" for each in roots)


def _holds_sum(value: ir.Value | None) -> bool:
    """True if a value is a concatenation (`cat`) with a sum among its parts, or a view of such a `cat`, as in `is_distance`.

    Also True for any constant, because constant folding may have computed such a concatenation.
    """
    while value is not None and (maker := value.producer()) is not None and op_of(maker) != "cat":
        row = find_op(op_of(maker))
        if row is None or row.kind is not OpKind.CLEAR or constant_tensor(value) is not None:
            break
        value = maker.inputs[0]
    if value is None or constant_tensor(value) is not None:
        return value is not None
    maker = value.producer()
    parts = [] if maker is None or op_of(maker) != "cat" else [part.producer() for part in maker.inputs if part is not None]
    return any(part is not None and op_of(part) == "sum" for part in parts)


NUMPY = {row.name: np.dtype(getattr(ml_dtypes, row.library_name, row.library_name)) for row in LOW_FORMATS}
LOSS = 4
"""A constant loses too many bits to underflow if the relative L2 error of one of its slices exceeds LOSS times the format's eps."""

BLOCKED = 15 / 32
"""A mask number that blocks a score becomes BLOCKED times the format's lowest number.

In fp16 that is -30704. The sum of two such numbers and a score of -4000 is still finite. The sum of one such number and a score below 8 is
the number itself, because fp16 rounds the score away. So a fully blocked row has equal sums, and its softmax is uniform, as in fp32.
"""


@dataclass(frozen=True)
class Facts:
    """Statistics of one constant in one low format. `overflow` elements exceed its range, and `flushed` elements become zero."""

    elements: int
    overflow: int
    mask: bool
    """True if elements overflow, and each of them is so large, or so far below zero, that it can only belong to a mask."""
    flushed: int
    worst: float
    """Largest relative L2 error of the whole constant or of a slice along its first or last axis."""
    least: float
    most: float
    largest: float
    """Largest finite magnitude."""
    smallest: float
    """Smallest magnitude that is not zero."""
    error: float
    """Largest absolute error of a value that does not overflow."""


def rounded(values: np.ndarray, fmt: Format, masks_scores: bool = False) -> np.ndarray:
    """Round a constant to nearest even in `fmt`. Finite numbers beyond the range become ±max.

    With `masks_scores` (the constant only masks attention scores) they become ±max * 15/32 (BLOCKED), so that sums with scores stay finite.
    """
    with np.errstate(over="ignore", under="ignore"):
        low = values.astype(NUMPY[fmt.name])
    over = ~np.isfinite(low.astype(np.float32)) & np.isfinite(values)
    if over.any():
        end = np.float32(fmt.max * BLOCKED if masks_scores else fmt.max)
        low = np.where(over, np.copysign(end, values).astype(low.dtype), low)
    return low


def facts(values: np.ndarray, fmt: Format) -> Facts:
    """Return statistics of a constant that is rounded to a low format: how many values overflow or become 0, and the errors."""
    if not values.size:
        return Facts(0, 0, False, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        low = values.astype(NUMPY[fmt.name]).astype(np.float32)
        size = np.abs(values)
        over = ~np.isfinite(low) & np.isfinite(values)
        flushed = (low == 0) & (values != 0)
        error = np.where(np.isfinite(values) & ~over, low - values, 0)
    lost = size[over]
    mask = bool(over.any() and ((lost >= EXTREME) | ((values[over] < 0) & (lost >= MASK))).all())
    present = size[(size > 0) & np.isfinite(size)]
    largest = float(present.max()) if present.size else 0.0
    worst = _worst_slice(error, np.where(np.isfinite(values) & ~over, values, 0)) if _may_lose(size, fmt, largest) else 0.0
    return Facts(
        values.size, int(over.sum()), mask, int(flushed.sum()), worst, float(values.min()), float(values.max()), largest,
        float(present.min()) if present.size else 0.0, float(np.abs(error).max()),
    )  # fmt: skip


def _may_lose(size: np.ndarray, fmt: Format, largest: float) -> bool:
    """True if a copy in `fmt` may lose more than a rounding: a magnitude in `size` is smaller than all normal numbers of `fmt` (underflow).

    `largest` is the largest finite magnitude; 0 if there is none, so that nothing can be lost.
    """
    return bool(largest and ((size > 0) & (size < fmt.smallest_normal)).any())


def _worst_slice(error: np.ndarray, values: np.ndarray) -> float:
    """Return the largest relative L2 error: of all `values`, or of one slice along the first or last axis. `error` is elementwise."""
    square_error, square = error.astype(np.float64) ** 2, values.astype(np.float64) ** 2
    axes = [None] if values.ndim < 2 else [None, tuple(range(1, values.ndim)), tuple(range(values.ndim - 1))]
    worst = 0.0
    for axis in axes:
        lost, whole = np.atleast_1d(square_error.sum(axis)), np.atleast_1d(square.sum(axis))
        worst = max(worst, float(np.sqrt(np.divide(lost, whole, out=np.zeros_like(lost), where=whole > 0)).max()))
    return worst


def loss_of(name: str, found: Facts, fmt: Format, saturates: bool, masks_scores: bool = False) -> Loss | None:
    """Return the error of storing the constant `name` in the low format `fmt`, as a `Loss`; None if its elements are only rounded.

    `found` holds the facts about the constant in `fmt`. `saturates` is True if the reader uses the constant as a mask or a bound, so that
    numbers beyond the range may be clamped. `masks_scores` is True if all readers mask attention scores with the constant.
    """
    of, kept, saturated = f"of {found.elements} values", True, False
    if found.overflow and not saturates:
        why = f"{found.overflow} {of} exceed {fmt.name}'s {fmt.max:g} (largest {found.largest:.3g})"
    elif found.worst > LOSS * fmt.eps:
        why = f"{found.flushed} {of} vanish in {fmt.name}, others lose bits (smallest {found.smallest:.3g})"
    elif found.overflow:
        end = "less than half of its lowest: a mask of scores" if masks_scores else "its lowest or highest: a mask or bound"
        why, kept, saturated = f"{found.overflow} {of} exceed {fmt.name}'s range and become {end}", False, True
    elif found.flushed:
        beside = f"negligible beside their neighbours (smallest {found.smallest:.3g}, largest {found.largest:.3g})"
        why, kept = f"{found.flushed} {of} vanish in {fmt.name}, {beside}", False
    else:
        return None
    return Loss(name, why, kept, saturated, found.overflow, found.flushed, found.error)


EXP_MOST = 8.0
"""Largest result of an exp that may run low. The relative error of exp(x) is |x| times that of x: about 2 times if exp(x) is 8."""


@dataclass(frozen=True)
class Kinds:
    """Chooses the kind of an op (allow, deny, …) by op lists and value ranges in samples. `asked_ops` are the ops that users override."""

    low: Format
    lists: OpLists
    samples: Samples
    asked_ops: frozenset[str] = frozenset()

    def of(self, op: str, node: ir.Node) -> OpKind | None:
        """Return the kind of an op in the op lists, which says whether it may run low; None if it is on no list.

        With the rule "cost" (the default planner) there are three exceptions, unless the user has an override for the op. An op that the
        lists deny in fp16 alone, for its range, gets the kind that it has in bf16 if samples stay within fp16's range. An einsum that sums
        over no dim that two operands share, such as an outer product, counts as a `mul`. An exp may run low if its results are small.
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
        small_exp = op == "exp" and self._in_range(op, node) and self.samples.ranges[str(node.outputs[0].name)].amax <= EXP_MOST
        return OpKind.INFER if small_exp else kind

    def _in_range(self, op: str, node: ir.Node) -> bool:
        """True if the op's fp32 operands and results in samples are well within the low format's range.

        If the op returns inf at zero, its operands must also be away from zero. Constant operands do not count.
        False if the op has no other fp32 operand, or if samples lack the range of a value.
        """
        read = [v for v in node.inputs if v is not None and format_of(v) == "fp32" and constant_tensor(v) is None]
        made = [v for v in node.outputs if format_of(v) == "fp32"]
        for value in (*read, *made):
            seen = self.samples.ranges.get(str(value.name))
            if seen is None or near_the_end(seen.amax, self.low):
                return False
            if op in POLES and value in read and (seen.zeros or near_a_pole(seen.smallest, self.low)):
                return False
        return bool(read)

    def pin_cast(self, node: ir.Node) -> tuple[Colour, Reason, str] | None:
        """Return (high, reason, detail) for a Cast that must cast to fp32; None if it may cast to the low format instead.

        Booleans, bytes, a small constant integer, and constant masks of zeros and ones may become low, since the low format holds them
        exactly. Other integers, and doubles, must become fp32. Integers may be positions, to which a later op adds fractions, and may be
        larger than in the samples. Numbers in fp32 and fp16 may become low: rounding fp16 to bf16 is no worse than rounding fp32. Numbers
        in bf16 may exceed fp16's range, so they may become fp16 only if samples show their range.
        """
        source, seen = format_of(node.inputs[0]), self.samples.ranges.get(str(node.outputs[0].name))
        if source in BYTES or source in ("fp32", self.low.name):
            return None
        if source in LOW_NAMES and (FORMATS[source].narrow or seen is not None):
            return None  # bf16 may become fp16 only if samples show the range, which the pass `repaint-by-range` checks
        held = constant_tensor(node.inputs[0]) if source.startswith(("int", "uint")) and node.inputs[0] is not None else None
        most = 2 / self.low.eps if held is not None and held.size == 1 else 1
        if held is not None and np.abs(held.numpy().astype(np.float64)).max(initial=0) <= most:
            return None
        return Colour.HIGH, Reason.BOUNDARY, f"makes fp32 from {source}"
