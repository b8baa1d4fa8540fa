"""Tells wrappers of optimizers whether a step was skipped, so that they do not advance the learning-rate schedule after it.

accelerate's AcceleratedOptimizer stores whether a GradScaler skipped the step in `_is_overflow`, and its schedulers and transformers'
Trainer read this attribute. The wrapper's `step` calls the `step` of the torch optimizer, so the wrapper is found among the callers.
Only this attribute is set.
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
    """Yield the wrappers of `optimizer` whose `step` is running in `frame` or in one of its callers, the innermost first."""
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
    """Set the attribute by which `wrapper` knows whether the latest step was skipped."""
    setattr(wrapper, _ANSWER, skipped)
