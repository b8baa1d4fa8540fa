"""Put the loss scale into a graph, by functions that return a value unchanged (or cast) and multiply its gradient.

Inside a rewritten graph, the *region*, every gradient is `scale` times the true gradient. Outside it is the true gradient. A tensor that
crosses the border of the region keeps its value (or is cast), and its gradient is multiplied by a factor:

1. `scale_gradient` at a differentiable output: the gradient enters the region here, and is multiplied by the scale.
2. `cast_in` at a weight, `unscale_gradient` at an input: the gradient leaves the region here, times the inverse of the scale, in fp32.

Derivatives of any order stay right because two functions cross the border, and each is the backward of the other:

    _Cross   the value itself (cast); as the backward of _Times: the value times `then / factor` (below)    backward: _Times
    _Times   the value times the factor                                                                    backward: _Cross

A backward is linear in the gradients that enter it. So each backward may have its own factor: gradients are multiplied by the factor on
entry, and divided by the factor on exit. Gradients from which a loss is computed (forces, gradient penalties) are computed with the factor
1, and the gradients of this loss with the loss scale. `runtime/training/forward_scale.py` chooses the factor when the backward enters the
region, and writes it into the tensor `factor`.

A second backward differentiates the gradients of the first, so its gradients cross the border in the other direction: they leave the region
where the first gradients entered. So the backward of `_Times` multiplies by `then / factor`: by `then`, the factor of the first backward,
because `_Times` multiplied by it, and by 1 / `factor`, because the second gradients, scaled by `factor`, leave the region. Without the
division the result is silently wrong: second-order terms underflow in fp16 (a relative error of 0.98 in a gradient penalty).

A graph has one factor, but its values may be on several devices. So the factor is copied to the device of the gradient that it multiplies.

`forward(ctx, ...)` is in the old style, without `setup_context`, for its speed: on a CPU a cast of a small weight, forward and backward,
takes 15 us as a plain `.to`, 19 us in the old style, and 31 us with `setup_context` or as a `torch.library.custom_op`.

A model may put hooks on tensors inside a captured graph: `hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))`.
Dynamo captures such a hook as a higher-order op, which fails on fake tensors and on a tensor that requires no gradient. The function
`hooked` replaces this op and works with both. It is called on the fp32 tensor that all readers read, so that the hook gets
the whole gradient in fp32. If gradients are multiplied by a loss scale, the hook gets them without the scale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amprewrite.graphs.fx.ops.on_device import on_device
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.torch_internals.dispatch import in_forward_mode, is_legacy_batched


def scale_gradient(x: Tensor, scale: Tensor) -> Tensor:
    """Return `x` unchanged. Its gradient is multiplied by `scale`, a 0-dim fp32 tensor.

    `x` is a differentiable output of a rewritten graph. It must be fp32, because in half precision the scaled gradient might overflow.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _forward_too(_Cross).apply(x, x.dtype, scale)


def unscale_gradient(x: Tensor, inverse: Tensor) -> Tensor:
    """Return `x` unchanged. Its gradient is multiplied in fp32 by `inverse`, a 0-dim fp32 tensor, then cast to the dtype of `x`."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _forward_too(_Cross).apply(x, x.dtype, inverse)


def cast_in(w: Tensor, dtype: torch.dtype, inverse: Tensor) -> Tensor:
    """Return `w.to(dtype)`. Its gradient is first cast to fp32, then multiplied by `inverse`, a 0-dim fp32 tensor."""
    if not (w.requires_grad and torch.is_grad_enabled()):
        return w.to(dtype)
    return _forward_too(_Cross).apply(w, dtype, inverse)


def _times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `gradient * factor` as `dtype`, multiplied in fp32 at least. `factor` is 0-dim.

    PyTorch would round the product of a half-precision tensor and a 0-dim factor to half precision, also with `out=`. So the factor is
    viewed as 1-dim, and PyTorch promotes the product to fp32 in one pass. But on a CPU, and for tensor subclasses, the gradient is cast to
    fp32 first: a CPU kernel would make a copy anyway (4 M elements take 1.26 ms, and 0.91 ms if cast first), and subclasses expect 0-dim
    factors.
    """
    factor = on_device(factor, gradient.device)
    if gradient.dtype.itemsize >= 4:  # below, `.float()` would return an fp32 gradient itself, and `.mul_()` would overwrite it
        return (gradient * factor).to(dtype)
    if gradient.is_cpu or gradient.dim() == 0 or type(gradient) is not Tensor or gradient.is_sparse:
        product = gradient.float().mul_(factor)
    else:
        product = torch.mul(gradient, factor.view(1))
    return product if dtype == torch.float32 else product.to(dtype)


def nan_if_infinite(gradient: Tensor) -> Tensor:
    """Return `gradient` with NaN in place of infinities: a hook that clamps would make an infinity finite, but it leaves NaN unchanged."""
    return gradient + (gradient - gradient)


def is_hooked(x: Tensor) -> bool:
    """True if hooks may change the gradient of `x`. Hooks that `amprewrite.runtime` sets on results do not count: they only observe."""
    homes = (getattr(hook, "__module__", None) or "" for hook in (x._backward_hooks or {}).values())
    return bool(x._post_accumulate_grad_hooks) or not all(home.startswith("amprewrite.runtime.") for home in homes)


def leaving(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `gradient * factor` as `dtype`, multiplied in fp32 at least. If gradients are enabled, the result can be differentiated.

    For a gradient that leaves the rewritten graph, `factor` is the inverse of the loss scale, so the result is the true gradient.
    """
    if torch.is_grad_enabled():
        return applied(_Times, gradient, factor, factor.clone(), dtype)
    return _times(gradient, factor, dtype)


def applied(function: type[torch.autograd.Function], gradient: Tensor, *others: Any) -> Tensor:
    """Return `function.apply(gradient, *others)`, which can be differentiated under `is_grads_batched=True` as well.

    With that option torch batches gradients by a vmap that keeps the autograd history inside its tensors. A Python `autograd.Function` does
    not see this history, and its result would have no history. So the function gets the gradients of the whole batch as one tensor. Each
    batched tensor of `others` is passed in the same way. The result is then batched again.
    """
    if not is_legacy_batched(gradient):
        result: Tensor = _forward_too(function).apply(gradient, *others)
        return result
    gradient, levels = _unbatched(gradient)
    others = tuple(_unbatched(each)[0] if isinstance(each, Tensor) and is_legacy_batched(each) else each for each in others)
    result = function.apply(gradient, *others)
    for level in reversed(levels):
        result = torch._add_batch_dim(result, 0, level)
    return result


def _unbatched(gradient: Tensor) -> tuple[Tensor, list[int]]:
    """Return (the gradients of the whole batch as one tensor, the vmap levels that batch them, innermost first)."""
    depth = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    levels = []
    for level in range(depth, 0, -1):
        whole = torch._remove_batch_dim(gradient, level, 0, 0)
        if len(whole):  # `whole` is empty if this level does not batch the tensor
            gradient = whole
            levels.append(level)
    return gradient, levels


def tell_of_entries(factor: Tensor, enters: Callable[[], None]) -> None:
    """Register the bound method `enters`, which chooses the factor of a backward that differentiates gradients multiplied by `factor`.

    Such a backward calls it first. `factor` holds a weak reference to the method, so it does not keep the method's object alive.
    """
    factor.amprewrite_enters = weakref.WeakMethod(enters)  # type: ignore[attr-defined]


def _held_enters(factor: Tensor) -> Callable[[], None] | None:
    """Return the method that `tell_of_entries` registered for `factor`; None if there is none, or if the method's object is gone.

    The caller, an autograd node, stores the method, and so keeps the method's object alive. From then on, `is_held(factor)` is True.
    """
    found: weakref.WeakMethod[Callable[[], None]] | None = getattr(factor, "amprewrite_enters", None)
    if found is None:
        return None
    factor.amprewrite_held = True  # type: ignore[attr-defined]
    return found()


def is_held(factor: Tensor) -> bool:
    """True if an autograd node may hold the method that `tell_of_entries` registered for `factor`, and so keep its object alive."""
    return getattr(factor, "amprewrite_held", False)


class _Cross(torch.autograd.Function):
    """Autograd node that returns `x` as `dtype`. Its backward multiplies the gradient by `factor`, and returns it in the dtype of `x`.

    When the backward of `_Times` calls this node, a second factor `by` multiplies both `x` and the gradient. If the gradient is None,
    backward returns None. Under DDP with `find_unused_parameters=True`, a result that the loss does not read may get None. If backward
    returned zeros instead, weights would get gradients of zeros, and an optimizer would decay these weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, factor: Tensor, by: Tensor | None = None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.by = factor, by
        ctx.dtype, ctx.to = x.dtype, dtype
        ctx.hooked = bool(x._backward_hooks or x._post_accumulate_grad_hooks) and is_hooked(x)
        if by is not None:
            ctx.enters = _held_enters(factor)
            return _times(x, by, dtype)
        # detach(), not view_as(): users may change a model's output in place, which autograd refuses for a view made in a custom Function.
        return x.detach() if x.dtype == dtype else x.to(dtype)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        if ctx.by is not None and ctx.enters is not None:
            ctx.enters()
        if gradient is None:
            return None, None, None, None
        factor = ctx.factor if ctx.by is None else ctx.factor * ctx.by
        if torch.is_grad_enabled():
            then = ctx.factor.clone() if ctx.by is None else factor
            made = applied(_Times, gradient, ctx.factor, then, ctx.dtype)
        else:
            made = _times(gradient, factor, ctx.dtype)
        return nan_if_infinite(made) if ctx.hooked else made, None, None, None


class _Times(torch.autograd.Function):
    """Autograd node that multiplies a gradient by `then`: the number that the tensor `factor` held when this gradient was computed.

    When a second backward differentiates this node, `factor` holds the number of the second backward. The second gradients cross the border
    of the rewritten graph in the opposite direction, so they are also divided by `factor`: they are multiplied by `then / factor`.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factor: Tensor, then: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.factor, ctx.then, ctx.enters = factor, then, _held_enters(factor)
        ctx.dtype, ctx.to = gradient.dtype, dtype
        return _times(gradient, then, dtype)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        if ctx.enters is not None:
            ctx.enters()
        if gradient is None:
            return None, None, None, None
        by = ctx.then / ctx.factor
        if torch.is_grad_enabled():
            return applied(_Cross, gradient, ctx.dtype, ctx.factor, by), None, None, None
        return _times(gradient, by, ctx.dtype), None, None, None


class _CrossDual(_Cross):
    """`_Cross` with a forward-mode derivative: the tangent is cast or multiplied in the same way as the value, without the loss scale."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        if ctx.by is not None:
            return _times(tangent, ctx.by, ctx.to)
        return tangent.view_as(tangent) if tangent.dtype == ctx.to else tangent.to(ctx.to)


class _TimesDual(_Times):
    """`_Times` with a forward-mode derivative. It multiplies the tangent of a gradient by `then`, as it multiplies the gradient."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        return _times(tangent, ctx.then, ctx.to)


_DUAL: dict[type[torch.autograd.Function], type[torch.autograd.Function]] = {_Cross: _CrossDual, _Times: _TimesDual}


def _forward_too(function: type[torch.autograd.Function]) -> Any:
    """Return the variant of `function` that has a `jvp` if forward-mode derivatives are computed now, otherwise `function` itself.

    During compilation the result is always `function`, because Dynamo captures no `autograd.Function` that has a `jvp`.
    """
    if torch.compiler.is_compiling() or not in_forward_mode():
        return function
    return _DUAL.get(function, function)


Body = Callable[..., Tensor]
"""The function of a hook: takes the gradient and the other values that the hook reads, and returns the new gradient."""


def hooked(x: Tensor, body: Body, *reads: Any) -> Tensor:
    """Return `x` unchanged. In backward, `body(gradient, *reads)` replaces its gradient. A gradient of None stays None.

    `body` is the code of a hook. It was captured with a tensor as gradient, so it cannot take None. `reads` are other values that it reads.
    """
    if x.requires_grad and torch.is_grad_enabled():
        x.register_hook(lambda gradient: None if gradient is None else body(gradient, *reads))
    return x


def hooked_unscaled(x: Tensor, body: Body, scale: Tensor, inverse: Tensor, *reads: Any) -> Tensor:
    """Return `x` unchanged. In backward, `body(gradient * inverse, *reads) * scale` replaces its gradient.

    `body` is the code of a hook, and `reads` are other values that it reads. All gradients of the graph are multiplied by the loss scale
    `scale`. `inverse` is 1 / `scale`, so `body` gets the true gradient. If `body` returns None, the tensor that it got is used, because
    `body` may have changed this tensor in place.
    """

    def hook(gradient: Tensor | None) -> Tensor | None:  # must not refer to `x`, which holds this hook: the cycle would never be freed
        if gradient is None:
            return None
        true = nan_if_infinite(gradient * on_device(inverse, gradient.device))
        made: Tensor | None = body(true, *reads)
        return (true if made is None else made) * on_device(scale, gradient.device)

    if x.requires_grad and torch.is_grad_enabled():
        x.register_hook(hook)
    return x
