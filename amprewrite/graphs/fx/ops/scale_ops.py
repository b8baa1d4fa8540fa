"""Gradient identities that put the loss scale into a graph.

Inside a rewritten region every gradient is `scale` times the true one; outside it is the true one. A tensor that crosses the border keeps
its value (or is cast), and its gradient is multiplied by a factor:

1. `scale_gradient` at a differentiable output: the gradient enters the region, times the scale.
2. `cast_in`, `cast_in_many` at a weight, `unscale_gradient` at an input: the gradient leaves, times the inverse, in fp32.

Derivatives of any order stay right because crossing is a pair of functions, each the backward of the other:

    _Cross   the value itself (cast), or times an earlier factor    backward: _Times
    _Times   the value times the factor                             backward: _Cross

A backward is linear in the gradients that enter it. So each backward may have a factor of its own: gradients are multiplied by it on entry
and divided on exit. Forces and penalties are computed with the factor 1; the loss made of them has the scale
(`runtime/training/forward_scale.py` decides, and writes the number when the backward enters). If the first backward had the factor `then`,
the derivative of `_Times` is `then` divided by the factor of the second: the true derivative, and also the border of the second backward,
crossed in the other direction. Without the border the result is silently wrong: second-order terms drop out of fp16 (a relative error of
0.98 in a gradient penalty).

The factor may be on a different device than a gradient: a graph has one scale, and its values may be on several devices. It is moved when
the gradient passes.

`forward(ctx, ...)` is in the old style on purpose: on a CPU a cast of a small weight, forward and backward, takes 15 us as a plain `.to`,
19 us this way, 31 us with `setup_context` or as a `torch.library.custom_op`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amprewrite.graphs.fx.ops.finite_flags import record_finite_flag
from amprewrite.graphs.fx.ops.fused_copy import copy_many, is_plain, unscale_many
from amprewrite.graphs.fx.ops.on_device import on_device
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.torch_internals.autograd import in_forward_mode
from amprewrite.torch_internals.dispatch import is_legacy_batched
from amprewrite.torch_internals.kernels import unscale_and_check


def scale_gradient(x: Tensor, scale: Tensor) -> Tensor:
    """`x`, whose gradient is multiplied by `scale`, a 0-dim fp32 tensor.

    Place it after `x` has its outer dtype, fp32: there the product cannot overflow.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _forward_too(_Cross).apply(x, x.dtype, scale)


def unscale_gradient(x: Tensor, inverse: Tensor) -> Tensor:
    """`x`, whose gradient is multiplied by `inverse` in fp32 and returned in the dtype of `x`."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _forward_too(_Cross).apply(x, x.dtype, inverse)


def cast_in(w: Tensor, dtype: torch.dtype, inverse: Tensor) -> Tensor:
    """`w.to(dtype)`, whose gradient is cast to fp32 first, then multiplied by `inverse`."""
    if not (w.requires_grad and torch.is_grad_enabled()):
        return w.to(dtype)
    return _forward_too(_Cross).apply(w, dtype, inverse)


def _times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient * factor` as `dtype`, multiplied in fp32 at least.

    A 0-dim factor does not promote a half tensor: the product, and `out=` as well, would be rounded in half. Where kernels cast while they
    read, a 1-dim factor promotes in one pass. CPU kernels make a copy anyway (for 4 M elements 1.26 ms against 0.91), and tensor subclasses
    take 0-dim tensors only.
    """
    factor = on_device(factor, gradient.device)
    if gradient.dtype.itemsize >= 4:  # `.float()` would return the gradient itself, which other code reads as well
        return (gradient * factor).to(dtype)
    made = unscale_many((gradient,), factor) if dtype == torch.float32 else None
    if made is not None:
        return made[0]
    if gradient.is_cpu or gradient.dim() == 0 or type(gradient) is not Tensor or gradient.is_sparse:
        product = gradient.float().mul_(factor)
    else:
        product = torch.mul(gradient, factor.view(1))
    return product if dtype == torch.float32 else product.to(dtype)


def leaving(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient that leaves a graph through a cast: `gradient * factor` as `dtype`, multiplied in fp32 at least. Differentiable."""
    if torch.is_grad_enabled():
        return _applied(_Times, gradient, factor, factor.clone(), dtype)
    return _times(gradient, factor, dtype)


def leaving_many(
    gradients: Sequence[Tensor | None], factor: Tensor | None, dtypes: Sequence[torch.dtype], needs: Sequence[bool]
) -> Iterator[Tensor | None]:
    """`leaving` of the gradients that exist and are needed, in one kernel for each kind of gradient. Without a `factor` it only casts.

    If possible it checks the gradients while it multiplies and records the check (`finite_flags.py`). All gradients and `factor` are on one
    device.
    """
    wanted = list(zip(gradients, dtypes, needs, strict=True))
    present = [(g, dtype) for g, dtype, need in wanted if need and g is not None]
    if torch.is_grad_enabled():
        products = [g.to(dtype) if factor is None else leaving(g, factor, dtype) for g, dtype in present]
    elif all(dtype == torch.float32 and is_plain(g) for g, dtype in present):
        products = _leaving_plain([g for g, _ in present], factor)
    else:
        products = [g.to(dtype) if factor is None else _times(g, factor, dtype) for g, dtype in present]
    rest = iter(products)
    return (next(rest) if need and g is not None else None for g, _, need in wanted)


def _leaving_plain(gradients: Sequence[Tensor], factor: Tensor | None) -> list[Tensor]:
    """New fp32 tensors with `gradients` times `factor`.

    One launch casts them, one multiplies and checks all. The inputs are not changed.
    """
    low = [place for place, gradient in enumerate(gradients) if gradient.dtype != torch.float32]
    made, left = list(gradients), low if factor is None else list(range(len(gradients)))
    flag = None if factor is None else torch.zeros_like(factor)
    if factor is not None and low and (fused := unscale_many([gradients[place] for place in low], factor, flag)) is not None:
        for place, widened in zip(low, fused, strict=True):
            made[place] = widened
        left = [place for place in left if place not in set(low)]
    for place, copy in zip(left, _copies([gradients[place] for place in left]), strict=True):
        made[place] = copy
    if factor is not None and flag is not None and left:
        unscaled = [made[place] for place in left]
        unscale_and_check(unscaled, flag, factor)
        record_finite_flag(unscaled, flag)
    return made


def _copies(gradients: Sequence[Tensor]) -> list[Tensor]:
    """fp32 copies of gradients, each in memory of its own."""
    made = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
    if made:
        copy_many(gradients, made)
    return made


def _applied(function: type[torch.autograd.Function], gradient: Tensor, *others: Any) -> Tensor:
    """`function.apply(gradient, *others)`, which has a derivative under `is_grads_batched=True` as well.

    There torch batches gradients by a vmap that keeps the autograd history inside its tensors. A Python Function does not see it, and its
    result would have none. So the function gets the gradients of the whole batch as one tensor, and its result is batched again.
    """
    if not is_legacy_batched(gradient):
        result: Tensor = _forward_too(function).apply(gradient, *others)
        return result
    depth = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    levels = []
    for level in range(depth, 0, -1):
        whole = torch._remove_batch_dim(gradient, level, 0, 0)
        if len(whole):  # torch expands a tensor that this level does not batch, here to the batch size 0
            gradient = whole
            levels.append(level)
    result = function.apply(gradient, *others)
    for level in reversed(levels):
        result = torch._add_batch_dim(result, 0, level)
    return result


def tell_of_entries(factor: Tensor, enters: Callable[[], None]) -> None:
    """Register the method `enters`: it is called when a later backward differentiates gradients that were multiplied by `factor`.

    `factor` holds a weak reference to the method, so it does not keep the method's object alive.
    """
    factor.amprewrite_enters = weakref.WeakMethod(enters)  # type: ignore[attr-defined]


def _enters(factor: Tensor) -> Callable[[], None] | None:
    """The callback to run before `factor` is read in a second backward; None if there is none, or if its object is gone."""
    found: weakref.WeakMethod[Callable[[], None]] | None = getattr(factor, "amprewrite_enters", None)
    return None if found is None else found()


class _Cross(torch.autograd.Function):
    """Returns `x`, cast, or times `by`. The gradient is multiplied by `factor`, and by `by`, and returned in the dtype of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, factor: Tensor, by: Tensor | None = None) -> Tensor:
        ctx.factor, ctx.by = factor, by
        ctx.dtype, ctx.to = x.dtype, dtype
        if by is not None:
            ctx.enters = _enters(factor)
            return _times(x, by, dtype)
        # detach(), not view_as(): users may change a model's output in place, which autograd refuses for views made here.
        return x.detach() if x.dtype == dtype else x.to(dtype)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        if ctx.by is not None and ctx.enters is not None:
            ctx.enters()
        factor = ctx.factor if ctx.by is None else ctx.factor * ctx.by
        if torch.is_grad_enabled():
            then = ctx.factor.clone() if ctx.by is None else factor
            return _applied(_Times, gradient, ctx.factor, then, ctx.dtype), None, None, None
        return _times(gradient, factor, ctx.dtype), None, None, None


class _Times(torch.autograd.Function):
    """The product with `then`, the factor of this backward.

    A later backward may have another `factor`: the derivative is `then / factor`.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factor: Tensor, then: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.factor, ctx.then, ctx.enters = factor, then, _enters(factor)
        ctx.dtype, ctx.to = gradient.dtype, dtype
        return _times(gradient, then, dtype)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        if ctx.enters is not None:
            ctx.enters()
        by = ctx.then / ctx.factor
        if torch.is_grad_enabled():
            return _applied(_Cross, gradient, ctx.dtype, ctx.factor, by), None, None, None
        return _times(gradient, by, ctx.dtype), None, None, None


class _CrossDual(_Cross):
    """`_Cross` with a forward-mode derivative. A tangent follows the values, which are not scaled."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        if ctx.by is not None:
            return _times(tangent, ctx.by, ctx.to)
        return tangent.view_as(tangent) if tangent.dtype == ctx.to else tangent.to(ctx.to)


class _TimesDual(_Times):
    """`_Times` with a forward-mode derivative. A tangent of a gradient is scaled as the gradient is."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        return _times(tangent, ctx.then, ctx.to)


_DUAL: dict[type[torch.autograd.Function], type[torch.autograd.Function]] = {_Cross: _CrossDual, _Times: _TimesDual}


def _forward_too(function: type[torch.autograd.Function]) -> Any:
    """The variant of `function` with forward-mode derivatives, if these are being computed. Dynamo captures no Function that has a jvp."""
    if torch.compiler.is_compiling() or not in_forward_mode():
        return function
    return _DUAL[function]
