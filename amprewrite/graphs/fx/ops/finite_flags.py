"""Gradients that were checked for inf and NaN while they were made, so that the look at the end of a backward need not read them again.

Autograd keeps such a gradient as `p.grad` or adds it to one. A `p.grad` that lies in the storage we wrote, with the version it had
then, holds what was checked. Anything else (accumulated, changed by a hook) is looked at as ever. A step does not rely on it: by then
a write that PyTorch does not count (`.data`, a collective) may have come between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_MADE: dict[int, tuple[StorageWeakRef, int, Tensor]] = {}
"""By the address of a storage, which the weak reference keeps from being given to another: its version, and the flag."""
_LIMIT = [512]


def record_finite_flag(gradients: Sequence[Tensor], flag: Tensor) -> None:
    """Remember that `flag` tells whether the `gradients`, each with a storage of its own, are finite."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    for gradient in gradients:
        storage = StorageWeakRef(gradient.untyped_storage())
        _MADE[storage.cdata] = (storage, gradient._version, flag)
    if len(_MADE) > _LIMIT[0]:
        for address in [address for address, (storage, _, _) in list(_MADE.items()) if storage.expired()]:
            del _MADE[address]
        _LIMIT[0] = max(512, 2 * len(_MADE))


def finite_flags(gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(flags, gradients that are still to be looked at).

    A flag tells of all that was checked with a gradient, of what was added to another one or changed by a hook as well.
    """
    if not _MADE:
        return [], list(gradients)
    left: list[Tensor] = []
    flags: dict[int, Tensor] = {}
    for gradient in gradients:
        made = _MADE.get(gradient.untyped_storage()._cdata)
        if made is None or made[1] != gradient._version:
            left.append(gradient)
        else:
            flags[id(made[2])] = made[2]
    return list(flags.values()), left


__all__ = ["finite_flags", "record_finite_flag"]
