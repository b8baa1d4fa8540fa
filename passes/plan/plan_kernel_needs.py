"""Give low ops on a CPU what their kernels need, so that they are as exact there as elsewhere.

1. Batch and instance norms without weights get weights of one in fp32. The CPU kernel keeps its mean and variance in the dtype of its other
   arguments, and without any in that of its input (ATen/native/Normalization.cpp, `is_mixed_type`). CUDA keeps them in fp32 always.
2. A convolution is padded by a separate op if its own backward would leave gradients uninitialised: `graphs/fx/flow/kernel_pins.py`.
"""

from __future__ import annotations

from amprewrite.ir.decisions import Decisions
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.problem import Problem
from amprewrite.tables.vocabulary import Edit


class PlanKernelNeeds(Pass[Problem, Decisions]):
    name = "plan-kernel-needs"

    def call(self, problem: Problem, decisions: Decisions) -> bool:
        norms = decisions.edit_low(problem, problem.bare_norms, Edit.FP32_STATISTICS)
        return decisions.edit_low(problem, problem.bare_taps, Edit.PAD_APART) or norms
