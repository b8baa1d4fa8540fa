"""Search an ONNX graph forward from a value: for its readers, a softmax, the root of a distance, or a pole (an infinite result).

This file has special code for powers (`pow`), bounds (`clamp`, `maximum`), the `softmax` after a mask, `scaled_dot_product_attention`, and
the ops that compute distances (`matmul`, `cat`, `sum`, `sqrt`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import numpy as np
import onnx_ir as ir

from amprewrite.graphs.mask_rules import MaskRules
from amprewrite.graphs.onnx.ops import bodies, constant_tensor, is_float, op_of
from amprewrite.ir.evidence.range_rules import POLES, Read, hands_on_small
from amprewrite.ir.op_graph import reached
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.onnx_names import DOMAIN
from amprewrite.tables.ops.op_lists import Trait, find_op, ops_with
from amprewrite.tables.vocabulary import OpKind

BOUNDS, DIVIDES, SCALES = ops_with(Trait.BOUNDS), ops_with(Trait.DIVIDES), ops_with(Trait.SCALES)
LOOKED_INTO = BOUNDS | ops_with(Trait.MAKES_SCORES, Trait.COMPARES)
"""Ops whose constant operands decide whether a number beyond the low format's range may become ±max."""
MASK_OF_ATTENTION, MASK_OF_CONTRIB = 3, 5
"""Position of the mask among the operands of attention: in onnx's own op `Attention`, and in the ops of ONNX Runtime's own domain."""


def has_pole(op: str, index: int) -> bool:
    """True if an op has a pole (returns an infinity) where its operand at position `index` is zero."""
    return op in POLES or (op in DIVIDES and index == 1)


def before_a_pole(value: ir.Value) -> bool:
    """True if a value reaches a pole at zero, as a divisor or an operand of log does, perhaps through ops that keep small values small."""
    small = reached([value], lambda each: (use.node.outputs[0] for use in each.uses() if hands_on_small(op_of(use.node))))
    return any(_is_pole(use.node, use.idx) for each in small for use in each.uses())


def _is_pole(node: ir.Node, index: int) -> bool:
    """True if a node has a pole where its operand at position `index` is zero. A power has one unless its exponents are positive."""
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
        """Maps each result of a body (subgraph) to the values that it may become outside of the body or in the next iteration."""
        for node in graph.all_nodes():
            for body in bodies(node):
                for value in body.outputs:
                    self._leaving.setdefault(value, []).extend((*node.outputs, *body.inputs))

    def reads(self, value: ir.Value) -> Iterator[Read[ir.Value]]:
        """Yield one `Read` for each op that reads `value`. An output of a subgraph or of the model counts as an op with the name ""."""
        for made in self._leaving.get(value, [value] if value.is_graph_output() else []):
            yield Read("", OpKind.CLEAR if made is not value else None, made, floating=is_float(made))
        for use in value.uses():
            inner = [each for body in bodies(use.node) for each in body.inputs]
            for made in (*use.node.outputs, *inner):
                yield _read(use.node, use.idx, made, crosses=bool(inner))

    def made_of(self, value: ir.Value) -> tuple[str, list[ir.Value]] | None:
        """Return the op that makes a value, and the floating operands of this op that are no constants; None if no op makes the value."""
        maker = value.producer()
        if maker is None:
            return None
        return op_of(maker), [each for each in maker.inputs if each is not None and is_float(each) and constant_tensor(each) is None]

    def results_only_block(self, node: ir.Node, sides: Set[int]) -> bool:
        """True if numbers beyond the low format's range in the results of `node` are used only to block positions, as a mask does.

        `sides` selects such numbers above zero, below zero, or both.
        """
        made = [*node.outputs, *(each for body in bodies(node) for each in body.inputs)]
        return all(self.only_block(each, sides) for each in made if is_float(each))

    def masks_scores(self, value: ir.Value) -> bool:
        """True if each reader of `value` computes scores for a softmax from it, and none uses it as a bound. False without a reader."""
        uses = value.uses()
        return bool(uses) and all(op_of(use.node) not in BOUNDS and self.reaches_softmax(use.node.outputs[0]) for use in uses)


def _read(node: ir.Node, place: int, made: ir.Value, crosses: bool) -> Read[ir.Value]:
    """Describe how a node uses its operand at position `place` to make `made`. `crosses`: the node passes the operand to a subgraph."""
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
    """Return the least and the largest finite number of each constant among `values`; () if there is none.

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
    """True if a value is a concatenation that contains a sum, perhaps transposed. A constant counts too: it may be such a value, folded."""
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
