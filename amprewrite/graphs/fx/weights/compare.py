"""Compare a low copy with its weight: a slice of it, or all."""

from __future__ import annotations

import torch
from torch import Tensor

from amprewrite.graphs.fx.ops.pad_ops import slice_dims
from amprewrite.ir.plans.pad_plan import Layout

SAMPLE = 64
"""Number of elements compared of a vector. Of a larger tensor it is one slice of the first dimension."""
WORDS_FROM = 1 << 14
"""Elements from which on two copies are compared as 64-bit words: three to five times as fast, measured on a CPU."""


def sample(weight: Tensor, copy: Tensor, layout: Layout, turn: int) -> tuple[Tensor, Tensor]:
    """(slice of a weight, cast; the same slice of its copy). `turn` selects the slice."""
    if layout:
        copy = slice_dims(copy, layout)
    length = SAMPLE if weight.dim() == 1 else 1
    if weight.dim() and weight.numel() and weight.shape[0] > length:
        start = turn % (weight.shape[0] - length + 1)
        weight, copy = weight[start : start + length], copy[start : start + length]
    return weight.to(copy.dtype), copy


def differs(a: Tensor, b: Tensor) -> Tensor:
    """True if two tensors differ by more than a number that some processors flush to zero. NaN equals NaN."""
    near = (a.float() - b.float()).abs() <= torch.finfo(torch.float32).tiny
    return ~((a == b) | near | (a.isnan() & b.isnan())).all()


def same(a: Tensor, b: Tensor) -> bool:
    if a.numel() > WORDS_FROM and a.is_contiguous() and b.is_contiguous():
        whole_words = not any(int(count) % 4 for count in (a.numel(), a.storage_offset(), b.storage_offset()))
        if whole_words and torch.equal(a.view(-1).view(torch.int64), b.view(-1).view(torch.int64)):
            return True
    return torch.equal(a, b) or not bool(differs(a, b))


__all__ = ["differs", "same", "sample"]
