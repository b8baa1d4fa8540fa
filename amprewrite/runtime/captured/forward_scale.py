"""The loss scale of one forward, the same number for all graphs that run in it.

The loss scale is there for the gradient of the loss, which enters when the forward is over. A forward that takes gradients itself,
as one that returns forces does, has no use for it: what enters would be scaled beyond fp16, and the model's result would be NaN. So

1. where the model's own code may run between graphs, the forward has a scale and an inverse of its own;
2. the first gradient that enters a result while the forward is under way sets both to 1, for all graphs of this forward. Both are
   read when gradients pass, and none has passed before;
3. later gradients of the same forward, of any order, find them at 1. The next forward starts with the scale again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amprewrite.graphs.fx.ops.scale_ops import on_device
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.runtime.ambient.hook_watch import hook_result

Pair = tuple[Tensor, Tensor]


class ForwardScale:
    """A scale and its inverse: 0-dim fp32 tensors. With `apart` they are copies, which `dropped` hears are set to 1."""

    def __init__(self, pair: Pair, apart: bool, dropped: Callable[[], None]) -> None:
        scale, inverse = pair
        self.apart = apart and scale is not inverse  # the same tensor is both where the scale is 1
        self.dropped = dropped
        self.under_way = True
        if self.apart:
            with torch.inference_mode(False), torch.no_grad():
                pair = scale.clone(), inverse.clone()
        self._first = pair
        self._pairs = {scale.device: pair}

    def on(self, device: torch.device) -> Pair:
        """The scale and its inverse on `device`."""
        pair = self._pairs.get(device)
        if pair is None:
            scale, inverse = self._first
            pair = self._pairs[device] = on_device(scale, device), on_device(inverse, device)
        return pair

    def watch(self, results: Iterable[Any]) -> None:
        """Watch for gradients that enter one of these while the forward is under way."""
        if self.apart:
            for result in results:
                if isinstance(result, Tensor) and result.grad_fn is not None:
                    hook_result(result, self._entered)

    @uncaptured
    def _entered(self, gradient: Tensor) -> None:
        if self.under_way and self.apart:
            self.apart = False
            for pair in self._pairs.values():
                for number in pair:
                    number.data.fill_(1)  # a compiled graph that saved it for backward is to read the new number
            self.dropped()


def evaluates(root: nn.Module) -> bool:
    """Whether a model is in eval mode throughout: nothing in it is in train mode."""
    return not any(module.training for module in root.modules())


__all__ = ["ForwardScale", "evaluates"]
