"""Move a number to the device of a value. A file of its own, so that reading a loss scale loads no kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(number: Tensor, device: torch.device) -> Tensor:
    """`number` on `device`. A copy to a CPU waits for the value, which the host may read at once."""
    return number if number.device == device else number.to(device, non_blocking=device.type != "cpu")


__all__ = ["on_device"]
