"""Triton kernels that quantise a matrix: they compute its amax, and write its cast untransposed, transposed, or both at once.

The amax is the largest finite magnitude. Importing this file needs Triton. Only fp8_units.py imports it, and lets torch make the copies if
the import fails. A matrix is read from memory twice, for its amax and for its cast; only once if each row has a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Rows and columns of a tile."""
AMAX = 4096
"""Elements that one program reads at a time for the amax of a tensor or a row."""
TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def cast_exactly(scaled, MOST: tl.constexpr, EPS: tl.constexpr, NORMAL: tl.constexpr, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the fp32 numbers `scaled` in the format TYPE: clamped to ±MOST and rounded to nearest even. Infinities become NaN.

    EPS is the distance from 1 to the next number of TYPE, and NORMAL the smallest normal number of TYPE. The numbers are rounded in fp32,
    so that the cast itself is exact. A cast of unrounded numbers would round twice on sm_89, where Triton casts by way of fp16.
    """
    size = tl.abs(scaled)
    limited = tl.where(size > MOST, MOST, size)
    # The factor 8388608 (2**23) gives the last bit of the fp32 number `large` the value of the last bit of the result in TYPE. So adding
    # `large` rounds to nearest even, and subtracting it gives the rounded number.
    exponent = (limited.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    large = tl.where(exponent < NORMAL, NORMAL, exponent) * (EPS * 1.5 * 8388608)
    rounded = (limited + large) - large
    sign = (scaled.to(tl.int32, bitcast=True) >> 31) << 31
    signed = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(size < float("inf"), signed, float("nan")).to(TYPE)


@triton.jit
def amax_kernel(source, amax, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # two pointers and a number
    """Write the largest finite magnitude among the `count` elements at `source` to `amax`. The number at `amax` must be 0 before."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.abs(tl.load(source + at, mask=at < count, other=0.0).to(tl.float32))
    tl.atomic_max(amax, tl.max(tl.where(size < float("inf"), size, 0.0), axis=0))


@triton.jit
def factor_of(amax, SMALLEST: tl.constexpr, POWER: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return MOST / max(amax, SMALLEST), the scale for magnitudes up to `amax`. MOST is the largest number of the format.

    With POWER, the scale is rounded down to a power of two. The division is in fp64, as in `scale_of` of quantised_products.py.
    """
    wide = amax.to(tl.float64)
    factor = (tl.full((), MOST, tl.float64) / tl.where(wide > SMALLEST, wide, SMALLEST)).to(tl.float32)
    if POWER:
        factor = (factor.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return factor


@triton.jit
def scale_kernel(amax, scale, SMALLEST: tl.constexpr, POWER: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read the number at `amax`, and write the scale for magnitudes up to it (`factor_of`) to `scale`. This replaces six torch kernels."""
    tl.store(scale, factor_of(tl.load(amax), SMALLEST, POWER, MOST))


@triton.jit
def cast_kernel(  # type: ignore[no-untyped-def]
    source, scale, straight, turned, rows, columns, MOST: tl.constexpr, EPS: tl.constexpr, NORMAL: tl.constexpr, TYPE: tl.constexpr,
    WAYS: tl.constexpr, BY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scale one tile of the matrix at `source`, clamp and cast it by `cast_exactly`, and write it to `straight`, `turned` or both.

    WAYS: 1 writes the tile untransposed, 2 transposed, 3 both. BY: 0 for one scale, 1 for a scale of each row, 2 of each column.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    at = row[:, None].to(tl.int64) * columns + column[None, :]
    if BY == 1:
        factor = tl.load(scale + row, mask=row < rows, other=1.0)[:, None]
    elif BY == 2:
        factor = tl.load(scale + column, mask=column < columns, other=1.0)[None, :]
    else:
        factor = tl.load(scale)
    scaled = tl.load(source + at, mask=inside, other=0.0).to(tl.float32) * factor
    cast = cast_exactly(scaled, MOST, EPS, NORMAL, TYPE)
    if WAYS != 2:
        tl.store(straight + at, cast, mask=inside)
    if WAYS != 1:
        transposed = column[:, None].to(tl.int64) * rows + row[None, :]
        tl.store(turned + transposed, tl.trans(cast), mask=tl.trans(inside))


@triton.jit
def rows_kernel(  # type: ignore[no-untyped-def]
    source, scale, target, columns, SMALLEST: tl.constexpr, POWER: tl.constexpr, MOST: tl.constexpr, EPS: tl.constexpr,
    NORMAL: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the scale of one row of the matrix at `source` to `scale`, and the row, scaled and cast by `cast_exactly`, to `target`.

    `factor_of` gives the scale. The second loop reads the row from the GPU's cache, not from memory.
    """
    row = tl.program_id(0)
    start = row.to(tl.int64) * columns
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(source + start + at, mask=at < columns, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, 0.0))
    factor = factor_of(tl.max(largest, axis=0), SMALLEST, POWER, MOST)
    tl.store(scale + row, factor)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        scaled = tl.load(source + start + at, mask=at < columns, other=0.0).to(tl.float32) * factor
        tl.store(target + start + at, cast_exactly(scaled, MOST, EPS, NORMAL, TYPE), mask=at < columns)


def format_of(dtype: torch.dtype) -> tuple[float, float, float, object]:
    """Return the arguments MOST, EPS, NORMAL and TYPE of `cast_exactly` for the fp8 format `dtype`."""
    facts = torch.finfo(dtype)
    return facts.max, facts.eps, facts.smallest_normal, TYPES[dtype]


def cast_rows(matrix: Tensor, dtype: torch.dtype, smallest: float, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Cast a contiguous `matrix` to the fp8 format `dtype`, each row with its own scale. Return (fp8 matrix, column with the fp32 scales).

    If the amax of a row is below `smallest`, `smallest` is used instead. With `power_of_two`, scales are rounded down to powers of two.
    """
    rows, columns = matrix.shape
    made, scale = matrix.new_empty((rows, columns), dtype=dtype), matrix.new_empty((rows, 1), dtype=torch.float32)
    if rows:
        block = min(AMAX, triton.next_power_of_2(max(columns, 1)))
        rows_kernel[(rows,)](matrix, scale, made, columns, smallest, power_of_two, *format_of(dtype), block)
    return made, scale


def amax_of(matrix: Tensor) -> Tensor:
    """Return the largest finite magnitude of a dense `matrix`, as a 0-dim fp32 tensor."""
    amax = torch.zeros((), dtype=torch.float32, device=matrix.device)
    if matrix.numel():
        amax_kernel[(triton.cdiv(matrix.numel(), AMAX),)](matrix, amax, matrix.numel(), AMAX)
    return amax


def scale_of(matrix: Tensor, dtype: torch.dtype, smallest: float, power_of_two: bool) -> Tensor:
    """Return the 0-dim fp32 scale for a cast of a dense `matrix` to `dtype`, from its amax (its largest finite magnitude).

    An amax below `smallest` counts as `smallest`. With `power_of_two`, the scale is rounded down to a power of two.
    """
    amax = amax_of(matrix)
    scale = torch.empty_like(amax)
    scale_kernel[(1,)](amax, scale, smallest, power_of_two, torch.finfo(dtype).max)
    return scale


def cast_both(matrix: Tensor, scale: Tensor, dtype: torch.dtype, straight: bool, turned: bool) -> tuple[Tensor, Tensor]:
    """Multiply a dense `matrix` by `scale`, and cast it to the fp8 format `dtype`. Return (fp8 matrix, its transpose), both contiguous.

    `straight` tells whether the first result is wanted, `turned` whether the second is. A result that is not wanted is empty. `scale` is
    0-dim, a column with one number for each row, or a row with one number for each column.
    """
    rows, columns = matrix.shape
    made = matrix.new_empty((rows, columns) if straight else (0, 0), dtype=dtype)
    other = matrix.new_empty((columns, rows) if turned else (0, 0), dtype=dtype)
    if matrix.numel():
        grid = (triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK))
        by = 0 if not scale.dim() else 1 if scale.shape[1] == 1 else 2
        cast_kernel[grid](matrix, scale.contiguous(), made, other, rows, columns, *format_of(dtype), straight + 2 * turned, by, BLOCK)
    return made, other
