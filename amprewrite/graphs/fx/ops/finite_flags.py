"""Remember which gradients were checked for inf and NaN when they were made, so that the check after a backward need not read them again.

Autograd stores such a gradient as `p.grad`, or adds it to an existing `p.grad`. If `p.grad` has the recorded storage and the recorded
version counter, it holds the checked values. Any other gradient (accumulated, changed by a hook) is checked as usual. An optimizer step
does not rely on these flags, because a write that PyTorch does not count (`.data`, a collective) may have changed the gradient since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from amprewrite.torch_internals.autograd import current_backward

_LATEST = 4
"""Number of backward passes whose gradients are remembered.

More than one is needed, because a backward may run inside another backward, and threads run backward passes in parallel.
"""
_MADE: OrderedDict[int, dict[int, tuple[StorageWeakRef, int, Tensor]]] = OrderedDict()
"""The checked gradients of each backward, by autograd's number of the backward.

Each gradient is stored as (weak reference to its storage, its version counter, flag), by the address of its storage. The weak reference
keeps the address from being reused for another storage.
"""


def record_finite_flag(gradients: Sequence[Tensor], flag: Tensor) -> None:
    """Record that `flag`, a 0-dim fp32 tensor, is 0 if and only if all `gradients` are finite. Each gradient must have its own storage.

    Nothing is recorded while torch.distributed is initialised.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    number = current_backward()
    made = _MADE.get(number)
    if made is None or number < 0:  # -1 stands for all code outside of a backward: drop the entries of earlier code
        made = _MADE[number] = {}
        if len(_MADE) > _LATEST:
            _MADE.popitem(last=False)
    for gradient in gradients:
        storage = StorageWeakRef(gradient.untyped_storage())
        made[storage.cdata] = (storage, gradient._version, flag)


def finite_flags(gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return (flags of the gradients that were checked when they were made, gradients that still have to be checked).

    Gradients that were checked together have one flag. It is above 0 if any of them was not finite, even if a hook or an accumulation has
    changed that gradient since.
    """
    backwards = tuple(reversed(_MADE.values()))
    if not backwards:
        return [], list(gradients)
    left: list[Tensor] = []
    flags: dict[int, Tensor] = {}
    for gradient in gradients:
        address, version = gradient.untyped_storage()._cdata, gradient._version
        for made in backwards:
            entry = made.get(address)
            if entry is not None and entry[1] == version:
                flags[id(entry[2])] = entry[2]
                break
        else:
            left.append(gradient)
    return list(flags.values()), left
