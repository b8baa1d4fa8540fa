"""Plan extra operands and pads for low ops whose CPU kernels would otherwise be less exact than on other devices.

1. Batch and instance norms without weights get weights of one in fp32. The CPU kernel computes mean and variance in the dtype of its other
   tensor arguments, and without other tensor arguments in the dtype of its input (ATen/native/Normalization.cpp, `is_mixed_type`). CUDA
   always computes them in fp32.
2. A convolution is padded by a separate op if its own backward would leave gradients uninitialised (see `graphs/fx/flow/kernel_pins.py`).
"""

from __future__ import annotations

from amprewrite.ir.decisions import Decisions
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.problem import Problem
from amprewrite.tables.vocabulary import Edit


class PlanKernelNeeds(Pass[Problem, Decisions]):
    name = "plan-kernel-needs"

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        decisions.edit_low(problem, problem.bare_norms, Edit.FP32_STATISTICS)
        decisions.edit_low(problem, problem.bare_taps, Edit.PAD_APART)
