"""Move a loss scale between devices, keep its state usable inside a CUDA graph, and take a rank's part of a distributed tensor.

The functions have a file of their own, so that a module that calls them imports no kernels: the file imports only torch.

A replay of a CUDA graph runs kernels on fixed addresses, and runs no Python. So a loss scale that the graph updates cannot be a new tensor
at each step, and the overflow flag of a step cannot be a Python attribute:

1. From the first recording on, the tensors of the state keep their addresses. New values are copied to these addresses.
2. The overflow flag of a step waits in a mailbox, a 0-dim tensor that holds -1 while it is empty. The next step updates the state by this
   flag and empties the mailbox. Replayed and eager steps do the same, so that they can alternate.
3. A forward copies the scale, because a later step overwrites the memory of the scale.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def on_device(number: Tensor, device: torch.device) -> Tensor:
    """Return `number` on `device`: the same tensor if it is there already, otherwise a copy.

    The host waits only for a copy to a CPU, because code on the host may read this copy immediately.
    """
    return number if number.device == device else number.to(device, non_blocking=device.type != "cpu")


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank holds, without its gradient history; any other tensor is returned unchanged."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]


EMPTY = -1.0
"""Number in a mailbox (the tensor in which the overflow flag of a step waits) while no flag waits there."""


def recording(device: torch.device) -> bool:
    """True if `device` is a CUDA device and the current stream records its kernels in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Recorded:
    """Updates the tensors in the attributes `names` of a loss scale (`owner`) in place, because recorded CUDA graphs need fixed addresses.

    `mailbox`, a 0-dim fp32 tensor, holds the overflow flag of a step until `apply_pending` uses the flag. Without a flag it holds -1.
    """

    def __init__(self, owner: Any, names: tuple[str, ...], mailbox: Tensor) -> None:
        self.owner, self.names, self.mailbox = owner, names, mailbox

    def post(self, found: Tensor) -> None:
        """Add `found`, an optimizer's overflow flag (above 0 if a gradient is not finite), to the mailbox. An empty mailbox counts as 0."""
        self.mailbox.clamp_(min=0).add_(found.to(self.mailbox.device, non_blocking=True))

    def apply_pending(self, update: Callable[[Tensor], None]) -> None:
        """Call `update` with the overflow flag that waits in the tensor `mailbox`, then mark the mailbox as empty.

        If no flag waits, `update` is called with 0, and the tensors of the loss scale keep their old values. The device makes this test, so
        the host does not wait.
        """
        waits = self.mailbox >= 0
        with self.in_place(waits):
            update(self.mailbox.clamp(min=0))
        self.mailbox.fill_(EMPTY)

    @contextlib.contextmanager
    def in_place(self, where: Tensor | None = None) -> Iterator[None]:
        """Context manager in which the caller may assign new tensors to the attributes `names`.

        At its end, the values of the new tensors are copied to the old addresses, and the old tensors are assigned again.
        With `where`, a 0-dim boolean tensor, the values are copied only if `where` is true.
        """
        places = {name: getattr(self.owner, name) for name in self.names}
        for name, place in places.items():
            setattr(self.owner, name, place.clone())
        try:
            yield
            for name, place in places.items():
                new = getattr(self.owner, name)
                place.copy_(new if where is None else torch.where(where, new, place))
        finally:
            for name, place in places.items():
                setattr(self.owner, name, place)
