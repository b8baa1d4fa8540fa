"""Suspend the user's dispatch modes while Dynamo works, and restore them around each rewritten graph."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amprewrite.graphs.fx.uncaptured import not_selective, unselected
from amprewrite.runtime.compiler import dynamo
from amprewrite.torch_internals.dispatch import disable_dispatch_modes


class _Aside(threading.local):
    """The user's dispatch modes that are suspended in this thread, because Dynamo cannot run under dispatch modes.

    Every rewritten graph restores them while it runs. Code that runs as written between graphs runs without them.
    """

    def __init__(self) -> None:
        self.modes: list[Any] = []


suspend_dispatch_modes = _Aside()


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Context manager that suspends the user's dispatch modes. Each rewritten graph restores them while it runs."""
    outer = suspend_dispatch_modes.modes
    suspend_dispatch_modes.modes = outer + dynamo.user_modes()
    try:
        with disable_dispatch_modes():
            yield
    finally:
        suspend_dispatch_modes.modes = outer


@contextmanager
def unselective() -> Iterator[None]:
    """Context manager for a trial run: disable the dispatch modes of selective checkpoints, which must not store the run's results."""
    outer = suspend_dispatch_modes.modes
    suspend_dispatch_modes.modes = not_selective(outer)
    try:
        with unselected():
            yield
    finally:
        suspend_dispatch_modes.modes = outer
