"""Functions that a padded graph calls: to add and remove padding, to cast and pad a weight, and to run batch norm on padded channels.

The *logical* sizes of a tensor exclude padding, its *physical* sizes include it. Padding a weight costs no more than its cast: the cast
writes into the logical part of memory that is zero elsewhere. In a compiled graph a cast and a pad do this, and the compiler fuses them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from amprewrite.graphs.fx.ops.scale_ops import cast_in, is_hooked, leaving, nan_if_infinite
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.ir.plans.pad_plan import Layout, physical
from amprewrite.torch_internals.dispatch import in_forward_mode, is_plain


# -- changes of size ---------------------------------------------------------------------------
def pad_dims(x: Tensor, layout: Layout) -> Tensor:
    """Return `x`, which is not padded yet, with zeros appended to every axis that `layout` pads."""
    opened, pads = _opened(x, layout, 0)
    amounts = [amount for logical, grown in reversed(pads) for amount in (0, grown - logical)]
    return _closed(F.pad(opened, amounts), layout)


def slice_dims(x: Tensor, layout: Layout, dense: bool = False) -> Tensor:
    """Return `x`, which is padded as in `layout`, without the padding: a view if possible, contiguous if `dense`."""
    found = _closed(logical_part(x, layout), layout)
    return found.clone() if dense and not found.is_contiguous() else found


def resize(x: Tensor, have: Layout, want: Layout, refresh: bool = False, dense: bool = False) -> Tensor:
    """Return `x` with its padding changed from the layout `have` to the layout `want`.

    Padding that is the same in both layouts stays, unless `refresh` asks for new zeros. With `dense`, the result is contiguous if
    padding is only removed.
    """
    kept = () if refresh else tuple(entry for entry in have if entry in want)
    off = tuple(entry for entry in have if entry not in kept)
    on = tuple(entry for entry in want if entry not in kept)
    if off:
        x = slice_dims(x, off, dense and not on)
    return pad_dims(x, on) if on else x


def _opened(x: Tensor, layout: Layout, side: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """Return (`x` with every composed dim of `layout` split into its axes, (logical, physical) size of each axis).

    A composed dim joins several axes, such as heads and the size of a head. `side` is 0 if `x` has logical (unpadded) sizes, 1 if it has
    physical (padded) sizes. An axis outside of `layout` gets the pair (0, 0).
    """
    pads: list[list[tuple[int, int]]] = [[(0, 0)] for _ in range(x.dim())]
    for dim, factors in layout:
        pads[dim] = list(factors)
    for dim, factors in reversed(layout):
        if len(factors) > 1:
            x = x.unflatten(dim, [factor[side] for factor in factors])
    return x, [pair for pairs in pads for pair in pairs]


def logical_part(x: Tensor, layout: Layout) -> Tensor:
    """Return a view of the padded `x` without its padding. A dim that joins several axes, such as heads and head size, is split."""
    opened, pads = _opened(x, layout, 1)
    for dim, (logical, grown) in enumerate(pads):
        if logical != grown:
            opened = opened.narrow(dim, 0, logical)
    return opened


def _closed(x: Tensor, layout: Layout) -> Tensor:
    """Undo `_opened`: return `x` with each group of split axes, such as heads and the size of a head, joined to one dim again."""
    for dim, factors in layout:
        if len(factors) > 1:
            x = x.flatten(dim, dim + len(factors) - 1)
    return x


# -- weights --------------------------------------------------------------------------------------
def _padded_copy(w: Tensor, dtype: torch.dtype, layout: Layout) -> Tensor:
    """Return `w.to(dtype)` padded as in `layout`. It is called only where autograd records nothing."""
    if not is_plain(w):  # tensor subclasses and traced tensors are padded by ops, because their memory cannot be written here
        return pad_dims(w.to(dtype), layout)
    last = w.dim() == 4 and not w.is_contiguous() and w.is_contiguous(memory_format=torch.channels_last)
    copy = torch.zeros(physical(tuple(w.shape), layout), dtype=dtype, device=w.device)
    copy = copy.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    logical_part(copy, layout).copy_(_opened(w, layout, 0)[0])
    return copy


def pad_cast(w: Tensor, dtype: torch.dtype, layout: Layout, inverse: Tensor | None = None, kept: Tensor | None = None) -> Tensor:
    """Return `w.to(dtype)` padded as in `layout`. The gradient of `w` has the shape and the dtype of `w`.

    `inverse`, a 0-dim fp32 tensor, multiplies this gradient; with None the gradient is only cast. `kept` is the result of an earlier call
    for `w`, or None. With `kept`, nothing is cast: the returned tensor shares the memory of `kept`.
    """
    if kept is not None and not (w.requires_grad and torch.is_grad_enabled()):
        return kept.detach()
    if not layout and kept is None:
        return w.to(dtype) if inverse is None else cast_in(w, dtype, inverse)
    if not (w.requires_grad and torch.is_grad_enabled()):
        return _padded_copy(w, dtype, layout)
    made: Tensor = _PadCast.apply(w, dtype, layout, inverse, kept)
    return made


def linked_copy(w: Tensor, dtype: torch.dtype, layout: Layout, copy: Tensor, inverse: Tensor | None = None) -> Tensor:
    """Return `copy`, which is `pad_cast(w, dtype, layout)`, with a new autograd node that sends the gradient to `w`.

    The result shares the memory of `copy`. In forward-mode AD, or if `w` is a tensor subclass, `w` is cast anew instead. If one `copy` is
    linked several times, autograd adds up the gradients of these results in the dtype of `w`. `inverse` multiplies the gradient.
    """
    return pad_cast(w, dtype, layout, inverse, copy.detach() if is_plain(w) and not in_forward_mode() else None)


class _PadCast(torch.autograd.Function):
    """Autograd node of `pad_cast`. scale_ops.py gives the reason for the old style of `forward(ctx, ...)`."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, dtype: torch.dtype, layout: Layout, inverse: Tensor | None, kept: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.layout, ctx.inverse, ctx.shape = w.dtype, layout, inverse, w.shape
        ctx.hooked = inverse is not None and is_hooked(w)
        return _padded_copy(w, dtype, layout) if kept is None else kept.detach()

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:  # type: ignore[override]
        # The forward of a model may compute gradients, for example of the bias of a convolution, and its loss may depend on them. A double
        # backward through these gradients passes None to this function if they do not depend on the weight.
        if gradient is None:
            return None, None, None, None, None
        inner = logical_part(gradient, ctx.layout)
        inner = leaving(inner, ctx.inverse, ctx.dtype) if ctx.inverse is not None else inner.to(ctx.dtype)
        inner = inner.reshape(ctx.shape)
        return nan_if_infinite(inner) if ctx.hooked else inner, None, None, None, None


# -- batch norm -------------------------------------------------------------------------------------
def batch_norm_padded(
    x: Tensor,
    channels: Layout,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return the result of `F.batch_norm` for `x`, whose channels are padded. It is used in training only, so callers pass `training=True`.

    `channels` is the padding of a 1-dim tensor with one number for each channel. `weight` and `bias` have this padding, too. `running_mean`
    and `running_var` are not padded; they are updated in place.
    """
    if running_mean is None or running_var is None:
        return F.batch_norm(x, None, None, weight, bias, training, momentum, eps)
    mean, var = (pad_dims(buffer.detach(), channels) for buffer in (running_mean, running_var))
    out = F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    with torch.no_grad():
        running_mean.copy_(slice_dims(mean, channels))
        running_var.copy_(slice_dims(var, channels))
    return out
