"""One way from a captured graph to the program that passes decide, whoever captured it.

`rewrite`, `export_program`, `verify`, calibration and the search for an accuracy all read through here, so that they decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch.fx

from amprewrite.graphs.fx.ops.tensor_hooks import restore_hooks
from amprewrite.graphs.fx.read.magnitudes import magnitudes
from amprewrite.ir.evidence.keep_high import Careful
from amprewrite.ir.evidence.ranges import Calibration
from amprewrite.ir.plans.follow_plan import match_region
from amprewrite.ir.plans.plan import ModelPlan, RegionPlan
from amprewrite.ir.policies.pad_policy import PadPolicy
from amprewrite.ir.policies.policy import Policy
from amprewrite.ir.program import Program
from amprewrite.passes.driver import read_program


def read_problem(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    policy: Policy,
    *,
    name: str,
    entry: str,
    training: bool,
    names: tuple[str, ...] = (),
    pad: PadPolicy | None = None,
    fold_masks: Literal["", "fixed", "any"] = "",
    scale_loss: bool = False,
    calibration: Calibration | None = None,
    careful: Careful | None = None,
    given: ModelPlan | None = None,
) -> Program:
    """The program of a captured graph, nothing decided yet.

    `inputs` are real tensors where the graph takes its weights as inputs. `given` is the plan to follow. The other arguments are
    the program's own fields.
    """
    restore_hooks(module)
    program = read_program(module, policy, name, entry, training, names, pad)
    program.fold_masks, program.scale_loss = fold_masks, scale_loss
    program.calibration, program.careful = calibration, careful
    program.magnitudes = magnitudes(program, inputs)
    if given is not None:
        plan = given

        def match(part: Program) -> RegionPlan:
            return match_region(plan, part)

        program.match_given, program.given = match, match(program)
    return program


__all__ = ["read_problem"]
