"""What is done with a value further on in an ONNX graph: whether a pole waits for it, a softmax, or the root of a distance.

By name it knows powers (`pow`), the `softmax` that a mask is made for, and what distances are written with (`matmul`, `cat`, `sum`,
`sqrt`).
"""

from __future__ import annotations

import onnx_ir as ir

from amprewrite.graphs.onnx.ops import constant_tensor, op_of
from amprewrite.ir.evidence.range_rules import MAKES_SCORES, POLES, hands_on_small
from amprewrite.tables.ops.op_lists import Trait, find_op, ops_with
from amprewrite.tables.vocabulary import OpKind

BOUNDS, DIVIDES = ops_with(Trait.BOUNDS), ops_with(Trait.DIVIDES)


def has_pole(op: str, index: int) -> bool:
    """Whether an op has a pole where its operand at this place is zero."""
    return op in POLES or (op in DIVIDES and index == 1)


def before_a_pole(value: ir.Value) -> bool:
    """Whether a value, or what hands it on while it is small, is divided by or raised to a power that may be negative."""
    seen, waiting = set[ir.Node](), [value]
    while waiting:
        for use in waiting.pop().uses():
            op = op_of(use.node)
            if has_pole(op, use.idx) or (op == "pow" and use.idx == 0 and not _is_positive(use.node.inputs[1])):
                return True
            if hands_on_small(op) and use.node not in seen:
                seen.add(use.node)
                waiting.append(use.node.outputs[0])
    return False


def _is_positive(value: ir.Value | None) -> bool:
    tensor = constant_tensor(value) if value is not None else None
    return tensor is not None and bool((tensor.numpy() > 0).all())


def reaches_softmax(node: ir.Node) -> bool:
    """Whether scores are made of the result, and a softmax of those."""
    seen, waiting = {node}, [node]
    while waiting:
        for use in waiting.pop().outputs[0].uses():
            op = op_of(use.node)
            if op == "softmax":
                return True
            if op in MAKES_SCORES and use.node not in seen:
                seen.add(use.node)
                waiting.append(use.node)
    return False


def is_score_mask(value: ir.Value) -> bool:
    """Whether all that reads a value makes scores of it for a softmax, and none takes it for a bound."""
    uses = value.uses()
    return bool(uses) and all(op_of(use.node) not in BOUNDS and reaches_softmax(use.node) for use in uses)


def is_distance(node: ir.Node) -> bool:
    """Whether a node is the product in `sqrt(clamp(cat(-2 * a, sum(a**2), 1) @ cat(b, 1, sum(b**2)).T, 0))`."""
    if op_of(node) != "matmul" or not all(_holds_sum(value) for value in node.inputs):
        return False
    bounded = [use.node for use in node.outputs[0].uses()]
    roots = [use.node for each in bounded for use in each.outputs[0].uses()]
    return bool(roots) and all(op_of(each) in BOUNDS for each in bounded) and all(op_of(each) == "sqrt" for each in roots)


def _holds_sum(value: ir.Value | None) -> bool:
    """Whether a value is joined of others, one of which is a sum, but for a transposition. A folded one cannot be told: it may be."""
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


__all__ = ["before_a_pole", "has_pole", "is_distance", "is_score_mask", "reaches_softmax"]
