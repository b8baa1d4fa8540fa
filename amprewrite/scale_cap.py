"""The loss scale where nobody steps: gradients of inputs, first penalties, frozen networks that others learn through.

A dynamic scale comes down when a step overflows. Where no optimizer is guarded nothing brings it down, and a gradient of 1 at a
half-precision result would be infinite at the border, in silence. So until one is, each call of a graph takes copies of the scale
and its inverse, and the first gradient that enters brings them down to what leaves room above it. Both stay powers of two, so a
gradient that would not have overflowed is the same, bit for bit, but for what vanishes below fp16's smallest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor

from amprewrite.formats import FP32
from amprewrite.fused_copy import is_plain
from amprewrite.passes.insert_casts import CAST
from amprewrite.scale_ops import scale_gradient

ROOM = 2.0**8
"""What the largest entering gradient becomes, at most: 2**8 below fp16's end, 2**32 above its smallest number."""
_LEAST = 2.0**-100
"""A scale is never 0, whatever enters."""


def low_results(graph: torch.fx.Graph) -> tuple[int, ...]:
    """Places among the results of a scaled graph whose gradients go on in half precision: a cast to fp32 is all they are."""
    (output,) = graph.find_nodes(op="output")
    results = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
    return tuple(place for place, result in enumerate(results) if _is_low(result))


def _is_low(result: Any) -> bool:
    if not isinstance(result, torch.fx.Node) or result.target is not scale_gradient:
        return False
    inner = result.args[0]
    return isinstance(inner, torch.fx.Node) and inner.meta.get(CAST) == FP32.name


def cap(results: Sequence[Any], places: tuple[int, ...], scale: Tensor, inverse: Tensor) -> None:
    """Let the first gradient that enters one of `results` at `places` lower `scale` and `inverse`, 0-dim fp32, in place."""
    entered: list[bool] = []

    def lower(gradient: Tensor) -> None:
        if entered or not is_plain(gradient) or not gradient.numel():
            return
        entered.append(True)
        with torch.no_grad():
            fits = torch.exp2(torch.floor(torch.log2(ROOM / gradient.detach().abs().amax().float())))
            scale.copy_(torch.minimum(scale, fits.clamp(min=_LEAST)))
            inverse.copy_(scale.reciprocal())

    for place in places:
        if isinstance(results[place], Tensor) and results[place].requires_grad:
            results[place].register_hook(lower)


__all__ = ["cap", "low_results"]
