"""Functions that a padded graph calls: changes of size, a weight cast that pads, batch norm on padded channels.

Padding a weight costs no more than its cast. If copies of weights are made outside the graph, the cast writes into the logical part of
memory that is zero elsewhere (`graphs/fx/weights`). In a graph it is a pad of a cast, which a compiler fuses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from amprewrite.graphs.fx.ops.scale_ops import cast_in, leaving
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.ir.plans.pad_plan import Layout, physical


# -- changes of size ---------------------------------------------------------------------------
def pad_dims(x: Tensor, layout: Layout) -> Tensor:
    """`x` with zeros after the logical part of every axis that `layout` pads."""
    opened, pads = _opened(x, layout, 0)
    amounts = [amount for logical, grown in reversed(pads) for amount in (0, grown - logical)]
    return _closed(F.pad(opened, amounts), x.dim(), layout)


def slice_dims(x: Tensor, layout: Layout, dense: bool = False) -> Tensor:
    """The logical part of an `x` that is padded as in `layout`: a view if possible, contiguous if `dense`."""
    found = _closed(logical_part(x, layout), x.dim(), layout)
    return found.clone() if dense and not found.is_contiguous() else found


def resize(x: Tensor, have: Layout, want: Layout, refresh: bool = False, dense: bool = False) -> Tensor:
    """`x`, padded as in `have`, with the padding of `want`. Padding common to both is kept, unless `refresh` asks for new zeros."""
    kept = () if refresh else tuple(entry for entry in have if entry in want)
    off = tuple(entry for entry in have if entry not in kept)
    on = tuple(entry for entry in want if entry not in kept)
    if off:
        x = slice_dims(x, off, dense and not on)
    return pad_dims(x, on) if on else x


def _opened(x: Tensor, layout: Layout, side: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """(`x` with every dim of `layout` split into its axes, (logical, physical) extents by dim).

    `side` 0 splits by logical extents, 1 by physical.
    """
    pads: list[list[tuple[int, int]]] = [[(0, 0)] for _ in range(x.dim())]
    for dim, factors in layout:
        pads[dim] = list(factors)
    for dim, factors in reversed(layout):
        if len(factors) > 1:
            x = x.unflatten(dim, [factor[side] for factor in factors])
    return x, [pair for pairs in pads for pair in pairs]


def logical_part(x: Tensor, layout: Layout) -> Tensor:
    """The logical part of a padded `x` with composed dims left split: always a view."""
    opened, pads = _opened(x, layout, 1)
    for dim, (logical, grown) in enumerate(pads):
        if logical != grown:
            opened = opened.narrow(dim, 0, logical)
    return opened


def _closed(x: Tensor, rank: int, layout: Layout) -> Tensor:
    """`x` with the dims joined again that `_opened` split."""
    for dim, factors in layout:
        if len(factors) > 1:
            x = x.flatten(dim, dim + len(factors) - 1)
    return x


# -- weights --------------------------------------------------------------------------------------
def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def empty_padded(like: Tensor, dtype: torch.dtype, layout: Layout) -> Tensor:
    """Memory for a copy of `like` as `dtype`, padded as in `layout`: zero in the padding, uninitialised if nothing is padded."""
    if not layout:
        return torch.empty_like(like, dtype=dtype)
    memory_format = torch.channels_last if _channels_last(like) else torch.contiguous_format
    return torch.zeros(physical(tuple(like.shape), layout), dtype=dtype, device=like.device).contiguous(memory_format=memory_format)


def copy_ends(w: Tensor, copy: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """(source, target) of a plain copy of `w` into `copy`, which is padded as in `layout`."""
    return (_opened(w, layout, 0)[0], logical_part(copy, layout)) if layout else (w, copy)


def pad_cast(w: Tensor, dtype: torch.dtype, layout: Layout, inverse: Tensor | None = None) -> Tensor:
    """`w.to(dtype)` padded as in `layout`. Its gradient has the logical shape and the dtype of `w`.

    `inverse` multiplies the gradient as in `cast_in`.
    """
    if not layout:
        return w.to(dtype) if inverse is None else cast_in(w, dtype, inverse)
    if not (w.requires_grad and torch.is_grad_enabled()):
        return pad_dims(w.to(dtype), layout)
    made: Tensor = _PadCast.apply(w, dtype, layout, inverse)
    return made


class _PadCast(torch.autograd.Function):
    """Autograd node of `pad_cast`. scale_ops.py says why `forward(ctx, ...)` is in the old style."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, dtype: torch.dtype, layout: Layout, inverse: Tensor | None) -> Tensor:
        ctx.dtype, ctx.layout, ctx.inverse, ctx.shape = w.dtype, layout, inverse, w.shape
        return pad_dims(w.to(dtype), layout)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        inner = logical_part(gradient, ctx.layout)
        inner = leaving(inner, ctx.inverse, ctx.dtype) if ctx.inverse is not None else inner.to(ctx.dtype)
        return inner.reshape(ctx.shape), None, None, None


# -- batch norm -------------------------------------------------------------------------------------
def batch_norm_padded(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.batch_norm` in training on padded channels. `weight` and `bias` are padded too, running statistics are not."""
    if running_mean is None or running_var is None:
        return F.batch_norm(x, None, None, weight, bias, training, momentum, eps)
    extra = x.shape[1] - running_mean.shape[0]
    mean, var = (F.pad(buffer.detach(), (0, extra)) for buffer in (running_mean, running_var))
    out = F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    with torch.no_grad():
        running_mean.copy_(mean.narrow(0, 0, running_mean.shape[0]))
        running_var.copy_(var.narrow(0, 0, running_var.shape[0]))
    return out


__all__ = [
    "batch_norm_padded", "copy_ends", "empty_padded", "logical_part", "pad_cast", "pad_dims", "resize", "slice_dims",
]  # fmt: skip
