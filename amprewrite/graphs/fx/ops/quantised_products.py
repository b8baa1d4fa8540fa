"""Compute a matrix product from fp8 copies of its operands, in the forward and in the backward.

    x8 = quantise(x, "x", recipe, gemms)        once for a value, for all products that read it
    w8 = quantise(w, "w", recipe, gemms)
    y = quantised_product(None, None, bias, x8, w8, recipe, gemms)

The two None are the places of the unquantised x and w. These are passed only if a GEMM of the product that does not run in fp8 reads them
(`gemms` names the GEMMs in fp8). The product saves the fp8 copies, and the unquantised operands that it gets, for its backward. The copies
are detached from autograd. So `quantise` adds a *link* to them: a tensor with the shape of the value, but without memory for the elements.
In the backward the link receives the gradient and passes it on to the value. So the value gets its gradient without being kept in memory.

A scale is the number by which a tensor, or each row, was multiplied so that its largest element becomes the largest number of the format.
The graph computes the scale from the value and frees both together, so there is no state, and nothing to save in a checkpoint. Elements
that are not finite do not count for the scale. They become NaN, and only those sums that contain them become NaN. If the device cannot
multiply fp8, the product of the quantised values is computed in fp32, then rounded to the dtype of the result.

Under `create_graph=True` the backward can be differentiated. The gradients have the same values as without this option. Their derivatives
are the derivatives of a product in the operands' own format, not in fp8.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn.functional import pad

from amprewrite.graphs.fx.ops.fp8_units import by_kernel, multiplies_fp8, multiply_units
from amprewrite.graphs.fx.ops.scale_ops import applied
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.tables.formats import (
    ALIGNMENT,
    GRAD_IN,
    GRAD_WEIGHT,
    OUT,
    READS,
    RECIPES,
    ROWS,
    SMALLEST,
    STRAIGHT,
    TENSOR,
    TURNED,
    WAYS,
    Format,
    G,
    Recipe,
)
from amprewrite.torch_internals.dispatch import is_legacy_batched

EXPONENT = 0x7F800000
"""Exponent bits of an fp32 number. Masking a positive number with these bits rounds it down to a power of two."""


class Scaled(NamedTuple):
    """An fp8 matrix that a GEMM reads along its last dim, and its scale."""

    data: Tensor
    scale: Tensor
    """The fp32 factor by which the matrix was multiplied: 0-dim, or a column with one number for each row."""

    def values(self) -> Tensor:
        """Return the matrix in fp32, divided by its scale."""
        return self.data.float() / self.scale


def scale_of(matrix: Tensor, fmt: Format, scaling: str, power_of_two: bool) -> Tensor:
    """Return the fp32 scale of `matrix` for `fmt`: a column with one scale for each row if `scaling` is ROWS, otherwise 0-dim.

    With `power_of_two`, scales are rounded down to powers of two.
    """
    by_rows = scaling == ROWS
    found = None if by_rows else by_kernel(matrix, lambda kernels: kernels.scale_of(matrix, fmt.dtype, SMALLEST, power_of_two))
    if found is not None:
        return found
    if guard_or_false(matrix.numel() == 0):
        amax = matrix.new_zeros((matrix.shape[0], 1) if by_rows else ())
    else:
        finite = torch.where(matrix.isfinite(), matrix, 0).abs()
        amax = finite.amax(-1, keepdim=True) if by_rows else finite.amax()
    # divide in fp64, because compilers replace a division in fp32 by a multiplication with a rounded reciprocal
    scale = (fmt.max / amax.double().clamp(min=SMALLEST)).float()
    return power_below(scale) if power_of_two else scale


def power_below(scale: Tensor) -> Tensor:
    """Return `scale`, which is positive and fp32, rounded down to a power of two."""
    if is_legacy_batched(scale):  # vmap cannot view fp32 as int32, so divide: exact, unless compiled, which this tensor never is
        return scale / (2 * torch.frexp(scale).mantissa)
    return (scale.view(torch.int32) & EXPONENT).view(torch.float32)


def constant_scale(like: Tensor, largest: float, fmt: Format, power_of_two: bool) -> Tensor:
    """Return the 0-dim fp32 scale for magnitudes up to `largest` in `fmt`, on the device of `like`.

    With `power_of_two`, the scale is rounded down to a power of two.
    """
    scale = fmt.max / max(largest, SMALLEST)
    return like.new_full((), 2.0 ** (math.frexp(scale)[1] - 1) if power_of_two else scale, dtype=torch.float32)


def quantise_rows(matrix: Tensor, fmt: Format, power_of_two: bool) -> Scaled:
    """Return `matrix` quantised to `fmt`, each row with its own scale. With `power_of_two`, scales are rounded down to powers of two."""
    found = by_kernel(matrix, lambda kernels: kernels.cast_rows(matrix, fmt.dtype, SMALLEST, power_of_two))
    if found is not None:
        return Scaled(*found)  # by our Triton kernel, which reads the matrix only once
    scale = scale_of(matrix, fmt, ROWS, power_of_two)
    return Scaled(quantise_matrix(matrix, fmt, scale, True, False)[0], scale)


def round_scaled(scaled: Tensor, fmt: Format) -> Tensor:
    """Return the fp32 numbers `scaled`, rounded to nearest even in `fmt`. Numbers beyond its range become ±max, infinities become NaN.

    The clamp is explicit because torch's casts differ. In e4m3, numbers beyond the range and infinities become NaN before torch 2.12, and
    ±max from 2.12 on. In e5m2 they become infinities.
    """
    return torch.where(scaled.isinf(), math.nan, scaled.clamp(-fmt.max, fmt.max)).to(fmt.dtype)


def quantise_matrix(matrix: Tensor, fmt: Format, scale: Tensor, straight: bool, turned: bool) -> tuple[Tensor, Tensor]:
    """Return (`matrix * scale` in `fmt`, its transpose). `scale` is 0-dim, a column or a row.

    `straight` tells whether the caller needs the first result, `turned` whether it needs the transpose. A result that it does not need may
    be empty. On a GPU with fp8 units the transpose has its own memory: GEMMs read along rows, and the first result may be freed earlier.
    """
    found: tuple[Tensor, Tensor] | None = by_kernel(matrix, lambda kernels: kernels.cast_both(matrix, scale, fmt.dtype, straight, turned))
    if found is not None:
        return found
    data = round_scaled(matrix.float() * scale, fmt)
    return data, data.t().contiguous() if turned and multiplies_fp8(matrix.device) else data.t()


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool, bias: Tensor | None = None) -> Tensor:
    """Return `a · bᵀ`, divided by both scales, plus `bias`, as `dtype`. `a` is (m, k), `b` (n, k). If `fast`, sums may have fewer bits."""
    if not multiplies_fp8(a.data.device):
        product = torch.mm(a.values(), b.values().t()).to(dtype)
        return product if bias is None else product + bias
    (left, ours), (right, theirs) = ((each.data.contiguous(), each.scale.reciprocal()) for each in (a, b))
    missing = -left.shape[1] % ALIGNMENT  # number of zeros to append along k, because the kernel needs aligned sizes; they change no sum
    if missing:
        left, right = (pad(each.view(torch.uint8), (0, missing)).view(each.dtype) for each in (left, right))
    bias = None if bias is None else bias.expand(right.shape[0]).contiguous()  # the kernel ignores strides: copy the bias
    if ours.dim() == theirs.dim() == 0:
        return multiply_units(left, right, ours, theirs, bias, dtype, fast)
    if fast:
        ours, theirs = (scale.expand(each.shape[0], 1).contiguous() for scale, each in ((ours, left), (theirs, right)))
        return multiply_units(left, right, ours, theirs, bias, dtype, True)
    one = ours.new_ones(())  # unless `fast`, the kernel is slow with a scale for each row: pass scales of 1, and scale the result
    product = multiply_units(left, right, one, one, None, dtype, False) * (ours * theirs.t()).to(dtype)
    return product if bias is None else product + bias


class Quantised(NamedTuple):
    """The fp8 copies of one value: `straight` (untransposed) and `turned` (transposed), each None if no GEMM reads it.

    `link` is a tensor with the shape of the value, but without memory for its elements. It passes its gradient on to the value.
    """

    link: Tensor
    straight: Scaled | None
    turned: Scaled | None


def quantise(
    value: Tensor, role: str, recipe: str, gemms: tuple[str, ...], transposed: bool = False, largest: float | None = None
) -> Quantised:
    """Return a `Quantised`: the fp8 copies of `value` that the GEMMs in `gemms` read, and a link that passes gradients to `value`.

    `role` is "x" or "w", and `recipe` is the name of a recipe. `value` has the shape (..., k); its leading dims are joined to rows. With
    `transposed`, `value` is a weight of shape (k, n) in a product x · w instead of x · wᵀ. If `largest` is given, a scale of the whole
    tensor is computed from `largest` instead of `value`, and larger magnitudes saturate.
    """
    matrix = value.detach()  # gradients pass to `value` only through `link`, not through copies and scales
    matrix = matrix if transposed else matrix.reshape(-1, matrix.shape[-1])
    return Quantised(_link(value), *copies(matrix, role, RECIPES[recipe], gemms, transposed, largest))


def relinked(copy: Quantised, value: Tensor) -> Quantised:
    """Return `copy` with a new link, which passes gradients to `value`, a tensor with the same numbers and another autograd history."""
    return copy._replace(link=_link(value))


def copies(
    matrix: Tensor, role: str, recipe: Recipe, gemms: tuple[str, ...], transposed: bool = False, largest: float | None = None
) -> tuple[Scaled | None, Scaled | None]:
    """Return (untransposed, transposed) fp8 copies of an operand or a gradient, each None if no GEMM named in `gemms` reads it.

    `role` is x or w for an operand, and g for a gradient. `matrix` is the operand, or its transpose if `transposed`. The recipe decides
    whether a copy has one scale for each row or one for the whole tensor. If `largest` is given, a scale for the whole tensor is computed
    from `largest`, and larger magnitudes saturate. Otherwise it is the smallest of the row scales if the other copy has row scales, and is
    computed from `matrix` if no copy has them.
    """
    fmt, layout = recipe.format(role), dict(zip(WAYS, reversed(WAYS) if transposed else WAYS, strict=True))
    scalings = {layout[way]: recipe.scaling(role, way) for gemm in gemms for each, way in READS[gemm] if each == role}
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
        both = zip(WAYS, quantise_matrix(matrix, fmt, scale, STRAIGHT in whole, TURNED in whole), strict=True)
        made |= {way: Scaled(data, scale) for way, data in both if way in whole}
    return made.get(layout[STRAIGHT]), made.get(layout[TURNED])


def from_kept(value: Tensor, data: Tensor, scale: Tensor) -> Quantised:
    """Return a `Quantised` for `value` whose untransposed copy is the stored `data` with `scale`. It passes no gradient to `value`."""
    return Quantised(_linked(value), Scaled(data, scale), None)


def _link(value: Tensor) -> Tensor:
    return _Straight.apply(value, _linked(value)) if torch.is_grad_enabled() else _linked(value)


def _linked(value: Tensor) -> Tensor:
    return value.new_empty(()).expand(value.shape)


class _Straight(torch.autograd.Function):
    """Autograd node that returns `value`. It passes the result's gradient unchanged (straight through) to another tensor, `history`."""

    @staticmethod
    def forward(ctx: Any, history: Tensor, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return value.detach()

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return gradient, None


def quantised_product(
    x: Tensor | None, w: Tensor | None, bias: Tensor | None, x8: Quantised | None, w8: Quantised | None,
    recipe: str, gemms: tuple[str, ...], transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Return `x · wᵀ + bias`, or `x · w + bias` if `transposed`. The GEMMs named in `gemms` run in fp8, in the forward and the backward.

    `x8` and `w8` are the fp8 copies of the operands, or None if no GEMM reads them. `x` of shape (..., k) and `w` are the operands
    themselves, or None if no GEMM reads them unquantised. `recipe` is the name of a recipe.
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
        ctx.set_materialize_grads(False)  # the gradient of a result that no loss reads stays None, not zeros (see `scale_ops._Cross`)
        ctx.recipe, ctx.gemms, ctx.transposed = recipe, gemms, transposed
        turned = [made.turned if made is not None and gemm in gemms else None for made, gemm in ((x8, GRAD_WEIGHT), (w8, GRAD_IN))]
        ctx.save_for_backward(x, w, *(part for each in turned for part in each or (None, None)))
        return _out(x, w, bias, x8, w8, recipe, gemms, transposed)

    @staticmethod
    @uncaptured
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if gradient is None:
            return (None,) * 8
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

    `gradient`, the gradient of the result, is quantised once for both GEMMs. `x8` and `w8` are transposed fp8 copies. A copy is None if the
    GEMM that would read it runs without fp8.
    """
    needed = {GRAD_IN: ctx.needs_input_grad[0], GRAD_WEIGHT: ctx.needs_input_grad[1]}
    fp8 = tuple(gemm for gemm in ctx.gemms if needed.get(gemm))
    straight, turned = copies(gradient.reshape(-1, gradient.shape[-1]), G, ctx.recipe, fp8)
    in_, weight = None, None
    if needed[GRAD_IN] and straight is not None and w8 is not None:
        in_ = multiply(straight, w8, gradient.dtype, GRAD_IN in ctx.recipe.fast).reshape(x.shape)
    elif needed[GRAD_IN]:
        in_ = _exact_in(ctx, gradient, x, w)
    if needed[GRAD_WEIGHT] and turned is not None and x8 is not None:
        weight = multiply(turned, x8, gradient.dtype, GRAD_WEIGHT in ctx.recipe.fast)
        weight = weight.t() if ctx.transposed else weight
    elif needed[GRAD_WEIGHT]:
        weight = _exact_weight(ctx, gradient, x)
    return in_, weight


def _exact_in(ctx: Any, gradient: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Return the gradient of x, computed without fp8."""
    return (gradient.reshape(-1, gradient.shape[-1]) @ (w.t() if ctx.transposed else w)).reshape(x.shape)


def _exact_weight(ctx: Any, gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of w, computed without fp8."""
    weight = gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    return weight.t() if ctx.transposed else weight


def _differentiable(ctx: Any, found: Found, gradient: Tensor, x: Tensor, w: Tensor, x8: Scaled | None, w8: Scaled | None) -> Found:
    """Return `found`, the gradients of x and w, with the autograd history of a product without fp8, so that they can be differentiated."""
    x = x if x8 is None else _Straight.apply(x, x8.values().t().to(x.dtype).reshape(x.shape))
    w = w if w8 is None else _Straight.apply(w, (w8.values() if ctx.transposed else w8.values().t()).to(w.dtype))
    in_, weight = found
    in_ = None if in_ is None else applied(_Straight, _exact_in(ctx, gradient, x, w), in_)
    return in_, None if weight is None else applied(_Straight, _exact_weight(ctx, gradient, x), weight)
