"""Keep in fp32 the sums that change one value in many small steps, `x = x + 0.1 * f(x)`, and running sums.

Each sum rounds all of x, while rounding errors of f are scaled down with the step. In bf16 sixty steps of a tenth lose 3 %, but 0.2 % if
the sums are fp32, as torch.autocast keeps them. Such sums occur in solvers of differential equations, samplers, and networks with scaled
residuals (Inception-ResNet v2, EDSR, LayerScale). Examples are Euler's `x + (s[i + 1] - s[i]) * f(x)`, and DDIM, which also scales x up and
down. Large steps, as in most residual streams, are left out: there rounding f loses as much as rounding the sum.

1. Small steps, and the ops that pass the value from one to the next, are read from the graph (`graphs/step_search.py`, and for each kind of
   graph `graphs/fx/flow/` and `graphs/onnx/read/`). The ops of f, and the scaling of its result, are left to later passes, because
   torch.autocast rounds there, too.
2. Running sums carry a value on and add terms that do not depend on the value, `h = 0.99 * h + 0.01 * u[:, t]`, or average it by gates
   (`ir/running_sums.py`).
3. Pins and overrides stay in force. Tied nodes share a colour.
"""

from __future__ import annotations

from amprewrite.ir.decisions import Decisions
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.problem import Problem
from amprewrite.ir.running_sums import running_sums
from amprewrite.passes.paint.paint_ties import paint_ties
from amprewrite.tables.vocabulary import Reason


class RepaintSmallSteps(Pass[Problem, Decisions]):
    name = "repaint-small-steps"

    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        for name in problem.small_steps:
            decisions.keep_high(problem, name, Reason.SMALL_STEPS)
        running = running_sums(problem)
        for name in (node.name for node in problem.graph if node.name in running):
            decisions.keep_high(problem, name, Reason.RUNNING_SUM)
        paint_ties(problem, decisions)
