"""Skip the optimizer steps that overflowed, without wrapping the optimizer.

A gate belongs to a rewritten model.  It hangs on the step hooks that torch.optim offers; the optimizer object, its class
and its `step` stay what they were.  Before each step:

1. Look for inf and NaN in the gradients of all the optimizer's parameters, as torch.amp.GradScaler does
   (torch/amp/grad_scaler.py), with the same multi-tensor kernel; agree with the ranks that hold other shards.
2. Tell the loss scale, which moves once per set of steps (loss_scale.py).
3. A fused optimizer gets the answer as its `found_inf` tensor and skips by itself: no host sync.
4. For any other optimizer read the answer.  To skip, step a stand-in: the hook may replace the arguments of
   `Optimizer.step`, `self` among them, so the class's own code runs once over no parameter groups and a throw-away state.
   Parameters, state, step counts and gradients of the real one stay as they are, and its scheduler sees a step.
5. With a closure, evaluate it first, check, and let the step find the loss ready; LBFGS, which evaluates again and
   again, is rewound if a later evaluation overflows.

Optimizers that nobody attached are found by one hook that PyTorch keeps for all optimizers: it waits, and when an optimizer
steps that owns a parameter of a live gate's model, attaches the gate to it.  It changes nothing for any other optimizer, and
without it a copied or unpickled optimizer, or one that a trainer made, would step on infinities in silence.
`StepGate(adopt=False)` does without: then the first backward that nothing guards warns.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from amprewrite.errors import AmpRewriteWarning, PolicyError
from amprewrite.loss_scale import DEFAULT_FLOOR, LossScale, LossScaleError
from amprewrite.step_guard import StepGuard, guard_of

MAX_CONSECUTIVE_SKIPS = 50
"""More than the 48 halvings from the largest start, 2**32 (Megatron), to the default floor, 2**-14... plus two."""
