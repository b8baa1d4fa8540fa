"""Plan edits of low ops that would otherwise compute with infinities, or give inexact results, or inexact or uninitialised gradients.

1. Finite constants beyond the range of the low format become ±max, because they would become infinities. A mask fill of -1e9 becomes -65504
   in fp16, which still blocks a position; -inf times zero would be NaN. Infinities that the model wrote are not changed.
2. Batch and instance norms without weights and running statistics get fp32 weights of one on a CPU. Otherwise the kernel would compute mean
   and variance in the low dtype of its input (ATen/native/Normalization.cpp, `is_mixed_type`). CUDA always computes them in fp32.
3. A convolution is padded by a separate op if its own backward would leave gradients uninitialised (see `graphs/fx/flow/kernel_pins.py`).
4. A recurrent layer runs in parts of some time steps if autograd would otherwise add up low gradients of its weights over all steps.
"""

from __future__ import annotations

from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.vocabulary import Edit


class PlanEdits(Pass[Problem, Decisions]):
    needs = ("far_constants", "bare_norms", "bare_taps", "run_by_steps")

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        decisions.edit_low(problem, problem.far_constants, Edit.CLAMP_CONSTANTS)
        decisions.edit_low(problem, problem.bare_norms, Edit.FP32_STATISTICS)
        decisions.edit_low(problem, problem.bare_taps, Edit.PAD_APART)
        decisions.edit_low(problem, problem.run_by_steps, Edit.RUN_IN_PARTS)
