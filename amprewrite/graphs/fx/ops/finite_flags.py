"""Gradients that were checked for inf and NaN while they were made, so that the look at the end of a backward need not read them again.

Autograd keeps such a gradient as `p.grad` or adds it to one. A `p.grad` that lies in the storage we wrote, with the version it had
then, holds what was checked. Anything else (accumulated, changed by a hook) is looked at as ever. A step does not rely on it: by then
a write that PyTorch does not count (`.data`, a collective) may have come between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from amprewrite.torch_internals.autograd import current_backward

_LATEST = 4
"""Backwards that are remembered: one that runs inside of another ends before it, and threads run theirs side by side."""
_MADE: OrderedDict[int, dict[int, tuple[StorageWeakRef, int, Tensor]]] = OrderedDict()
"""By autograd's number for a backward: by the address of a storage, which the weak reference keeps from being given to another, its
version and the flag."""


def record_finite_flag(gradients: Sequence[Tensor], flag: Tensor) -> None:
    """Remember that `flag` tells whether the `gradients`, each with a storage of its own, are finite."""
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
    """(flags, gradients that are still to be looked at).

    A flag tells of all that was checked with a gradient, of what was added to another one or changed by a hook as well.
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
