"""Compute the cross entropy of many low logits in parts: the same results as from an fp32 copy, in a fraction of the memory.

The fp32 copy of the logits, the log-softmax and the fp32 gradients of both take four times the memory of the low logits and their low
gradient. So this file computes the log-softmax for some rows at a time, does not save the log-softmax, and computes it again in backward.
Rows do not depend on each other, and PyTorch's own kernels compute each part: on a CPU the results are equal, bit for bit, to the results
of a computation of all rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.torch_internals.autograd import in_forward_mode

FROM_BYTES = 1 << 27
"""Least size of the fp32 copy of the logits, in bytes, for which the saved memory is worth a few more kernel launches."""
PARTS = 4
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_aten = torch.ops.aten
_IGNORED = -100


def cross_entropy_of_low(
    logits: Tensor, target: Tensor, ignore_index: int = _IGNORED, reduction: str = "mean", wide: Tensor | None = None
) -> Tensor:
    """Return `cross_entropy(logits.float(), target, ...)` of low `logits` with PyTorch's options, computed in parts if they are large.

    The parts need `logits` of shape (rows, classes) and `target` of shape (rows,). Other shapes, small logits and forward-mode AD are left
    to PyTorch's function. `wide` is the fp32 copy of the logits if the graph makes this copy for other readers; the forward then reads it.
    """
    parts = logits.numel() * 4 >= FROM_BYTES and target.dim() == 1 and logits.dim() == 2
    if not parts or in_forward_mode():
        return torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction=reduction)
    loss: Tensor = _InParts.apply(logits, target, ignore_index, reduction, logits.detach() if wide is None else wide.detach())
    return loss


def _parts(rows: int) -> Iterator[slice]:
    size = -(-rows // PARTS)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


class _InParts(torch.autograd.Function):
    """Autograd node that computes cross entropy for a part of the rows at a time.

    scale_ops.py gives the reason for the old style of `forward(ctx, ...)`.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore_index: int, reduction: str, read: Tensor) -> Tensor:
        ignored = target == ignore_index
        chosen = target.masked_fill(ignored, 0).unsqueeze(1)
        picked = [torch.log_softmax(read[part], 1, dtype=torch.float32).gather(1, chosen[part]) for part in _parts(len(read))]
        # `picked` has one class only, the target's, so each target is class 0 here. nll_loss adds up these rows in the same order as rows
        # with all classes, so the mean is the same bit for bit.
        only = torch.zeros_like(target).masked_fill(ignored, _IGNORED)
        loss, weight = _aten.nll_loss_forward(torch.cat(picked), only, None, REDUCTIONS[reduction], _IGNORED)
        ctx.save_for_backward(logits, target, weight)
        ctx.ignore_index, ctx.reduction = ignore_index, reduction
        return loss

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        logits, target, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: this gradient must be differentiable, so PyTorch's function computes it
            loss = torch.nn.functional.cross_entropy(logits.float(), target, ignore_index=ctx.ignore_index, reduction=ctx.reduction)
            return (*torch.autograd.grad(loss, logits, gradient, create_graph=True), None, None, None, None)
        left = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for part in _parts(len(logits)):
            given = gradient[part] if ctx.reduction == "none" else gradient
            left[part] = _gradient(logits[part], target[part], given, ctx.reduction, ctx.ignore_index, weight)
        return left, None, None, None, None


def _gradient(logits: Tensor, target: Tensor, given: Tensor, reduction: str, ignore_index: int, weight: Tensor) -> Tensor:
    """Return the fp32 gradient of the logits in some rows, from `given`, the gradient of the loss.

    `weight` is the number of targets that count for a mean, as the forward returned it. This is a separate function so that its
    intermediate tensors are freed before the next rows.
    """
    logs = torch.log_softmax(logits, 1, dtype=torch.float32)
    inner = _aten.nll_loss_backward(given, logs, target, None, REDUCTIONS[reduction], ignore_index, weight)
    found: Tensor = _aten._log_softmax_backward_data(inner, logs, 1, torch.float32)
    return found
