"""Compute a matrix product from fp8 copies of its operands, in the forward and in the backward.

    x8 = quantise(x, "x", recipe, gemms)        once for a value, for all products that read it
    w8 = quantise(w, "w", recipe, gemms)
    y = quantised_product(None, None, bias, x8, w8, recipe, gemms)

The product saves the fp8 copies for its backward. It saves an unquantised operand only if one of its GEMMs reads that operand. A copy has
no gradient, so the copies of a value carry a *link*: a tensor of the value's shape without memory, which passes its gradient on to the
value. So the value gets its gradient, though its numbers need not stay in memory.

Under `create_graph=True` the backward can be differentiated. The gradients have the same values as without this option. Their derivatives
are the derivatives of a product in the operands' own format, not in fp8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from amprewrite.graphs.fx.ops.scaled_casts import Scaled, constant_scale, multiply, quantise_matrix, quantise_rows, scale_of
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.tables.recipes import GRAD_IN, GRAD_WEIGHT, OUT, READS, RECIPES, ROWS, STRAIGHT, TENSOR, TURNED, WAYS, G, Recipe

_AS_READ = {way: way for way in WAYS}


class Quantised(NamedTuple):
    """The fp8 copies of one value: `straight` (untransposed) and `turned` (transposed), each None if no GEMM reads it.

    `link` is a tensor of the value's shape without memory, through which the value gets its gradient.
    """

    link: Tensor
    straight: Scaled | None
    turned: Scaled | None


def ways(role: str, gemms: tuple[str, ...]) -> tuple[str, ...]:
    """Return the layouts (untransposed, transposed or both) in which `gemms` read an operand (`role` x, w) or the gradient (`role` g)."""
    return tuple(dict.fromkeys(way for gemm in gemms for each, way in READS[gemm] if each == role))


def quantise(
    value: Tensor, role: str, recipe: str, gemms: tuple[str, ...], transposed: bool = False, largest: float | None = None
) -> Quantised:
    """Return the fp8 copies of `value` that `gemms` read, with a memoryless tensor (link) through which `value` gets its gradient.

    `role` is "x" or "w", and `recipe` is the name of a recipe. `value` has the shape (..., k); its leading dims are joined to rows. With
    `transposed`, `value` is a weight of shape (k, n) in a product x · w instead of x · wᵀ. With `largest`, the scale of the tensor is a
    constant for magnitudes up to this number, and larger magnitudes saturate.
    """
    matrix = value.detach()  # copies and scales pass no gradient on; `link` passes the gradient to `value`
    link = _linked(value)
    link = _Straight.apply(value, link) if torch.is_grad_enabled() else link
    if transposed:
        return Quantised(link, *reversed(copies(matrix, role, RECIPES[recipe], gemms, {STRAIGHT: TURNED, TURNED: STRAIGHT})))
    return Quantised(link, *copies(matrix.reshape(-1, matrix.shape[-1]), role, RECIPES[recipe], gemms, largest=largest))


def copies(
    matrix: Tensor, role: str, recipe: Recipe, gemms: tuple[str, ...], layouts: Mapping[str, str] = _AS_READ, largest: float | None = None
) -> tuple[Scaled | None, Scaled | None]:
    """Return the fp8 copies (untransposed, transposed) of `matrix`; each is None if no GEMM of `gemms` reads it.

    `layouts` maps each layout in which GEMMs read the operand to a layout of `matrix`: for a transposed operand, the two are exchanged. If
    the recipe has one scale for a tensor, both copies share the scale. If one copy has a scale for each row, the other copy has the
    smallest of these scales, which is the scale of the whole tensor. `role` is x, w, or g for a gradient. `largest` is as for `quantise`.
    """
    fmt, scalings = recipe.format(role), {layouts[way]: recipe.scaling(role, way) for way in ways(role, gemms)}
    made: dict[str, Scaled] = {}
    if scalings.get(STRAIGHT) == ROWS:
        made[STRAIGHT] = quantise_rows(matrix, fmt, recipe.power_of_two)
    if scalings.get(TURNED) == ROWS:
        scale = scale_of(matrix.t(), fmt, ROWS, recipe.power_of_two)
        made[TURNED] = Scaled(quantise_matrix(matrix, fmt, scale.t(), False, True)[1], scale)
    whole = [way for way in scalings if way not in made]
    if whole:
        known = [each.scale for each in made.values()] if not guard_or_false(matrix.numel() == 0) else []
        if largest is not None:
            scale = constant_scale(matrix, largest, fmt, recipe.power_of_two)
        else:
            scale = known[0].amin() if known else scale_of(matrix, fmt, TENSOR, recipe.power_of_two)
        straight, turned = quantise_matrix(matrix, fmt, scale, STRAIGHT in whole, TURNED in whole)
        made |= {way: Scaled(straight if way == STRAIGHT else turned, scale) for way in whole}
    return made.get(STRAIGHT), made.get(TURNED)


def from_kept(value: Tensor, data: Tensor, scale: Tensor) -> Quantised:
    """Return a `Quantised` for `value` whose untransposed copy is the stored `data` with `scale`. It passes no gradient to `value`."""
    return Quantised(_linked(value), Scaled(data, scale), None)


def _linked(value: Tensor) -> Tensor:
    return value.new_empty(()).expand(value.shape)


class _Straight(torch.autograd.Function):
    """Autograd node that returns `value` and sends its gradient to `history`, a tensor with the history of the unquantised value."""

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
    """Return `x · wᵀ + bias`, or `x · w + bias` if `transposed`. The GEMMs named in `gemms` run in fp8, in the forward and the backward.

    `x8` and `w8` are the fp8 copies of the operands, and None if no GEMM reads them. `x` of shape (..., k) and `w` are the operands
    themselves, and None unless a GEMM reads them unquantised. `recipe` is the name of a recipe.
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
        turned = [made.turned if made is not None and gemm in gemms else None for made, gemm in ((x8, GRAD_WEIGHT), (w8, GRAD_IN))]
        ctx.save_for_backward(x, w, *(part for each in turned for part in each or (None, None)))
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
    """Return (gradient of x, gradient of w), each None if it is not needed.

    `gradient`, the gradient of the result, is quantised once for both GEMMs. `x8` and `w8` are transposed fp8 copies; None for a bf16 GEMM.
    """
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
    """Return the gradients `found` with an autograd history for second derivatives, as if computed from x and w without fp8."""
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
