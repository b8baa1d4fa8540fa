"""Copy a 0-dim tensor, such as a loss scale, to another device, and take the part of a distributed tensor that this rank holds.

The functions have a file of their own, so that a module that calls them does not import the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(number: Tensor, device: torch.device) -> Tensor:
    """Return `number` on `device`: the same tensor if it is there already, otherwise a copy.

    The host waits only for a copy to a CPU, because it may read such a copy immediately.
    """
    return number if number.device == device else number.to(device, non_blocking=device.type != "cpu")


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank holds, without its gradient history; any other tensor is returned unchanged."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]
