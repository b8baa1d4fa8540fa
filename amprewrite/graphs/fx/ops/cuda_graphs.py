"""Training steps inside a CUDA graph: a replay runs kernels on fixed addresses, and no Python.

So a loss scale that the graph updates cannot be a new tensor each time, and the result of a step cannot be a Python attribute:

1. From the first recording on, the tensors of the state keep their addresses. New values are copied there.
2. The result of a step waits in a mailbox, a 0-dim tensor: -1 if it is empty. The next replay or eager step updates the state by it and
   empties it, so that both can take turns.
3. A forward copies the scale, since its memory will be overwritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

EMPTY = -1.0
"""Value of an empty mailbox."""


def recording(device: torch.device) -> bool:
    """True if kernels on `device` are now recorded in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Recorded:
    """State of `owner` from the first recording on: the tensors among its attributes that `names` lists."""

    def __init__(self, owner: Any, names: tuple[str, ...], mailbox: Tensor) -> None:
        self.owner, self.names, self.mailbox = owner, names, mailbox

    def post(self, found: Tensor) -> None:
        """Add the non-finite flag `found` of an optimizer to the mailbox. Flags of several optimizers add up."""
        self.mailbox.clamp_(min=0).add_(found.to(self.mailbox.device, non_blocking=True))

    def apply_pending(self, update: Callable[[Tensor], None]) -> None:
        """Update the state by the flag in the mailbox, if there is one. The device decides, without a host sync."""
        waits = self.mailbox >= 0
        with self.in_place(waits):
            update(self.mailbox.clamp(min=0))
        self.mailbox.fill_(EMPTY)

    @contextlib.contextmanager
    def in_place(self, where: Tensor | None = None) -> Iterator[None]:
        """Let the block replace tensors of the state, then write their values to the old addresses.

        With `where`, write only if it is true.
        """
        places = {name: getattr(self.owner, name) for name in self.names}
        for name, place in places.items():
            setattr(self.owner, name, place.clone())
        yield
        for name, place in places.items():
            new = getattr(self.owner, name)
            place.copy_(new if where is None else torch.where(where, new, place))
            setattr(self.owner, name, place)


__all__ = ["EMPTY", "Recorded", "recording"]
