"""Gradients that were checked for inf and NaN while they were made, so that a step guard need not read them again.

Autograd keeps such a gradient as `p.grad` or adds it to one. PyTorch counts every write to a tensor but those through
`.data`; so a `p.grad` that lies in the storage we wrote, with the version it had then, holds what was checked. Anything
else (accumulated, clipped, averaged over ranks, put there by hand) is looked at as ever. Collectives write without being
counted, so once torch.distributed is running nothing is vouched for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(eq=False)
class Checked:
    """Gradients checked together."""

    flag: Tensor
    """0-dim fp32: above 0 if one of them is not finite."""
    count: int


_MADE: dict[int, tuple[StorageWeakRef, int, Checked]] = {}
"""By the address of a storage, which the weak reference keeps from being given to another."""
_LIMIT = [512]


def record_finite_flag(gradients: Sequence[Tensor], flag: Tensor) -> None:
    """Remember that `flag` tells whether the `gradients`, each with a storage of its own, are finite."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return
    batch = Checked(flag, len(gradients))
    for gradient in gradients:
        storage = StorageWeakRef(gradient.untyped_storage())
        _MADE[storage.cdata] = (storage, gradient._version, batch)
    if len(_MADE) > _LIMIT[0]:
        for address in [address for address, (storage, _, _) in list(_MADE.items()) if storage.expired()]:
            del _MADE[address]
        _LIMIT[0] = max(512, 2 * len(_MADE))


def finite_flags(gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(flags, gradients that are still to be looked at).

    One flag covers a batch of gradients. It is used only if the whole batch is here; otherwise its gradients are looked at again.
    """
    if not _MADE:
        return [], list(gradients)
    left: list[Tensor] = []
    found: dict[Checked, list[Tensor]] = {}
    for gradient in gradients:
        made = _MADE.get(gradient.untyped_storage()._cdata)
        if made is None or made[1] != gradient._version:
            left.append(gradient)
        else:
            found.setdefault(made[2], []).append(gradient)
    flags = []
    for batch, members in found.items():
        if len(members) == batch.count:
            flags.append(batch.flag)
        else:
            left += members
    return flags, left


__all__ = ["finite_flags", "record_finite_flag"]
