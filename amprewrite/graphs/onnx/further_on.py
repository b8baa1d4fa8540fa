"""What is done with a value further on in an ONNX graph: whether a pole waits for it, or a softmax.

By name it knows powers (`pow`), and the `softmax` that a mask is made for.
"""

from __future__ import annotations

import onnx_ir as ir

from amprewrite.graphs.onnx.ops import constant_tensor, op_of
from amprewrite.ir.evidence.range_rules import MAKES_SCORES, POLES, hands_on_small
from amprewrite.tables.ops.op_lists import Trait, ops_with

DIVIDES = ops_with(Trait.DIVIDES)


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


__all__ = ["before_a_pole", "has_pole", "reaches_softmax"]
