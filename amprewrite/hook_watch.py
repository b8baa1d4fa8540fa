"""Hooks on modules. Dynamo puts those of the parts into its graphs, but does not guard on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.modules.module as everywhere
from torch import nn
from torch.utils.hooks import RemovableHandle

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class HookWatch:
    """Tells, in no time where nothing happened, whether the hooks below a root have changed.

    Every registration takes a number from one counter of PyTorch's, so only a new number, or fewer hooks in the places that
    had any, is worth a look. The root's own hooks run outside the captured graphs and do not count.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._look()

    def changed(self) -> bool:
        """Whether a hook came or went since the last time this was asked."""
        if RemovableHandle.next_id == self._counter and [len(place) for place in self._places] == self._sizes:
            return False
        before = self._mark
        self._look()
        return self._mark != before

    def _look(self) -> None:
        self._counter = RemovableHandle.next_id
        self._places = [place for place in _places(self.root) if place]
        self._sizes = [len(place) for place in self._places]
        self._mark = [key for place in self._places for key in place]


def _places(root: nn.Module) -> Iterator[dict[int, Any]]:
    for module in root.modules():
        if module is not root:
            for kind in _KINDS:
                yield getattr(module, kind)


_GLOBAL: tuple[dict[int, Any], ...] = tuple(getattr(everywhere, f"_global{kind}") for kind in _KINDS)


def global_hooks() -> bool:
    """Whether hooks on all modules of the process are registered, as by FlopCounterMode."""
    return any(_GLOBAL)


@contextmanager
def global_hooks_aside() -> Iterator[None]:
    """No global hooks while a rewritten model runs: they were called for the model, and its parts are no calls any more."""
    kept = [dict(hooks) for hooks in _GLOBAL]
    for hooks in _GLOBAL:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(_GLOBAL, kept, strict=True):
            hooks.update(before)
