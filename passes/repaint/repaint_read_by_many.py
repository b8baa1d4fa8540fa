"""Keep high what so many ops read that a low format would lose gradients in adding them up.

Autograd adds the gradients of a value's readers up in the format of the value, one by one: of fifty, a sum in bf16 loses a tenth. Under
torch.autocast a value that is fp32 there has a copy for every reader, and what adds up is fp32. So such a value stays fp32 in a plan,
whatever a low one would save; and `plan-casts` has it copied for every two readers. What is low under torch.autocast, too, because
it comes of products alone, stays open.
"""

from __future__ import annotations

from amprewrite.ir.evidence.held_wide import held_wide
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.decisions import Decisions
from amprewrite.ir.problem import Problem
from amprewrite.passes.paint.paint_ties import paint_ties
from amprewrite.tables.vocabulary import Reason


class RepaintReadByMany(Pass[Problem, Decisions]):
    name = "repaint-read-by-many"

    def call(self, problem: Problem, decisions: Decisions) -> bool:
        before = dict(decisions.paints)
        wide = held_wide(problem.graph, problem.device, problem.held) if problem.read_by_many else set()
        for name in problem.read_by_many:
            if name in wide:
                decisions.keep_high(problem, name, Reason.READ_BY_MANY)
        if decisions.paints != before:
            paint_ties(problem, decisions)
        return decisions.paints != before


__all__ = ["RepaintReadByMany"]
