"""Keep high what so many ops read that a low format would lose gradients in adding them up.

Autograd adds the gradients of a value's readers up in the format of the value, one by one: of fifty, a sum in bf16 loses a tenth. Under
torch.autocast a value that is fp32 there has a copy for every reader, and what adds up is fp32. So such a value stays fp32 in a plan,
whatever a low one would save; and `plan-casts` has it copied for every two readers. What is low under torch.autocast, too, because
it comes of products alone, stays open.
"""

from __future__ import annotations

from amprewrite.ir.op_graph import OpGraph
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.decisions import Decisions
from amprewrite.ir.problem import Problem
from amprewrite.passes.paint.paint_ties import paint_ties
from amprewrite.tables.vocabulary import OpKind, Reason


class RepaintReadByMany(Pass[Problem, Decisions]):
    name = "repaint-read-by-many"

    def call(self, problem: Problem, decisions: Decisions) -> bool:
        before = dict(decisions.paints)
        low = low_under_autocast(problem.graph) if problem.read_by_many else set()
        for name in problem.read_by_many:
            if name not in low:
                decisions.keep_high(problem, name, Reason.READ_BY_MANY)
        if decisions.paints != before:
            paint_ties(problem, decisions)
        return decisions.paints != before


def low_under_autocast(graph: OpGraph) -> set[str]:
    """Products, and what is made of such alone by ops that follow their operands."""
    found: set[str] = set()
    for node in graph:
        given = [operand.value for operand in node.operands if not operand.scalar]
        follows = node.kind in (OpKind.CLEAR, OpKind.INFER) and bool(given) and found.issuperset(given)
        if node.role == "op" and (node.kind is OpKind.ALLOW or follows):
            found.add(node.name)
    return found


__all__ = ["RepaintReadByMany", "low_under_autocast"]
