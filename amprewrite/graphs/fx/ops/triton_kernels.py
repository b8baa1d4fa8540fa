"""A Triton kernel that copies many tensors in one launch, casts and multiplies them on the way, and checks for inf and NaN.

Importing this file needs Triton. Only fused_copy.py imports it, and lets torch copy the tensors if the import fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from amprewrite.tables.formats import FORMATS

RANK = 4
"""Largest number of dims of a tensor that the kernel takes. Neighbouring dims count as one if the strides allow joining them."""
WIDTH = 3 + 3 * RANK
"""Numbers in a row of the table. A row describes one copy: two addresses, the number of elements, sizes, read strides, write strides."""
BLOCK = 1024
_PROGRAMS = 2048
"""Largest number of programs in a launch: about 15 for each multiprocessor of an H100. A tensor's programs take its blocks in turn."""
_TYPES = {row.dtype: getattr(tl, row.library_name) for row in FORMATS.values()}
DTYPES = frozenset(_TYPES)


# The kernel calls only built-in functions of Triton. Triton's library functions are compiled by @triton.jit themselves, so Triton's
# interpreter cannot run them if it was switched on after Triton was imported.
@triton.jit
def _copy_rows(  # type: ignore[no-untyped-def]  # parameters without a type are tensors on the device
    table,
    factor,
    flag,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    RANK: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALED: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + tl.program_id(0) * WIDTH
    source = tl.load(row).to(tl.pointer_type(SOURCE))
    target = tl.load(row + 1).to(tl.pointer_type(TARGET))
    count = tl.load(row + 2)
    if ALIGNED:  # tells the compiler that it may read and write 16 bytes at a time
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        count = tl.multiple_of(count, 16)
    bad = tl.full((BLOCK,), 0, tl.int32)
    start = tl.program_id(1).to(tl.int64) * BLOCK
    while start < count:
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        if RANK == 1:
            read = at
            written = at
        else:
            rest = at.to(tl.int32)  # a 64-bit division takes longer than the memory access
            read = tl.full((BLOCK,), 0, tl.int64)
            written = tl.full((BLOCK,), 0, tl.int64)
            for dim in tl.static_range(MOST - 1, MOST - 1 - RANK, -1):
                size = tl.load(row + 3 + dim).to(tl.int32)
                index = rest % size
                rest = rest // size
                read += index * tl.load(row + 3 + MOST + dim)
                written += index * tl.load(row + 3 + 2 * MOST + dim)
        value = tl.load(source + read, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            value = value * tl.load(factor)
            bad += (tl.abs(value) < float("inf")).to(tl.int32) ^ 1  # counts infinities and NaN: neither is below infinity
        tl.store(target + written, value.to(TARGET), mask=inside)
        start += tl.num_programs(1) * BLOCK
    if SCALED:
        tl.store(flag + tl.full((BLOCK,), 0, tl.int32), 1.0, mask=bad > 0)


def launch(
    table: Tensor, rows: int, longest: int, kinds: tuple[torch.dtype, torch.dtype], rank: int, aligned: bool,
    factor: Tensor | None = None, flag: Tensor | None = None,
) -> None:  # fmt: skip
    """Copy the `rows` pairs of tensors that `table` (int64, on the device) describes. `kinds` is (dtype read, dtype written).

    `longest` is the number of elements of the largest tensor. `rank` 1 promises that both tensors of every pair are dense and have the same
    order of elements. `aligned` promises that addresses and numbers of elements are multiples of 16. If the 0-dim fp32 tensors `factor` and
    `flag` are given, values are multiplied by `factor`, and `flag` becomes 1 if a product is not finite.
    """
    programs = max(1, min(triton.cdiv(longest, BLOCK), _PROGRAMS // rows))
    source, target = (_TYPES[kind] for kind in kinds)
    _copy_rows[(rows, programs)](
        table, factor, flag, source, target, rank, aligned, factor is not None, RANK, WIDTH, BLOCK, num_warps=4
    )  # fmt: skip


def row(source: Tensor, target: Tensor) -> tuple[int, tuple[int, ...]] | None:
    """Return (rank, row of the table) for a copy of `source` to `target`; None if the kernel cannot make this copy.

    The kernel takes at most `RANK` joined dimensions, and fewer than 2**31 elements if they are strided. Dense copies have the rank 1.
    """
    head = (source.data_ptr(), target.data_ptr(), source.numel())
    if source.is_contiguous() and target.is_contiguous():
        return 1, (*head, *(1,) * RANK, *(0,) * (2 * RANK))
    dims = joined(source.shape, source.stride(), target.stride())
    if len(dims) == 1 and dims[0][1:] == (1, 1):
        return 1, (*head, *(1,) * RANK, *(0,) * (2 * RANK))
    if len(dims) > RANK or source.numel() >= 1 << 31:
        return None
    sizes, read, written = zip(*([(1, 0, 0)] * (RANK - len(dims)) + dims), strict=True)
    return max(len(dims), 2), (*head, *sizes, *read, *written)


def joined(shape: Sequence[int], read: Sequence[int], written: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (size, read stride, write stride) of each dimension, outermost first; dimensions are joined where both strides allow it."""
    dims: list[tuple[int, int, int]] = []
    for size, r, w in sorted(zip(shape, read, written, strict=True), key=lambda dim: (-dim[2], -dim[1])):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (r * size, w * size):
            size *= dims.pop()[0]
        dims.append((size, r, w))
    return dims or [(1, 1, 1)]
