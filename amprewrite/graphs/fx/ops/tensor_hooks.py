"""Hooks that a model puts on tensors inside a captured graph: `hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))`.

Dynamo captures such a hook as a higher-order op, which fails on fake tensors and on a tensor that requires no gradient. The function
`hooked` replaces this op and works with such tensors. The op that makes the hooked tensor returns it in fp32, so that the hook gets
the whole gradient in fp32. If gradients are multiplied by a loss scale, the hook gets them without the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amprewrite.graphs.fx.ops.on_device import on_device

Body = Callable[..., Tensor]
"""The function of a hook: takes the gradient and the other values that the hook reads, and returns the new gradient."""


def hooked(x: Tensor, body: Body, *reads: Any) -> Tensor:
    """Return `x` unchanged. In backward, `body(gradient, *reads)` replaces its gradient."""
    if x.requires_grad and torch.is_grad_enabled():
        x.register_hook(lambda gradient: body(gradient, *reads))
    return x


def hooked_unscaled(x: Tensor, body: Body, scale: Tensor, inverse: Tensor, *reads: Any) -> Tensor:
    """Return `x` unchanged. In backward, `body(gradient * inverse, *reads) * scale` replaces its gradient.

    Gradients are multiplied by the loss scale `scale`, so the hook's function gets the true gradient. `inverse` is 1 / `scale`.
    """
    if x.requires_grad and torch.is_grad_enabled():
        x.register_hook(lambda gradient: body(gradient * on_device(inverse, x.device), *reads) * on_device(scale, x.device))
    return x
