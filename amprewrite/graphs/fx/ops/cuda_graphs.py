"""Steps that run inside a CUDA graph: a replay runs kernels where they were, and no Python.

So a loss scale that a graph moves cannot be a new tensor each time, and what a step found cannot be a Python attribute:

1. From the first recording on, the tensors of the state keep their places; new values are copied there.
2. What a step found waits in a mailbox, a 0-dim tensor: -1 if nothing waits. What comes next, a replay or eager code,
   moves the state by it and empties it, so both can take turns.
3. A forward takes a copy of the scale, since the place itself will be written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

EMPTY = -1.0
"""In the mailbox: nothing waits."""


def recording(device: torch.device) -> bool:
    """Whether what runs on `device` now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Recorded:
    """The state of `owner`, the tensors among its attributes called `names`, from the first recording on."""

    def __init__(self, owner: Any, names: tuple[str, ...], mailbox: Tensor) -> None:
        self.owner, self.names, self.mailbox = owner, names, mailbox

    def post(self, found: Tensor) -> None:
        """Leave what an optimizer found, beside what others of the same set found."""
        self.mailbox.clamp_(min=0).add_(found.to(self.mailbox.device, non_blocking=True))

    def settle(self, update: Callable[[Tensor], None]) -> None:
        """Move the state by what waits, if anything does; the device decides."""
        waits = self.mailbox >= 0
        with self.in_place(waits):
            update(self.mailbox.clamp(min=0))
        self.mailbox.fill_(EMPTY)

    @contextlib.contextmanager
    def in_place(self, where: Tensor | None = None) -> Iterator[None]:
        """Let the block replace tensors of the state, then write their values to the old places; with `where`, only where it holds."""
        places = {name: getattr(self.owner, name) for name in self.names}
        for name, place in places.items():
            setattr(self.owner, name, place.clone())
        yield
        for name, place in places.items():
            new = getattr(self.owner, name)
            place.copy_(new if where is None else torch.where(where, new, place))
            setattr(self.owner, name, place)


__all__ = ["EMPTY", "Recorded", "recording"]
