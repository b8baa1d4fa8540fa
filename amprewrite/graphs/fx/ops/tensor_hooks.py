"""Hooks that a model puts on tensors inside a captured graph: `hidden.register_hook(lambda gradient: gradient.clamp(-1, 1))`.

Dynamo turns them into a higher-order op that wants a gradient to flow: it fails on fake tensors and in runs that only look. Here it
is a function that needs none. The tensor stays fp32 from its maker on, so that the hook sees its whole gradient, in fp32; and where
gradients are scaled, the hook sees them unscaled.
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
"""What the hook does: takes the gradient and whatever else it reads, gives the gradient that goes on."""


def restore_hooks(module: torch.fx.GraphModule) -> bool:
    """Call `hooked` wherever the graph holds the higher-order op; True if there was one."""
    found = False
    for node in module.graph.nodes:
        if isinstance(node.target, HigherOrderOperator) and node.target.name() == "register_hook":
            node.target = hooked
            found = True
    if found:
        module.recompile()
    return found


def hooked(x: Tensor, body: Body, *reads: Any) -> Tensor:
    """`x`, whose gradient goes through `body`."""
    if x.requires_grad and torch.is_grad_enabled():
        x.register_hook(lambda gradient: body(gradient, *reads))
    return x


def hooked_unscaled(x: Tensor, body: Body, scale: Tensor, inverse: Tensor, *reads: Any) -> Tensor:
    """`hooked` for gradients that are multiplied by `scale`: `body` sees them times `inverse`."""
    if x.requires_grad and torch.is_grad_enabled():
        x.register_hook(lambda gradient: body(gradient * on_device(inverse, x.device), *reads) * on_device(scale, x.device))
    return x
