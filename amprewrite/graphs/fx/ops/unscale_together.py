"""Unscale the gradients of several weights by one autograd node, in one multi-tensor launch.

`scale_ops.unscale_gradient` does the same for one weight. It runs Python code for each weight, which takes the host about 15 us in a step.
The code here runs once for a block of weights.

1. The weights keep their values and share their memory. The graph casts them where it reads them.
2. In a backward the node waits for the last gradient of the block.
3. A weight with a hook on its gradient has a node of its own, because autograd calls the hook whenever the node runs. In a shared node the
   hook would get None if only other weights of the block have gradients in a backward.
4. Weights that are not plain dense memory (DTensor and other subclasses) have nodes of their own, and so have all weights while
   forward-mode derivatives are computed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amprewrite.graphs.fx.ops.on_device import on_device
from amprewrite.graphs.fx.ops.scale_ops import leaving, unscale_gradient
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.torch_internals.autograd import in_forward_mode
from amprewrite.torch_internals.dispatch import is_legacy_batched, is_wrapped_by_transform

_PLAIN, _STRIDED = {Tensor, torch.nn.Parameter}, {torch.strided}
_layout, _learns, _hooks = map(operator.attrgetter, ("layout", "requires_grad", "_backward_hooks"))


def unscale_together(inverse: Tensor, own: bool, *weights: Tensor) -> Sequence[Tensor]:
    """Return `weights`, which are fp32, unchanged. Their gradients are multiplied by `inverse`, a 0-dim fp32 tensor.

    `own`: only casts read the weights. Each gradient is then made by the backward of a cast and may be overwritten.
    """
    if not torch.is_grad_enabled() or in_forward_mode() or not _are_dense(weights):
        return [unscale_gradient(weight, inverse) for weight in weights]
    if all(map(_learns, weights)) and not any(map(_hooks, weights)):
        shared: Sequence[Tensor] = _Together.apply(inverse, own, *weights)
        return shared
    together = [weight for weight in weights if weight.requires_grad and not weight._backward_hooks]
    linked = dict(zip(map(id, together), _Together.apply(inverse, own, *together) if together else (), strict=True))
    return [linked[id(weight)] if id(weight) in linked else unscale_gradient(weight, inverse) for weight in weights]


def _are_dense(tensors: Sequence[Tensor | None]) -> bool:
    """True if all `tensors` are ordinary strided memory; False if one is None."""
    return _PLAIN.issuperset(map(type, tensors)) and _STRIDED.issuperset(map(_layout, tensors))


class _Together(torch.autograd.Function):
    """Autograd node of `unscale_together`. If a weight gets no gradient in a backward, the result for it is None, not zeros."""

    @staticmethod
    def forward(ctx: Any, inverse: Tensor, own: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inverse, ctx.own = inverse, own
        return tuple(map(Tensor.detach, weights))

    @staticmethod
    @uncaptured
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dense = _are_dense(gradients)  # False, too, if a gradient is missing
        present: Any = gradients if dense else [gradient for gradient in gradients if gradient is not None]
        batched = any(map(is_legacy_batched, present)) or any(map(is_wrapped_by_transform, present))
        if torch.is_grad_enabled() or batched or not (dense or _are_dense(present)):
            return None, None, *[each if each is None else leaving(each, ctx.inverse, each.dtype) for each in gradients]
        if not present:  # happens if the forward itself computes gradients, but only of other weights
            return None, None, *gradients
        factor, where = ctx.inverse, present[0].device
        if factor.device != where:
            factor = on_device(factor, where)
        if ctx.own:
            torch._foreach_mul_(present, factor)
            return None, None, *gradients
        products = torch._foreach_mul(present, factor)
        if dense:
            return None, None, *products
        rest = iter(products)
        return None, None, *[each if each is None else next(rest) for each in gradients]
