"""Store the constants of an ONNX file in the format in which ops read them.

1. An op that runs low reads a low copy of the constant. One copy serves all such ops.
2. A constant that no op reads in fp32 is stored in the low format alone.
3. Finite values beyond the low format's range become ±max.

A graph that PyTorch captured has no such constants, because its weights are inputs.
"""

from __future__ import annotations

from amprewrite.ir.decisions import Decisions
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import Cast
from amprewrite.ir.problem import Problem
from amprewrite.tables.vocabulary import Colour


class PlanConstants(Pass[Problem, Decisions]):
    name = "plan-constants"

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        readers: dict[str, dict[str, None]] = {}
        for read in problem.constants:
            if decisions.paints[read.follows].colour is Colour.LOW:
                readers.setdefault(read.constant, {})[read.reader] = None
        saturating = {read.constant for read in problem.constants if read.loss is not None and read.loss.saturated}
        decisions.casts += tuple(
            Cast(value=constant, to=problem.policy.low.name, users=tuple(users), saturate=constant in saturating, weight=True)
            for constant, users in readers.items()
        )
