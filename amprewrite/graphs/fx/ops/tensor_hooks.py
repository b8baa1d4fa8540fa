"""Hooks that a model puts on tensors inside a captured graph: `hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))`.

Dynamo captures them as a higher-order op that requires a gradient: it fails on fake tensors and without gradients. Here it is a function
that works without. The tensor is fp32 from the op that makes it on, so that the hook gets the whole gradient in fp32. If gradients are
scaled, the hook gets them unscaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import Tensor

from amprewrite.graphs.fx.ops.on_device import on_device
from amprewrite.torch_internals.operators import HigherOrderOperator

Body = Callable[..., Tensor]
"""Body of a hook: takes the gradient and the other values it reads, returns the new gradient."""


def restore_hooks(module: torch.fx.GraphModule) -> bool:
    """Replace each higher-order hook op of the graph by a call of `hooked`. True if there was one."""
    found = False
    for node in module.graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and node.target.name() == "register_hook":
            node.target = hooked
            found = True
    if found:
        module.recompile()
    return found


def hooked(x: Tensor, body: Body, *reads: Any) -> Tensor:
    """`x`, whose gradient is passed through `body`."""
    if x.requires_grad and torch.is_grad_enabled():
        x.register_hook(lambda gradient: body(gradient, *reads))
    return x


def hooked_unscaled(x: Tensor, body: Body, scale: Tensor, inverse: Tensor, *reads: Any) -> Tensor:
    """`hooked` for gradients that are multiplied by `scale`: `body` gets them times `inverse`."""
    if x.requires_grad and torch.is_grad_enabled():
        x.register_hook(lambda gradient: body(gradient * on_device(inverse, x.device), *reads) * on_device(scale, x.device))
    return x
