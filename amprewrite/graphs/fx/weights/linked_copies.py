"""Low copies of weights in training: one launch makes them all, and a few bring their gradients back.

1. All copies of a graph are made before it runs, from the weights as they are then.
2. A block of them is linked to its weights by one autograd node. In backward it gives the gradients of the block in fp32, unscaled, in
   one multi-tensor launch for the casts and one for the scale.
3. The plan says which weights are a block (`passes/plan/plan_gradient_blocks.py`).
4. Weights that are more than dense memory (DTensor and other subclasses, duals of forward-mode AD) are cast one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from amprewrite.graphs.fx.ops.pad_ops import logical_part, pad_cast
from amprewrite.graphs.fx.ops.scale_ops import leaving_many, unscale_gradient
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.graphs.fx.weights.copy_memory import PLAIN
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.ir.plans.pad_plan import Layout

ELEMENTS = 1 << 25
"""Elements of a block, 64 MB of low gradients that wait for the last of them. A weight of so many is a block by itself."""
ELEMENTS_APART = 1 << 22
"""The same where several ranks train: 16 MB, less than a bucket of DDP (25 MB), whose reduction must not wait."""


def block_size() -> int:
    """How many elements of weights may share one autograd node, in this process as it is now."""
    apart = torch.distributed.is_available() and torch.distributed.is_initialized()
    return ELEMENTS_APART if apart else ELEMENTS


class LinkedCopies:
    """The copies that one training graph takes of its weights; a `dtype` that is the weight's own only unscales its gradient."""

    def __init__(
        self, dtypes: Sequence[torch.dtype], layouts: Sequence[Layout], cache: WeightCache, blocks: Sequence[Sequence[int]] | None = None
    ) -> None:
        """`blocks` are the places of the weights that share an autograd node; None: all share one."""
        self.dtypes, self.layouts, self.cache = dtypes, layouts, cache
        self.blocks = (range(len(dtypes)),) if blocks is None else blocks
        self._made: tuple[int, ...] | None = None
        """Places of the weights that are copied; the graph is guarded on their dtypes."""

    def take(self, weights: Sequence[Tensor], inverse: Tensor | None) -> list[Tensor]:
        """A copy of each weight as it is now; its gradient arrives at the weight times `inverse`, a 0-dim fp32 tensor.

        Without gradients, too, for the graph may switch them on.
        """
        with torch.enable_grad():
            return self._take(weights, inverse)

    def _take(self, weights: Sequence[Tensor], inverse: Tensor | None) -> list[Tensor]:
        if forward_ad._current_level >= 0 or not PLAIN.issuperset(map(type, weights)):
            return [_alone(*each, inverse) for each in zip(weights, self.dtypes, self.layouts, strict=True)]
        if self._made is None:
            self._made = tuple(place for place, w in enumerate(weights) if self.dtypes[place] != w.dtype or self.layouts[place])
        copies = list(weights)
        made = self._made
        dtypes, layouts = [self.dtypes[place] for place in made], [self.layouts[place] for place in made]
        for place, copy in zip(made, self.cache.take_with_gradients([weights[place] for place in made], dtypes, layouts), strict=True):
            copies[place] = copy
        check = None if inverse is None else _Check(inverse)
        for block in self.blocks:
            chosen = [place for place in block if weights[place].requires_grad]
            if chosen:
                layouts = [self.layouts[place] for place in chosen]
                linked = _Link.apply([copies[p] for p in chosen], layouts, check, *[weights[p] for p in chosen])
                for place, copy in zip(chosen, linked, strict=True):
                    copies[place] = copy
        return copies


def _alone(weight: Tensor, dtype: torch.dtype, layout: Layout, inverse: Tensor | None) -> Tensor:
    """One copy, with torch's own derivatives if there is no scale."""
    if inverse is not None and dtype == weight.dtype and not layout:
        return unscale_gradient(weight, inverse)
    return pad_cast(weight, dtype, layout, inverse)


class _Check:
    """What the gradients of one forward are multiplied by, and a flag for each backward: whether all that it gave were finite."""

    def __init__(self, inverse: Tensor) -> None:
        self.inverse = inverse
        self._backward: int | None = None

    def flag(self) -> Tensor:
        """The flag of the backward that runs now, which all blocks share."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward, self._flag = backward, torch.zeros_like(self.inverse)
        return self._flag


class _Link(torch.autograd.Function):
    """Copies of weights that were made before, as if they were cast now; absent gradients stay absent."""

    @staticmethod
    def forward(ctx: Any, copies: list[Tensor], layouts: list[Layout], check: _Check | None, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.check, ctx.dtypes = check, [weight.dtype for weight in weights]
        ctx.padded = [(layout, weight.shape) for layout, weight in zip(layouts, weights, strict=True)] if any(layouts) else ()
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inner = list(gradients)
        for place, (layout, _) in enumerate(ctx.padded):
            gradient = inner[place]
            if layout and gradient is not None:
                inner[place] = logical_part(gradient, layout)
        factor, flag = (None, None) if ctx.check is None else (ctx.check.inverse, ctx.check.flag())
        left = list(leaving_many(inner, factor, ctx.dtypes, ctx.needs_input_grad[3:], flag))
        for place, (layout, shape) in enumerate(ctx.padded):
            gradient = left[place]
            if layout and gradient is not None:
                left[place] = gradient.reshape(shape)
        return None, None, None, *left


__all__ = ["LinkedCopies", "block_size"]
