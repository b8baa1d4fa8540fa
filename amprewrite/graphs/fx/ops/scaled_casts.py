"""Make fp8 matrices with their scales, and multiply two such matrices. A rewritten graph calls these functions where the plan chooses fp8.

A scale is the number by which a tensor, or each row, was multiplied so that its largest element becomes the largest number of the format.
The graph computes the scale from the value and frees both together, so there is no state, and nothing to save in a checkpoint. Elements
that are not finite do not count for the scale. They become NaN, and so do sums over them, as in bf16; other rows stay right.

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
from amprewrite.tables.recipes import ALIGNMENT, ROWS, SMALLEST

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
    # divided in fp64, because compilers replace a division in fp32 by a product with a rounded reciprocal
    scale = (fmt.max / amax.double().clamp(min=SMALLEST)).float()
    return (scale.view(torch.int32) & EXPONENT).view(torch.float32) if power_of_two else scale


def constant_scale(like: Tensor, largest: float, fmt: Format, power_of_two: bool) -> Tensor:
    """Return the 0-dim fp32 scale for magnitudes up to `largest` in `fmt`, on the device of `like`. `power_of_two`: as for `scale_of`."""
    scale = fmt.max / max(largest, SMALLEST)
    return like.new_full((), 2.0 ** (math.frexp(scale)[1] - 1) if power_of_two else scale, dtype=torch.float32)


def quantise_rows(matrix: Tensor, fmt: Format, power_of_two: bool) -> Scaled:
    """Return `matrix` in `fmt`, with scales for the rows as by `scale_of`. Where our Triton kernel runs, it reads the matrix only once."""
    found = by_kernel(matrix, lambda kernels: kernels.cast_rows(matrix, fmt.dtype, SMALLEST, power_of_two))
    if found is not None:
        return Scaled(*found)
    scale = scale_of(matrix, fmt, ROWS, power_of_two)
    return Scaled(quantise_matrix(matrix, fmt, scale, True, False)[0], scale)


def round_scaled(scaled: Tensor, fmt: Format) -> Tensor:
    """Return the fp32 numbers `scaled`, rounded to nearest even in `fmt`. Numbers beyond its range become ±max, infinities become NaN.

    The clamp is explicit because torch's casts differ: before torch 2.12 numbers beyond the range become NaN, from 2.12 on they become
    ±max, and so do infinities.
    """
    return torch.where(scaled.isinf(), math.nan, scaled.clamp(-fmt.max, fmt.max)).to(fmt.dtype)


def quantise_matrix(matrix: Tensor, fmt: Format, scale: Tensor, straight: bool, turned: bool) -> tuple[Tensor, Tensor]:
    """Return (`matrix * scale` in `fmt`, the transpose of this copy). A copy that is not wanted may be empty.

    `straight` and `turned` tell whether the first and the second (transposed) copy are wanted. `scale` is 0-dim, a column or a row. On a
    GPU with fp8 units the transpose has its own memory, because products read along rows only, and because the other copy may be freed.
    """
    found: tuple[Tensor, Tensor] | None = by_kernel(matrix, lambda kernels: kernels.cast_both(matrix, scale, fmt.dtype, straight, turned))
    if found is not None:
        return found
    data = round_scaled(matrix.float() * scale, fmt)
    return data, data.t().contiguous() if turned and multiplies_fp8(matrix.device) else data.t()


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype, fast: bool, bias: Tensor | None = None) -> Tensor:
    """Return `a · bᵀ` as `dtype`, plus `bias` if it is given. `a` is (m, k), `b` is (n, k). With `fast`, sums may have fewer bits."""
    if not multiplies_fp8(a.data.device):
        product = torch.mm(a.values(), b.values().t()).to(dtype)
        return product if bias is None else product + bias
    (left, ours), (right, theirs) = ((each.data.contiguous(), each.scale.reciprocal()) for each in (a, b))
    missing = -left.shape[1] % ALIGNMENT  # zeros to append along k for the kernel; they add nothing to a sum
    if missing:
        left, right = (pad(each.view(torch.uint8), (0, missing)).view(each.dtype) for each in (left, right))
    bias = None if bias is None else bias.expand(right.shape[0]).contiguous()  # the kernel ignores the strides of a bias
    if ours.dim() == theirs.dim() == 0:
        return multiply_units(left, right, ours, theirs, bias, dtype, fast)
    if fast:
        ours, theirs = (scale.expand(each.shape[0], 1).contiguous() for scale, each in ((ours, left), (theirs, right)))
        return multiply_units(left, right, ours, theirs, bias, dtype, True)
    one = ours.new_ones(())  # the scales multiply the result below, because the kernel is slow with row scales unless `fast`
    product = multiply_units(left, right, one, one, None, dtype, False) * (ours * theirs.t()).to(dtype)
    return product if bias is None else product + bias
