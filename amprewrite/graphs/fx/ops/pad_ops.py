"""What a padded graph calls: changes of size, a weight cast that pads, batch norm on padded channels.

A weight costs nothing beside its cast: the cast writes into the logical part of a buffer whose rest is zero. Eager graphs take
the buffer from a pool and give it back by dropping it: while a forward or backward still holds it, its storage has further
owners, and a new one is made. So from the second step on a padded weight runs one kernel, as an unpadded one does.
Under a compiler the same is written as a pad of a cast, which it fuses.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parameter import Parameter

from amprewrite.graphs.fx.ops.fused_copy import copy_many, is_plain
from amprewrite.graphs.fx.ops.scale_ops import cast_in, leaving, leaving_many
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.ir.plans.pad_plan import Layout, physical


# -- changes of size ---------------------------------------------------------------------------
def pad_dims(x: Tensor, layout: Layout) -> Tensor:
    """`x` with zeros after the logical part of every axis that `layout` pads."""
    opened, pads = _opened(x, layout, 0)
    amounts = [amount for logical, grown in reversed(pads) for amount in (0, grown - logical)]
    return _closed(F.pad(opened, amounts), x.dim(), layout)


def slice_dims(x: Tensor, layout: Layout, dense: bool = False) -> Tensor:
    """The logical part of an `x` that is padded as `layout` says: a view where that can be, a copy if `dense`."""
    found = _closed(_narrowed(x, layout), x.dim(), layout)
    return found.clone() if dense and not found.is_contiguous() else found


def resize(x: Tensor, have: Layout, want: Layout, refresh: bool = False, dense: bool = False) -> Tensor:
    """`x`, padded as `have`, padded as `want`. Padding on both sides is kept as it is, unless `refresh` asks for zeros."""
    kept = () if refresh else tuple(entry for entry in have if entry in want)
    off = tuple(entry for entry in have if entry not in kept)
    on = tuple(entry for entry in want if entry not in kept)
    if off:
        x = slice_dims(x, off, dense and not on)
    return pad_dims(x, on) if on else x


def _opened(x: Tensor, layout: Layout, side: int) -> tuple[Tensor, list[tuple[int, int]]]:
    """`x` with every dim of `layout` split into its axes, by their logical (0) or physical (1) extents; (logical, physical) by dim."""
    pads: list[list[tuple[int, int]]] = [[(0, 0)] for _ in range(x.dim())]
    for dim, factors in layout:
        pads[dim] = list(factors)
    for dim, factors in reversed(layout):
        if len(factors) > 1:
            x = x.unflatten(dim, [factor[side] for factor in factors])
    return x, [pair for pairs in pads for pair in pairs]


def _narrowed(x: Tensor, layout: Layout) -> Tensor:
    """The logical part, with composed dims left open: always a view."""
    opened, pads = _opened(x, layout, 1)
    for dim, (logical, grown) in enumerate(pads):
        if logical != grown:
            opened = opened.narrow(dim, 0, logical)
    return opened


def _closed(x: Tensor, rank: int, layout: Layout) -> Tensor:
    """Composed dims joined again."""
    for dim, factors in layout:
        if len(factors) > 1:
            x = x.flatten(dim, dim + len(factors) - 1)
    return x


# -- weights --------------------------------------------------------------------------------------
class BufferPool:
    """Zero-filled buffers of one graph, each lent for as long as anybody holds its storage."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], deque[Tensor]] = defaultdict(deque)
        self.made = 0
        """Buffers allocated so far."""

    def take(self, like: Tensor, dtype: torch.dtype, layout: Layout) -> Tensor:
        """A buffer for `like` padded as `layout`; all zero outside the logical part."""
        stream = torch.cuda.current_stream(like.device).stream_id if like.is_cuda else 0
        shape = physical(tuple(like.shape), layout)
        found = self._buffers[shape, layout, dtype, like.device, stream, _channels_last(like)]
        for _ in range(len(found)):
            buffer = found[0]
            found.rotate(-1)
            if held_by_nobody_else(buffer):
                return buffer
        with torch.inference_mode(False):
            buffer = empty_padded(like, dtype, layout)
        found.append(buffer)
        self.made += 1
        return buffer


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def empty_padded(like: Tensor, dtype: torch.dtype, layout: Layout) -> Tensor:
    """Memory for `like` as `dtype`, padded as `layout`: zero where that pads, not written yet elsewhere."""
    if not layout:
        return torch.empty_like(like, dtype=dtype)
    memory_format = torch.channels_last if _channels_last(like) else torch.contiguous_format
    return torch.zeros(physical(tuple(like.shape), layout), dtype=dtype, device=like.device).contiguous(memory_format=memory_format)


def fits(copy: Tensor, like: Tensor, layout: Layout) -> bool:
    """Whether `copy` has the device, sizes and strides of a new copy of `like` that is padded as `layout`."""
    if copy.get_device() != like.get_device():
        return False
    if not layout:
        return copy.shape == like.shape and copy.stride() == like.stride()
    return tuple(copy.shape) == physical(tuple(like.shape), layout) and _channels_last(copy) == _channels_last(like)


def copy_ends(w: Tensor, copy: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """What is read and what is written where `w` is copied into `copy`, which is padded as `layout`."""
    return (_opened(w, layout, 0)[0], _narrowed(copy, layout)) if layout else (w, copy)


def held_by_nobody_else(buffer: Tensor) -> bool:
    """Whether no view, no autograd graph and no other tensor shares the storage."""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) <= _ALONE


def _alone() -> int:
    """What PyTorch counts for a storage that one tensor owns: the tensor, and the Python object that asks."""
    alone = torch.zeros(1)
    return int(torch._C._storage_Use_Count(alone.untyped_storage()._cdata))


_ALONE = _alone()


def pad_cast(w: Tensor, dtype: torch.dtype, layout: Layout, inverse: Tensor | None = None, pool: BufferPool | None = None) -> Tensor:
    """`w.to(dtype)` padded as `layout`; its gradient comes back in logical shape and in the dtype of `w`.

    `inverse` multiplies the gradient as in `cast_in`. With a `pool` it is one copy kernel forward and one backward.
    """
    if not layout:
        return w.to(dtype) if inverse is None else cast_in(w, dtype, inverse)
    if not (w.requires_grad and torch.is_grad_enabled()):
        return _padded_copy(w, dtype, layout, pool)
    made: Tensor = _PadCast.apply(w, dtype, layout, inverse, pool)
    return made


def pad_cast_many(
    weights: Sequence[Tensor], dtype: torch.dtype, layouts: Sequence[Layout], inverse: Tensor | None, pool: BufferPool
) -> tuple[Tensor, ...]:
    """`pad_cast` of several weights through one autograd node; where a kernel for it pays, one launch writes all of them.

    A weight that takes no part in the loss keeps grad None.
    """
    if not torch.is_grad_enabled() or not any(w.requires_grad for w in weights):
        return _padded_copies(weights, dtype, layouts, pool)
    made: tuple[Tensor, ...] = _PadCastMany.apply(dtype, tuple(layouts), inverse, pool, *weights)
    return made


def _padded_copies(weights: Sequence[Tensor], dtype: torch.dtype, layouts: Sequence[Layout], pool: BufferPool) -> tuple[Tensor, ...]:
    if not all(is_plain(w) and not w.is_inference() for w in weights):
        return tuple(_padded_copy(w, dtype, layout, pool) for w, layout in zip(weights, layouts, strict=True))
    # detached one by one: the pool lends a buffer again unless another tensor shares its storage
    buffers = [pool.take(w, dtype, layout).detach() for w, layout in zip(weights, layouts, strict=True)]
    opened = [_opened(w, layout, 0)[0] for w, layout in zip(weights, layouts, strict=True)]
    copy_many(opened, [_narrowed(buffer, layout) for buffer, layout in zip(buffers, layouts, strict=True)])
    return tuple(buffers)


def _padded_copy(w: Tensor, dtype: torch.dtype, layout: Layout, pool: BufferPool | None) -> Tensor:
    if pool is None or type(w) not in (Tensor, Parameter) or w.is_inference():
        return pad_dims(w.to(dtype), layout)
    buffer = pool.take(w, dtype, layout)
    with torch.no_grad():
        _narrowed(buffer, layout).copy_(_opened(w, layout, 0)[0])
    return buffer.detach()


class _PadCast(torch.autograd.Function):
    """Old-style `forward(ctx, ...)` for the reasons given in scale_ops."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, dtype: torch.dtype, layout: Layout, inverse: Tensor | None, pool: BufferPool | None) -> Tensor:
        ctx.dtype, ctx.layout, ctx.inverse, ctx.shape = w.dtype, layout, inverse, w.shape
        return _padded_copy(w, dtype, layout, pool)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        inner = _narrowed(gradient, ctx.layout)
        inner = leaving(inner, ctx.inverse, ctx.dtype) if ctx.inverse is not None else inner.to(ctx.dtype)
        return inner.reshape(ctx.shape), None, None, None, None


class _PadCastMany(torch.autograd.Function):
    """`_PadCast` of many weights at once; absent gradients stay absent."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, layouts: tuple[Layout, ...], inverse: Tensor | None, pool: BufferPool, *ws: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layouts, ctx.factor = layouts, inverse
        ctx.dtypes, ctx.shapes = tuple(w.dtype for w in ws), [w.shape for w in ws]
        made = _padded_copies(ws, dtype, layouts, pool)
        ctx.mark_non_differentiable(*(copy for copy, need in zip(made, ctx.needs_input_grad[4:], strict=True) if not need))
        return made

    @staticmethod
    @uncaptured
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inner = [None if g is None else _narrowed(g, layout) for g, layout in zip(gradients, ctx.layouts, strict=True)]
        left = leaving_many(inner, ctx.factor, ctx.dtypes, ctx.needs_input_grad[4:])
        shaped = (g if g is None else g.reshape(shape) for g, shape in zip(left, ctx.shapes, strict=True))
        return None, None, None, None, *shaped


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
    """`F.batch_norm` in training on padded channels; `weight` and `bias` are padded too, running statistics are not."""
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
    "BufferPool", "batch_norm_padded", "copy_ends", "empty_padded", "fits", "held_by_nobody_else", "pad_cast", "pad_cast_many", "pad_dims",
    "resize", "slice_dims",
]  # fmt: skip
