"""fp8 matrices with their scales, and the product of two: functions that a rewritten graph calls where the plan says fp8.

A scale is the number by which a value was multiplied, so that the largest element of its tensor or row becomes the largest of the format.
The graph computes it from the value and drops it with the value: no state, nothing in a checkpoint. Non-finite elements do not count in it
and become NaN, which passes through the product as in bf16; other rows stay right.

If the device cannot multiply fp8, the product of the quantised values is computed in fp32 and rounded once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn.functional import pad

from amprewrite.graphs.fx.ops.fp8_units import by_kernel, multiplies_fp8, multiply_units
from amprewrite.tables.formats import Format
from amprewrite.tables.recipes import ALIGNMENT, ROWS

SMALLEST = 1e-12
"""Lower limit of amax, so that a tensor of zeros has a scale, too."""
EXPONENT = 0x7F800000
"""Exponent bits of an fp32 number. Masking with them leaves its power of two."""


class Scaled(NamedTuple):
    """A matrix in fp8 that a GEMM reads along its last dim."""

    data: Tensor
    scale: Tensor
    """fp32: 0-dim, or a column with one number for each row."""

    def values(self) -> Tensor:
        """The matrix in fp32, divided by its scale."""
        return self.data.float() / self.scale


def scale_of(matrix: Tensor, fmt: Format, scaling: str, power_of_two: bool) -> Tensor:
    """The scale of a matrix, or of each of its rows, in `fmt`."""
    found = by_kernel(matrix, lambda kernels: kernels.amax_of(matrix)) if scaling != ROWS else None
    if guard_or_false(matrix.numel() == 0):
        found = matrix.new_zeros((matrix.shape[0], 1) if scaling == ROWS else ())
    if found is None:
        finite = torch.where(matrix.isfinite(), matrix, 0).abs()
        found = finite.amax(-1, keepdim=True) if scaling == ROWS else finite.amax()
    # in fp64, because compilers divide fp32 numbers by multiplying with a rounded reciprocal
    scale = (fmt.max / found.double().clamp(min=SMALLEST)).float()
    return (scale.view(torch.int32) & EXPONENT).view(torch.float32) if power_of_two else scale


def quantise_rows(matrix: Tensor, fmt: Format, power_of_two: bool) -> Scaled:
    """The matrix in `fmt` with a scale for each row. Our kernel reads it once."""
    found = by_kernel(matrix, lambda kernels: kernels.cast_rows(matrix, fmt.dtype, SMALLEST, power_of_two))
    if found is not None:
        return Scaled(*found)
    scale = scale_of(matrix, fmt, ROWS, power_of_two)
    return Scaled(quantise_matrix(matrix, fmt, scale, True, False)[0], scale)


def round_scaled(scaled: Tensor, fmt: Format) -> Tensor:
    """fp32 numbers rounded to nearest even in `fmt`, with numbers beyond its range clamped to ±max. Infinities become NaN.

    Casts overflow to NaN before torch 2.12 and saturate since, infinities too.
    """
    return torch.where(scaled.isinf(), math.nan, scaled.clamp(-fmt.max, fmt.max)).to(fmt.dtype)


def quantise_matrix(matrix: Tensor, fmt: Format, scale: Tensor, straight: bool, turned: bool) -> tuple[Tensor, Tensor]:
    """(matrix times scale in `fmt`, its transpose). `straight` and `turned` say which are wanted. `scale` is 0-dim, a column or a row.

    GPU kernels read along rows alone: there the transpose has memory of its own, so that the other copy can be freed.
    """
    found: tuple[Tensor, Tensor] | None = by_kernel(matrix, lambda kernels: kernels.cast_both(matrix, scale, fmt.dtype, straight, turned))
    if found is not None:
        return found
    data = round_scaled(matrix.float() * scale, fmt)
    return data, data.t().contiguous() if turned and multiplies_fp8(matrix.device) else data.t()


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool, bias: Tensor | None = None) -> Tensor:
    """`a · bᵀ` as `dtype`, plus the bias. With `fast`, the kernel may accumulate with fewer bits."""
    if not multiplies_fp8(a.data.device):
        product = torch.mm(a.values(), b.values().t()).to(dtype)
        return product if bias is None else product + bias
    (left, ours), (right, theirs) = ((each.data.contiguous(), each.scale.reciprocal()) for each in (a, b))
    missing = -left.shape[1] % ALIGNMENT  # the rows of x and g vary with the batch; zeros add nothing
    if missing:
        left, right = (pad(each.view(torch.uint8), (0, missing)).view(each.dtype) for each in (left, right))
    bias = None if bias is None else bias.expand(right.shape[0]).contiguous()  # the kernel ignores its strides
    if ours.dim() == theirs.dim() == 0:
        return multiply_units(left, right, ours, theirs, bias, dtype, fast)
    if fast:
        ours, theirs = (scale.expand(each.shape[0], 1).contiguous() for scale, each in ((ours, left), (theirs, right)))
        return multiply_units(left, right, ours, theirs, bias, dtype, True)
    one = ours.new_ones(())  # the kernel with one scale for each row is slow unless it may accumulate fast
    product = multiply_units(left, right, one, one, None, dtype, False) * (ours * theirs.t()).to(dtype)
    return product if bias is None else product + bias


__all__ = ["Scaled", "multiply", "quantise_matrix", "quantise_rows", "round_scaled", "scale_of"]
