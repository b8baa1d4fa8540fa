"""Compute a product of bf16 operands with an fp32 result: Tensor Cores compute the sums in fp32, and nothing rounds these sums.

The backward is the same as for a bf16 product: the gradient of the result is rounded to bf16, and so are the gradients of both operands.
The product saves the operands rounded to bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.tables.formats import BASE


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the fp32 product of two bf16 matrices.

    NVIDIA GPUs have a kernel for bf16 operands and an fp32 result. Other devices, and exported programs, multiply fp32 copies.
    """
    has_kernel = a.is_cuda and torch.version.hip is None and not torch.compiler.is_exporting()
    return torch.mm(a, b, out_dtype=torch.float32) if has_kernel else torch.mm(a.float(), b.float())


def wide_linear(x: Tensor, w: Tensor, bias: Tensor | None, transposed: bool = False) -> Tensor:
    """Return `x · wᵀ + bias`, or `x · w + bias` if `transposed`, in fp32. `x` (..., k) and `w` are rounded to bf16 first."""
    x, w = x.to(BASE.dtype), w.to(BASE.dtype)
    w = w if transposed else w.t()
    product: Tensor = _Wide.apply(x, w) if torch.is_grad_enabled() else _rows_by(x, w)
    return product if bias is None else product + bias


def _rows_by(x: Tensor, w: Tensor) -> Tensor:
    return wide_product(x.reshape(-1, x.shape[-1]), w).reshape(*x.shape[:-1], w.shape[-1])


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)  # if no loss reads the result, keep its gradient None, not zeros (see `scale_ops._Cross`)
        ctx.save_for_backward(x, w)
        return _rows_by(x, w)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        if gradient is None:
            return None, None
        x, w = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1]).to(x.dtype)
        in_ = (rows @ w.t()).reshape(x.shape) if ctx.needs_input_grad[0] else None
        return in_, x.reshape(-1, x.shape[-1]).t() @ rows if ctx.needs_input_grad[1] else None
