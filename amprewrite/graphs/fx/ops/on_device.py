"""Copy a 0-dim tensor, such as a loss scale, to another device.

The function has a file of its own, so that a module that reads a loss scale does not import the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(number: Tensor, device: torch.device) -> Tensor:
    """Return `number` on `device`: the same tensor if it is there already, otherwise a copy.

    The host waits only for a copy to a CPU, because it may read such a copy at once.
    """
    return number if number.device == device else number.to(device, non_blocking=device.type != "cpu")
