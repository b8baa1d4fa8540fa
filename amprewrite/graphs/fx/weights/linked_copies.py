"""Make low copies of weights for training, with one autograd node for a block of weights, where kernel launches cost more than host work.

1. A node of the graph casts a block of weights in one multi-tensor launch, before the op that first reads one of the copies.
2. In backward the node waits for the last gradient of the block. Then it returns the gradients in fp32, unscaled, by one launch for the
   casts and one for the scale. So ranks can reduce the gradients of a block while the backward of earlier layers still runs.
3. The plan names the weights of each block (`passes/plan/plan_gradient_blocks.py`).
4. A weight with a hook on its gradient has its own autograd node, because autograd calls the hook whenever the node runs. In a shared node
   the hook would get None if only other weights of the block have gradients in a backward.
5. Weights that are not plain dense memory (DTensor and other subclasses, duals of forward-mode AD) are cast one by one.

Compiled graphs have no such node. Graphs on a CPU have none either, because a CPU has no launches to save. In these graphs each weight is
cast where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amprewrite.graphs.fx.ops.on_device import on_device
from amprewrite.graphs.fx.ops.pad_ops import logical_part, pad_cast
from amprewrite.graphs.fx.ops.scale_ops import leaving_many, unscale_gradient
from amprewrite.graphs.fx.uncaptured import GradMode, uncaptured, unselected
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.ir.plans.pad_plan import Layout
from amprewrite.torch_internals.autograd import in_forward_mode

ELEMENTS = 1 << 24
"""Largest number of weight elements in a block: up to 32 MB of low gradients wait for the last one. A larger weight has its own block."""
ELEMENTS_APART = 1 << 22
"""Largest number of weight elements in a block if several ranks train: 8 MB of gradients, less than a bucket of DDP (25 MB).

A smaller block is needed because the reduction of a bucket waits for the whole block.
"""
_PLAIN = {Tensor, torch.nn.Parameter}
"""Types of weights that are plain dense memory."""


def ranks_train() -> bool:
    """True if this process is one of several that train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def block_size() -> int:
    """Return the largest number of weight elements that may share one autograd node now. It is smaller if several ranks train."""
    return ELEMENTS_APART if ranks_train() else ELEMENTS


@dataclass(frozen=True)
class CastBlock:
    """Dtypes and paddings of the copies that a graph makes of a block of weights, one for each weight.

    A copy with the dtype of its weight and without padding is not cast: it only unscales the gradient.
    """

    dtypes: Sequence[torch.dtype]
    layouts: Sequence[Layout]
    cache: WeightCache


def cast_block(block: CastBlock, inverse: Tensor | None, *weights: Tensor) -> list[Tensor]:
    """Return a copy of each weight, linked to the weight by autograd if the weight requires a gradient.

    Gradients are multiplied by `inverse`, a 0-dim fp32 tensor; with None they are only cast. Copies are linked even in no-grad mode,
    because the graph may turn grad mode on later.
    """
    with unselected(), GradMode(on=True):
        dtypes, layouts = block.dtypes, block.layouts
        wanted = list(zip(weights, dtypes, layouts, strict=True))
        if in_forward_mode() or not _PLAIN.issuperset(map(type, weights)):
            return [_alone(*each, inverse) for each in wanted]
        copies, changed = list(weights), [at for at, (w, dtype, layout) in enumerate(wanted) if w.dtype != dtype or layout]
        made = block.cache.take([weights[at] for at in changed], [dtypes[at] for at in changed], [layouts[at] for at in changed])
        for at, copy in zip(changed, made, strict=True):
            copies[at] = copy
        learning = [at for at, weight in enumerate(weights) if weight.requires_grad]
        together = [at for at in learning if not weights[at]._backward_hooks]
        apart = [[at] for at in learning if weights[at]._backward_hooks]
        for chosen in (together, *apart) if together else apart:
            given = [copies[at] for at in chosen], [layouts[at] for at in chosen]
            linked = _Link.apply(*given, inverse, *[weights[at] for at in chosen])
            for at, copy in zip(chosen, linked, strict=True):
                copies[at] = copy
        return copies


def marked(copy: Tensor, weight: Tensor) -> Tensor:
    """Return `copy` with the `requires_grad` of `weight`. No gradient is recorded, but products choose their kernel by this flag."""
    return copy.requires_grad_(weight.requires_grad)


def _alone(weight: Tensor, dtype: torch.dtype, layout: Layout, inverse: Tensor | None) -> Tensor:
    """Return the copy of one weight. A copy without padding also has forward-mode derivatives."""
    if inverse is not None and dtype == weight.dtype and not layout:
        return unscale_gradient(weight, inverse)
    return pad_cast(weight, dtype, layout, inverse)


class _Link(torch.autograd.Function):
    """Autograd node that links low copies to their weights. If a copy gets no gradient, its weight gets None, not zeros."""

    @staticmethod
    def forward(ctx: Any, copies: list[Tensor], layouts: list[Layout], inverse: Tensor | None, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inverse, ctx.dtypes = inverse, [weight.dtype for weight in weights]
        ctx.padded = [(layout, weight.shape) for layout, weight in zip(layouts, weights, strict=True)] if any(layouts) else ()
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if all(gradient is None for gradient in gradients):  # happens if the forward itself computes gradients, but only of other weights
            return (None,) * (3 + len(gradients))
        inner = list(gradients)
        for place, (layout, _) in enumerate(ctx.padded):
            gradient = inner[place]
            if layout and gradient is not None:
                inner[place] = logical_part(gradient, layout)
        device = next(gradient.device for gradient in gradients if gradient is not None)
        inverse = None if ctx.inverse is None else on_device(ctx.inverse, device)
        left = list(leaving_many(inner, inverse, ctx.dtypes, ctx.needs_input_grad[3:]))
        for place, (layout, shape) in enumerate(ctx.padded):
            gradient = left[place]
            if layout and gradient is not None:
                left[place] = gradient.reshape(shape)
        return None, None, None, *left
