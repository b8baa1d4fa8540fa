"""Call listeners after each step of any optimizer, by one global hook that is registered while there are listeners."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class StepListener(Protocol):
    def stepped(self, optimizer: Optimizer) -> None:
        """Called after `optimizer` has stepped."""


class _Listening:
    """The registered listeners, and the one hook that calls them, which exists while there are any."""

    def __init__(self) -> None:
        self._told: set[weakref.ref[StepListener]] = set()
        self._hook: Any = None

    def add(self, listener: StepListener) -> None:
        self._told.add(weakref.ref(listener, self._gone))
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(_after_any_step)

    def discard(self, listener: StepListener) -> None:
        self._gone(weakref.ref(listener))

    def _gone(self, ref: weakref.ref[StepListener]) -> None:
        self._told.discard(ref)
        if not self._told and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def stepped(self, optimizer: Optimizer) -> None:
        for ref in tuple(self._told):
            listener = ref()
            if listener is not None:
                listener.stepped(optimizer)


_LISTENING = _Listening()


@torch.compiler.disable  # type: ignore[misc]
def _after_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _LISTENING.stepped(optimizer)


def add_listener(listener: StepListener) -> None:
    """Call `listener.stepped` after every step of any optimizer from now on. The listener is held by a weak reference."""
    _LISTENING.add(listener)


def drop_listener(listener: StepListener) -> None:
    """Stop calling `listener` after steps; nothing happens if it is not registered."""
    _LISTENING.discard(listener)
