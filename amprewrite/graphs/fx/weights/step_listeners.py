"""Call registered methods before or after each step of any optimizer. The global hook for this exists only while methods are registered."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

_STEP = "Optimizer.profile_hook_step.<locals>.wrapper"
"""Qualified name of the function in which PyTorch wraps the `step` of every optimizer class. It runs the hooks."""
Listener = Callable[[Optimizer], None]


class StepListeners:
    """Calls bound methods at each step of any optimizer. `register` is `register_optimizer_step_pre_hook` or `..._post_hook` of PyTorch."""

    def __init__(self, register: Callable[[Any], Any]) -> None:
        self._register, self._hook = register, None
        self._methods: dict[weakref.WeakMethod[Listener], None] = {}

    def add(self, method: Listener) -> None:
        """Call `method` at every optimizer step from now on. Its object is held by a weak reference."""
        self._methods[weakref.WeakMethod(method, self._gone)] = None
        if self._hook is None:
            self._hook = self._register(torch.compiler.disable(self._call))

    def discard(self, method: Listener) -> None:
        """Stop calling `method`; nothing happens if it was not added."""
        self._gone(weakref.WeakMethod(method))

    def _gone(self, method: weakref.WeakMethod[Listener]) -> None:
        self._methods.pop(method, None)
        if not self._methods and self._hook is not None and not in_a_step():
            self._hook.remove()
            self._hook = None

    def _call(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for ref in tuple(self._methods):
            method = ref()
            if method is not None:
                method(optimizer)


def in_a_step() -> bool:
    """True if any thread is inside the `step` of an optimizer. PyTorch then iterates over the step hooks, so no hook may be removed."""
    for frame in sys._current_frames().values():
        at = frame
        while at is not None:
            if at.f_code.co_qualname == _STEP:
                return True
            at = at.f_back  # type: ignore[assignment]
    return False


AFTER_STEPS = StepListeners(register_optimizer_step_post_hook)
