"""Gradients that were checked for inf and NaN when they were made, so that the check after a backward need not read them again.

Autograd keeps such a gradient as `p.grad`, or adds it to an existing one. A `p.grad` in the storage that we wrote, with the version that it
had then, holds the checked values. Any other gradient (accumulated, changed by a hook) is checked as usual. An optimizer step does not rely
on these flags: a write that PyTorch does not count (`.data`, a collective) may have happened since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from amprewrite.torch_internals.autograd import current_backward

_LATEST = 4
"""Number of backward passes that are remembered. A backward inside another one ends before it; threads run theirs in parallel."""
_MADE: OrderedDict[int, dict[int, tuple[StorageWeakRef, int, Tensor]]] = OrderedDict()
"""By autograd's number of a backward and the address of a storage: (weak reference, version, flag).

The weak reference keeps the address from being reused for another storage.
"""


def record_finite_flag(gradients: Sequence[Tensor], flag: Tensor) -> None:
    """Remember that `flag` says if all `gradients` are finite. Each has a storage of its own."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    number = current_backward()
    made = _MADE.get(number)
    if made is None or number < 0:  # outside of any backward
        made = _MADE[number] = {}
        if len(_MADE) > _LATEST:
            _MADE.popitem(last=False)
    for gradient in gradients:
        storage = StorageWeakRef(gradient.untyped_storage())
        made[storage.cdata] = (storage, gradient._version, flag)


def finite_flags(gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(flags, gradients that still have to be checked).

    A flag covers all gradients that were checked together, including gradients that were accumulated or changed by a hook since.
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


__all__ = ["finite_flags", "record_finite_flag"]
