"""Detects a torch.amp.GradScaler that was left in the training loop, so that the loss is scaled twice.

1. If the scaler lets a step run, it is found among the callers of `step`, or by `found_inf`, an attribute that it sets on optimizers that
   skip steps by themselves.
2. If the scaler finds an overflow, which is likely with two scales, it does not call `step`. But it adds each optimizer that it handles to
   a dict, which its `update` replaces by a new dict. So we keep the dict at the end of each backward, and look into it at the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from amprewrite.runtime.training.loss_scale import LossScaleError
from amprewrite.runtime.training.optimizers.find_optimizers import instances_of


class GradScalers:
    """The enabled GradScalers of the process, and the optimizers that they have handled since the latest backward of one model."""

    def __init__(self) -> None:
        self._scalers: list[weakref.ref[GradScaler]] | None = None
        """The scalers that exist at the end of the first backward; None before. A loop must make its scaler earlier, to scale the loss."""
        self._handled: list[dict[int, Any]] = []
        """For each scaler its dict of optimizers, as of the latest backward. Keys are ids of optimizers."""

    def backward_ended(self) -> None:
        """Keep the dict of optimizers of each scaler. Call this at the end of a backward."""
        if self._scalers is None:
            self._scalers = [weakref.ref(each) for each in instances_of(GradScaler) if each.is_enabled()]
        if self._scalers:
            living = (scaler for ref in self._scalers if (scaler := ref()) is not None)
            self._handled = [scaler._per_optimizer_states for scaler in living]

    def refuse(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise LossScaleError if a scaler has handled one of `optimizers` since the latest backward."""
        handled, self._handled = self._handled, []
        if handled and any(id(optimizer) in each for each in handled for optimizer in optimizers):
            raise LossScaleError(_TWICE)


def refuse_grad_scaler(optimizer: Optimizer, frames: list[FrameType], kwargs: dict[str, Any]) -> None:
    """Raise LossScaleError if a GradScaler steps `optimizer`.

    `frames` are the stack frames of its `step` and of the callers, `kwargs` the keyword arguments of the step. The scaler sets `found_inf`
    on an optimizer that skips steps by itself. For other optimizers the scaler is found among the callers only.
    """
    scaler = hasattr(optimizer, "found_inf") or "grad_scaler" in kwargs
    for frame in frames:
        scaler = scaler or (frame.f_code is GradScaler.step.__code__ and frame.f_locals["self"].is_enabled())
    if scaler:
        raise LossScaleError(_TWICE)


_TWICE = (
    "a torch.amp.GradScaler steps this optimizer, but the rewritten model scales its own gradients, so they are "
    "scaled twice; remove scaler.scale, unscale_, step and update and call loss.backward() and optimizer.step(), "
    "or rewrite with loss_scale='none' to keep the scaler"
)
