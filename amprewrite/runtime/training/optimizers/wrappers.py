"""Wrappers of optimizers that ask whether a step was skipped, and hold the learning-rate schedule if it was.

accelerate's AcceleratedOptimizer keeps the answer of a GradScaler in `_is_overflow`, which its schedulers and transformers' Trainer
read. It calls the torch optimizer's `step` from its own, so it is found among the callers. Nothing of it is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.optim.optimizer import Optimizer

_ANSWER = "_is_overflow"
_FRAMES = 12
_MOST_WRAPPERS = 5


def wrappers_above(frame: FrameType | None, optimizer: Optimizer) -> Iterator[Any]:
    """The wrappers of `optimizer` whose `step` is running, the innermost first."""
    for _ in range(_FRAMES):
        if frame is None:
            return
        if frame.f_code.co_name == "step":
            found = frame.f_locals.get("self")
            if found is not None and found is not optimizer and hasattr(found, _ANSWER) and _wraps(found, optimizer):
                yield found
        frame = frame.f_back


def _wraps(found: Any, optimizer: Optimizer) -> bool:
    for _ in range(_MOST_WRAPPERS):
        found = getattr(found, "optimizer", None)
        if found is optimizer:
            return True
    return False


def tell(wrapper: Any, skipped: bool) -> None:
    """Let a wrapper know how the step went."""
    setattr(wrapper, _ANSWER, skipped)


__all__ = ["tell", "wrappers_above"]
