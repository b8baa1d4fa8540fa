"""A torch.amp.GradScaler that was left in the loop: two scales on one loss.

1. A scaler that lets a step through is seen as its caller, or by what it leaves on optimizers that skip by themselves.
2. A scaler that finds an overflow, which two scales make likely, does not call `step` at all. It notes the optimizers that it handles
   in a dict, which its `update` replaces. The dict of the latest backward is held, so the next backward finds the optimizer in it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from amprewrite.runtime.training.loss_scale import LossScaleError

_FRAMES = 12
"""How far up the stack to look for who called `step`."""


class GradScalers:
    """The scalers of the process, and what they have handled since the latest backward of one model."""

    def __init__(self) -> None:
        self._scalers: list[weakref.ref[GradScaler]] | None = None
        """The scalers at the first backward: a loop makes its scaler before, to scale the loss."""
        self._handled: list[dict[int, Any]] = []

    def backward_ended(self) -> None:
        if self._scalers is None:
            found = (each for each in gc.get_objects() if issubclass(type(each), GradScaler))
            self._scalers = [weakref.ref(each) for each in found if each.is_enabled()]
        if self._scalers:
            living = (scaler for ref in self._scalers if (scaler := ref()) is not None)
            self._handled = [scaler._per_optimizer_states for scaler in living]

    def refuse(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise LossScaleError if a scaler has handled one of these optimizers since the latest backward."""
        handled, self._handled = self._handled, []
        if any(id(optimizer) in each for each in handled for optimizer in optimizers):
            raise LossScaleError(_TWICE)


def refuse_grad_scaler(optimizer: Optimizer, caller: FrameType, kwargs: dict[str, Any]) -> None:
    """Raise LossScaleError if a GradScaler steps this optimizer.

    It leaves `found_inf` on optimizers that skip by themselves; for the others it is only visible as a caller.
    """
    scaler = hasattr(optimizer, "found_inf") or "grad_scaler" in kwargs
    frame: FrameType | None = caller
    for _ in range(_FRAMES):
        if scaler or frame is None:
            break
        scaler = frame.f_code is GradScaler.step.__code__ and frame.f_locals["self"].is_enabled()
        frame = frame.f_back
    if scaler:
        raise LossScaleError(_TWICE)


_TWICE = (
    "a torch.amp.GradScaler steps this optimizer, but the rewritten model scales its own gradients, so they are "
    "scaled twice; remove scaler.scale, unscale_, step and update and call loss.backward() and optimizer.step(), "
    "or rewrite with loss_scale='none' to keep the scaler"
)

__all__ = ["GradScalers", "refuse_grad_scaler"]
