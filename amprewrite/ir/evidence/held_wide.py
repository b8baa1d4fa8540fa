"""What torch.autocast holds in fp32, op by op: a plan that rounds it has an error that torch.autocast has not.

1. Inputs and weights are fp32, and so is what an op makes of nothing.
2. Ops that torch.autocast lists as low give low values, those that it lists as high fp32 ones, and so does a cast that the model asks for.
3. Any other op has the widest dtype that it reads; numbers in 0-dim tensors do not count.
"""

from __future__ import annotations

from amprewrite.ir.evidence.running_sums import is_product
from amprewrite.ir.op_graph import OpGraph, OpNode
from amprewrite.tables.ops.list_presets import autocast_kinds
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

CONVERTS = ops_with(Trait.CONVERTS)


def held_wide(graph: OpGraph, device: str) -> set[str]:
    """Names of the values that torch.autocast holds in fp32 on `device`; CUDA's lists stand for devices that have none."""
    kinds = autocast_kinds("cpu" if device == "cpu" else "cuda")
    found: set[str] = set()
    for node in graph:
        if _is_wide(node, kinds.get(node.op), found):
            found.add(node.name)
    return found


def _is_wide(node: OpNode, kind: OpKind | None, wide: set[str]) -> bool:
    if node.role != "op" or kind is OpKind.DENY or node.counted:
        return True
    if kind is OpKind.ALLOW or is_product(node):
        return False
    if node.op in CONVERTS and node.pinned is not None and node.pinned[:2] == (Colour.HIGH, Reason.EXPLICIT_DTYPE):
        return True
    read = [operand.value for operand in node.operands if not operand.scalar]
    return not read or not wide.isdisjoint(read)


__all__ = ["held_wide"]
