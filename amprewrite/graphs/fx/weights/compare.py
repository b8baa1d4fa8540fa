"""Compare a low copy of a weight with the weight: one slice, or all elements."""

from __future__ import annotations

import torch
from torch import Tensor

from amprewrite.graphs.fx.ops.pad_ops import slice_dims
from amprewrite.ir.plans.pad_plan import Layout

SAMPLE = 64
"""Number of elements of a 1-dim weight that a sample takes. Of a weight with more dims, a sample takes one index of the first dim."""
WORDS_FROM = 1 << 14
"""Number of elements above which two copies are compared as 64-bit words: three to five times as fast, measured on a CPU."""


def sample(weight: Tensor, copy: Tensor, layout: Layout, turn: int) -> tuple[Tensor, Tensor]:
    """Return (slice of `weight`, cast to the dtype of `copy`; the same slice of `copy`).

    `layout` is the padding of `copy`, which is left out. `turn`, an int from 0 on, selects the slice.
    """
    if layout:
        copy = slice_dims(copy, layout)
    length = SAMPLE if weight.dim() == 1 else 1
    if weight.dim() and weight.numel() and weight.shape[0] > length:
        start = turn % (weight.shape[0] - length + 1)
        weight, copy = weight[start : start + length], copy[start : start + length]
    return weight.to(copy.dtype), copy


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Return a 0-dim boolean tensor: True if `a` and `b` differ by more than the smallest normal fp32 number. NaN equals NaN.

    Smaller differences do not count, because some processors flush such numbers to zero.
    """
    near = (a.float() - b.float()).abs() <= torch.finfo(torch.float32).tiny
    return ~((a == b) | near | (a.isnan() & b.isnan())).all()


def same(a: Tensor, b: Tensor) -> bool:
    """True if `differs` finds no difference between `a` and `b`. The host waits for the device of the tensors."""
    if a.numel() > WORDS_FROM and a.is_contiguous() and b.is_contiguous():
        whole_words = not any(int(count) % 4 for count in (a.numel(), a.storage_offset(), b.storage_offset()))
        if whole_words and torch.equal(a.view(-1).view(torch.int64), b.view(-1).view(torch.int64)):
            return True
    return torch.equal(a, b) or not bool(differs(a, b))
