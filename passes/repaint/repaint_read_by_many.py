"""Keep a value in fp32 if so many ops read it that adding up their gradients in a low format would lose accuracy.

Autograd adds the gradients of a value's readers one by one in the format of the value: a sum of fifty in bf16 loses a tenth. Under
torch.autocast an fp32 value has a copy for every reader, and the gradients add up in fp32. So such a value stays fp32 at any price, and
`plan-casts` plans a low copy for every two readers. A value that is low under torch.autocast too, because it is computed from products
alone, is left to later passes.
"""

from __future__ import annotations

from amprewrite.ir.decisions import Decisions
from amprewrite.ir.held_wide import held_wide
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.problem import Problem
from amprewrite.passes.paint.paint_ties import paint_ties
from amprewrite.tables.vocabulary import Reason


class RepaintReadByMany(Pass[Problem, Decisions]):
    name = "repaint-read-by-many"

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        wide = held_wide(problem.graph, problem.device, problem.held) if problem.read_by_many else set()
        for name in problem.read_by_many:
            if name in wide:
                decisions.keep_high(problem, name, Reason.READ_BY_MANY)
        paint_ties(problem, decisions)
