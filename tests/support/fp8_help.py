"""A product in fp8 written out from torchao's recipes, and torchao's own where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = {"fp8": "tensorwise", "fp8-rowwise": "rowwise", "fp8-safe": "rowwise_with_gw_hp"}
"""torchao's name of the recipe of each preset."""


def quantised(matrix: Tensor, dtype: torch.dtype, dim: int | None, power_of_two: bool) -> Tensor:
    """What `matrix` is after a cast to fp8 and back, in fp32; `dim` is summed, so that each of the others has a scale."""
    amax = matrix.abs().max() if dim is None else matrix.abs().amax(dim, keepdim=True)
    largest = torch.finfo(dtype).max
    scale = (largest / amax.double().clamp(min=1e-12)).float()
    scale = torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale
    return (matrix.float() * scale).clamp(-largest, largest).to(dtype).float() / scale


class Written(torch.autograd.Function):
    """`x · wᵀ` of two matrices by one of torchao's recipes, all casts made where they are read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.recipe, rows = recipe, None if recipe == "tensorwise" else 1
        power = recipe != "tensorwise"
        return torch.mm(quantised(x, E4M3, rows, power), quantised(w, E4M3, rows, power).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        tensorwise, power = ctx.recipe == "tensorwise", ctx.recipe != "tensorwise"
        low = E5M2 if tensorwise else E4M3
        over_w = 0 if ctx.recipe == "rowwise" else None
        x_grad = torch.mm(quantised(g, low, None if tensorwise else 1, power), quantised(w, E4M3, over_w, power)).to(g.dtype)
        if ctx.recipe == "rowwise_with_gw_hp":
            return x_grad, torch.mm(g.t(), x), None
        dim = None if tensorwise else 0
        return x_grad, torch.mm(quantised(g, low, dim, power).t(), quantised(x, E4M3, dim, power)).to(g.dtype), None


def written_linear(x: Tensor, w: Tensor, bias: Tensor | None, recipe: str) -> Tensor:
    made = Written.apply(x.reshape(-1, x.shape[-1]), w, recipe).reshape(*x.shape[:-1], len(w))
    return made if bias is None else made + bias


def torchao_linear(x: Tensor, w: Tensor, bias: Tensor | None, recipe: str) -> Tensor:
    """torchao's emulation of its Float8Linear; skips the test where it is not installed."""
    config = pytest.importorskip("torchao.float8.config").Float8LinearConfig.from_recipe_name(recipe)
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    emulated = ScaledMMConfig(emulate=True)
    made = matmul_with_hp_or_float8_args.apply(x, w.t(), LinearMMConfig(emulated, emulated, emulated), config)
    return made if bias is None else made + bias


LINEARS = {"written": written_linear, "torchao": torchao_linear}

__all__ = ["LINEARS", "RECIPES", "quantised", "written_linear"]
