"""Paint high (fp32) the ops after a denied op: step 2 of TensorFlow's auto_mixed_precision.cc. `OpKind` defines infer, internal, clear ops.

1. Start at every denied op that runs in fp32. With our own lists, skip a denied op whose result always fits the low format, because only
   its input needs fp32. TensorFlow starts at such ops, too.
2. Paint the readers of these ops, their readers, and so on, if they are infer or internal ops. Paint clear ops only if they lead, through
   clear ops alone, to an infer, internal or denied op. Stop at a conversion to the dtype of another tensor.
3. Record the nearest denied op as the cause of a node's colour, or the first in canonical order if several are equally near.
"""

from __future__ import annotations

from collections import deque

from amprewrite.ir.op_graph import Demand, OpGraph, OpNode, reached
from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.ops.op_lists import find_op
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

SPREADS_DENY = (OpKind.INFER, OpKind.INTERNAL)
"""Kinds of ops that become fp32 after a denied op."""


class PaintAfterDeny(Pass[Problem, Decisions]):
    def __init__(self, past_bounded: bool = False) -> None:
        """With `past_bounded`, as in TensorFlow, also start at denied ops whose results always fit the low format (step 1 of this file)."""
        self.past_bounded = past_bounded

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        reaches = _clear_ops_before_infer(problem.graph)
        roots = [node.name for node in problem.graph if _denied(decisions, node) and (self.past_bounded or _spreads(node))]
        queue = deque((root, root) for root in roots)
        while queue:  # go breadth first, so that `because_of` names the nearest denied op
            name, root = queue.popleft()
            for reader in sorted(problem.graph.readers(name), key=lambda node: problem.graph.rank[node.name]):
                free = reader.name not in decisions.paints and reader.carries_fp32 and not reader.relative
                takes = any(o.value == name and o.demand in (Demand.COLOUR, Demand.PROMOTE) for o in reader.operands)
                if free and takes and reader.name in reaches:
                    decisions.paint(reader.name, Colour.HIGH, Reason.AFTER_DENY, because_of=root)
                    queue.append((reader.name, root))


def _denied(decisions: Decisions, node: OpNode) -> bool:
    """True if `node` is an op of the denylist that runs in fp32 (colour high), whatever the reason for its colour."""
    return node.kind is OpKind.DENY and node.name in decisions.paints and decisions.paints[node.name].colour is Colour.HIGH


def _spreads(node: OpNode) -> bool:
    row = find_op(node.op)
    return row is None or not row.bounded


def _clear_ops_before_infer(graph: OpGraph) -> set[str]:
    """Return all infer and internal ops, and the clear ops from which a path of clear ops leads to an infer, internal or denied op.

    `OpKind` defines these kinds.
    """
    ends = [node.name for node in graph if node.kind in (*SPREADS_DENY, OpKind.DENY)]
    found = reached(ends, lambda name: (feeder.name for feeder in graph.feeders(name) if feeder.kind is OpKind.CLEAR))
    return {name for name in found if graph[name].kind is not OpKind.DENY}
