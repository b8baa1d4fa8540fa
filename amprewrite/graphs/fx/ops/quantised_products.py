"""A matrix product that reads fp8 copies of its operands, forward and backward.

    x8 = quantise(x, "x", recipe, gemms)        once for a value, for all products that read it
    w8 = quantise(w, "w", recipe, gemms)
    y = quantised_product(None, None, bias, x8, w8, recipe, gemms)

The product saves the copies for its backward. It saves a value only if one of its GEMMs reads that value. A copy has no gradient; a *link*
has one: a tensor of the value's shape without memory that passes its gradient on to the value. So gradients reach the value though nothing
holds its numbers.

Under `create_graph=True` the backward can be differentiated. The gradients keep their values; their derivatives are those of the product in
the format of the values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from amprewrite.graphs.fx.ops.scaled_casts import Scaled, multiply, quantise_matrix, quantise_rows, scale_of
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.tables.recipes import GRAD_IN, GRAD_WEIGHT, OUT, READS, RECIPES, ROWS, STRAIGHT, TENSOR, TURNED, G, Recipe


class Quantised(NamedTuple):
    """The copies of one value that GEMMs read, with the link that carries its gradient."""

    link: Tensor
    straight: Scaled | None
    turned: Scaled | None


def ways(role: str, gemms: tuple[str, ...]) -> tuple[str, ...]:
    """Layouts in which `gemms` read the matrix of this role: straight, transposed, or both."""
    return tuple(dict.fromkeys(way for gemm in gemms for each, way in READS[gemm] if each == role))


def quantise(value: Tensor, role: str, recipe: str, gemms: tuple[str, ...], transposed: bool = False) -> Quantised:
    """The copies of `value` that `gemms` read. With `transposed`, it is the weight of a product x · w instead of x · wᵀ."""
    matrix = value.detach()  # a scale has no gradient
    matrix = matrix.t() if transposed else matrix.reshape(-1, matrix.shape[-1])
    link = _HistoryLink.apply(value) if torch.is_grad_enabled() else _linked(value)
    return Quantised(link, *copies(matrix, role, RECIPES[recipe], gemms))


def copies(matrix: Tensor, role: str, recipe: Recipe, gemms: tuple[str, ...]) -> tuple[Scaled | None, Scaled | None]:
    """(straight copy, transposed copy) of a matrix, each None if no GEMM of `gemms` reads it.

    With one scale for the tensor both share it. If only the straight copy has scales of rows, the tensor's is the smallest of these.
    """
    fmt, wanted = recipe.format(role), ways(role, gemms)
    by_rows = [way for way in wanted if recipe.scaling(role, way) == ROWS]
    made = {STRAIGHT: quantise_rows(matrix, fmt, recipe.power_of_two)} if STRAIGHT in by_rows else {}
    whole = [way for way in wanted if way not in by_rows]
    if whole:
        known = made[STRAIGHT].scale if made and not guard_or_false(matrix.numel() == 0) else None
        scale = scale_of(matrix, fmt, TENSOR, recipe.power_of_two) if known is None else known.amin()
        straight, turned = quantise_matrix(matrix, fmt, scale, STRAIGHT in whole, TURNED in whole)
        made |= {way: Scaled(straight if way == STRAIGHT else turned, scale) for way in whole}
    if TURNED in by_rows:
        scale = scale_of(matrix.t(), fmt, ROWS, recipe.power_of_two)
        made[TURNED] = Scaled(quantise_matrix(matrix, fmt, scale.t(), False, True)[1], scale)
    return made.get(STRAIGHT), made.get(TURNED)


def _linked(value: Tensor) -> Tensor:
    return value.new_empty(()).expand(value.shape)


class _HistoryLink(torch.autograd.Function):
    """Autograd node that returns a tensor without memory with the shape and the autograd history of a value."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return _linked(value)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class _Straight(torch.autograd.Function):
    """Returns the second operand with the autograd history of the first."""

    @staticmethod
    def forward(ctx: Any, history: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def quantised_product(
    x: Tensor | None, w: Tensor | None, bias: Tensor | None, x8: Quantised | None, w8: Quantised | None,
    recipe: str, gemms: tuple[str, ...], transposed: bool = False,
) -> Tensor:  # fmt: skip
    """`x · wᵀ + bias`, or `x · w + bias` if `transposed`, with `gemms` in fp8.

    `x` and `w` are None unless a GEMM reads them unquantised.
    """
    x = x8.link if x is None else x  # type: ignore[union-attr]
    w = w8.link if w is None else w  # type: ignore[union-attr]
    if not torch.is_grad_enabled():
        return _out(x, w, bias, x8, w8, RECIPES[recipe], gemms, transposed)
    return _Product.apply(x, w, bias, x8, w8, RECIPES[recipe], gemms, transposed)


def _out(
    x: Tensor, w: Tensor, bias: Tensor | None, x8: Quantised | None, w8: Quantised | None, recipe: Recipe, gemms: tuple[str, ...],
    transposed: bool,
) -> Tensor:  # fmt: skip
    if OUT not in gemms:
        return torch.nn.functional.linear(x, w.t() if transposed else w, bias)
    product = multiply(x8.straight, w8.straight, x.dtype, OUT in recipe.fast, bias)  # type: ignore[union-attr, arg-type]
    return product.reshape(*x.shape[:-1], product.shape[-1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, x8: Quantised | None, w8: Quantised | None, recipe: Recipe,
        gemms: tuple[str, ...], transposed: bool,
    ) -> Tensor:  # fmt: skip
        ctx.recipe, ctx.gemms, ctx.transposed = recipe, gemms, transposed
        nothing = (None, None)
        x_turned = x8.turned if GRAD_WEIGHT in gemms and x8 is not None else nothing
        w_turned = w8.turned if GRAD_IN in gemms and w8 is not None else nothing
        ctx.save_for_backward(x, w, *(x_turned or nothing), *(w_turned or nothing))
        return _out(x, w, bias, x8, w8, recipe, gemms, transposed)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w, x_data, x_scale, w_data, w_scale = ctx.saved_tensors
        x8 = None if x_data is None else Scaled(x_data, x_scale)
        w8 = None if w_data is None else Scaled(w_data, w_scale)
        with torch.no_grad():
            found = _gradients(ctx, gradient, x, w, x8, w8)
        if torch.is_grad_enabled():
            found = _differentiable(ctx, found, gradient, x, w, x8, w8)
        bias = gradient.sum(tuple(range(gradient.dim() - 1))) if ctx.needs_input_grad[2] else None
        return (*found, bias, None, None, None, None, None)


Found = tuple[Tensor | None, Tensor | None]


def _gradients(ctx: Any, gradient: Tensor, x: Tensor, w: Tensor, x8: Scaled | None, w8: Scaled | None) -> Found:
    """(gradient of x, gradient of w). The gradient of y is quantised once for both."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    needed = {GRAD_IN: ctx.needs_input_grad[0], GRAD_WEIGHT: ctx.needs_input_grad[1]}
    fp8 = tuple(gemm for gemm in ctx.gemms if needed.get(gemm))
    straight, turned = copies(rows, G, ctx.recipe, fp8)
    in_, weight = None, None
    if needed[GRAD_IN]:
        if straight is not None and w8 is not None:
            in_ = multiply(straight, w8, gradient.dtype, GRAD_IN in ctx.recipe.fast)
        else:
            in_ = rows @ (w.t() if ctx.transposed else w)
        in_ = in_.reshape(x.shape)
    if needed[GRAD_WEIGHT]:
        if turned is not None and x8 is not None:
            weight = multiply(turned, x8, gradient.dtype, GRAD_WEIGHT in ctx.recipe.fast)
        else:
            weight = rows.t() @ x.reshape(-1, x.shape[-1])
        weight = weight.t() if ctx.transposed else weight
    return in_, weight


def _differentiable(ctx: Any, found: Found, gradient: Tensor, x: Tensor, w: Tensor, x8: Scaled | None, w8: Scaled | None) -> Found:
    """The gradients with an autograd history: that of the product of x and w in their own format."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    x = x if x8 is None else _Straight.apply(x, x8.values().t().to(x.dtype).reshape(x.shape))
    values = None if w8 is None else w8.values() if ctx.transposed else w8.values().t()
    w = w if values is None else _Straight.apply(w, values.to(w.dtype))
    in_, weight = found
    if in_ is not None:
        in_ = _Straight.apply((rows @ (w.t() if ctx.transposed else w)).reshape(x.shape), in_)
    if weight is not None:
        exact = rows.t() @ x.reshape(-1, x.shape[-1])
        weight = _Straight.apply(exact.t() if ctx.transposed else exact, weight)
    return in_, weight


__all__ = ["Quantised", "quantise", "quantised_product"]
