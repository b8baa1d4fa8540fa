"""Dispatch modes of the user, put aside for Dynamo and put back for the rewritten graphs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amprewrite.graphs.fx.uncaptured import not_selective, unselected
from amprewrite.runtime.compiler import dynamo
from amprewrite.torch_internals.dispatch import disable_dispatch_modes


class _Aside(threading.local):
    """Per thread: the user's dispatch modes, which Dynamo cannot run under.

    Every region puts them back; code that runs as written, between regions, runs without them.
    """

    def __init__(self) -> None:
        self.modes: list[Any] = []


suspend_dispatch_modes = _Aside()


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Take the user's dispatch modes off, for the regions to put back."""
    outer = suspend_dispatch_modes.modes
    suspend_dispatch_modes.modes = outer + dynamo.user_modes()
    try:
        with disable_dispatch_modes():
            yield
    finally:
        suspend_dispatch_modes.modes = outer


@contextmanager
def unselective() -> Iterator[None]:
    """Leave those of selective checkpoints aside: what the regions compute meanwhile is thrown away."""
    outer = suspend_dispatch_modes.modes
    suspend_dispatch_modes.modes = not_selective(outer)
    try:
        with unselected():
            yield
    finally:
        suspend_dispatch_modes.modes = outer
