"""The stack of a running optimizer step: who calls the step shows whether a GradScaler, a wrapper or a subclass makes it.

Wrappers of optimizers are told whether a step was skipped, so that they do not advance the learning-rate schedule after it. accelerate's
AcceleratedOptimizer stores whether a GradScaler skipped the step in `_is_overflow`, and its schedulers and transformers' Trainer read this
attribute. Only this attribute is set.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.optim.optimizer import Optimizer

_ANSWER = "_is_overflow"
_MOST_WRAPPERS = 5
_MOST = 12
"""Largest number of stack frames that are searched for the step, and again for the callers of the step."""


def frames_of_step(optimizer: Optimizer) -> list[FrameType]:
    """Return the frame of torch.optim's wrapper around the `step` whose hook calls this function, and then the frames of its callers.

    Returns [] if another `step` of the same optimizer, such as a subclass's, called this step: its hooks have run already.
    """
    frame = hook = sys._getframe(1)
    code = getattr(type(optimizer).step, "__code__", None)
    for _ in range(_MOST):
        if frame.f_code is code or frame.f_back is None:
            break
        frame = frame.f_back
    else:
        frame = hook
    found = [frame]
    while frame.f_back is not None and len(found) <= _MOST:
        frame = frame.f_back
        if frame.f_code is found[0].f_code and frame.f_locals.get("self") is optimizer:
            return []
        found.append(frame)
    return found


def wrappers_among(frames: list[FrameType], optimizer: Optimizer) -> list[Any]:
    """Return the wrappers of `optimizer` whose `step` is running in one of `frames`, the innermost first."""
    found = []
    for frame in frames:
        each = frame.f_locals.get("self") if frame.f_code.co_name == "step" else optimizer
        if each is not optimizer and hasattr(each, _ANSWER) and _wraps(each, optimizer):
            found.append(each)
    return found


def _wraps(found: Any, optimizer: Optimizer) -> bool:
    for _ in range(_MOST_WRAPPERS):
        found = getattr(found, "optimizer", None)
        if found is optimizer:
            return True
    return False


def tell(wrapper: Any, skipped: bool) -> None:
    """Set the attribute by which `wrapper` knows whether the latest step was skipped."""
    setattr(wrapper, _ANSWER, skipped)
