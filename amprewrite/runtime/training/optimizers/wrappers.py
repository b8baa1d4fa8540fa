"""Tells wrappers of optimizers whether a step was skipped, so that they do not advance the learning-rate schedule after it.

accelerate's AcceleratedOptimizer stores whether a GradScaler skipped the step in `_is_overflow`, and its schedulers and transformers'
Trainer read this attribute. The wrapper's `step` calls the `step` of the torch optimizer, so the wrapper is found among the callers.
Only this attribute is set.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from torch.optim.optimizer import Optimizer

_ANSWER = "_is_overflow"
_MOST_WRAPPERS = 5


def wrappers_among(frames: list[FrameType], optimizer: Optimizer) -> list[Any]:
    """Return the wrappers of `optimizer` whose `step` is running in one of `frames`, the innermost first."""
    callers = [frame.f_locals.get("self") for frame in frames if frame.f_code.co_name == "step"]
    return [each for each in callers if each is not optimizer and hasattr(each, _ANSWER) and _wraps(each, optimizer)]


def _wraps(found: Any, optimizer: Optimizer) -> bool:
    for _ in range(_MOST_WRAPPERS):
        found = getattr(found, "optimizer", None)
        if found is optimizer:
            return True
    return False


def tell(wrapper: Any, skipped: bool) -> None:
    """Set the attribute by which `wrapper` knows whether the latest step was skipped."""
    setattr(wrapper, _ANSWER, skipped)
