"""Give batch and instance norms that run low on a CPU, and have no weights, weights of one in fp32.

That kernel keeps its mean and variance in the dtype of its other arguments, and if it has none in that of its input
(ATen/native/Normalization.cpp, `is_mixed_type`). CUDA's keeps them in fp32 always.
"""

from __future__ import annotations

from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.decisions import Decisions
from amprewrite.ir.problem import Problem
from amprewrite.tables.vocabulary import Edit


class PlanNormWeights(Pass[Problem, Decisions]):
    name = "plan-norm-weights"

    def call(self, problem: Problem, decisions: Decisions) -> bool:
        return decisions.edit_low(problem, problem.bare_norms, Edit.FP32_STATISTICS)
