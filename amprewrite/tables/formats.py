"""Number formats, one row each."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.errors import PolicyError


@dataclass(frozen=True)
class Format:
    """A floating point format.

    `max`, `smallest_normal` and `smallest_subnormal` are magnitudes, `eps` is the distance from 1.0 to the next value.
    """

    name: str
    dtype: torch.dtype
    bytes: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float
    pad_multiple: int
    """Elements in 16 bytes: what Tensor Core kernels want the inner dims to be a multiple of (NVIDIA's GEMM guide)."""


def _row(name: str, dtype: torch.dtype, pad_multiple: int) -> Format:
    info = torch.finfo(dtype)
    return Format(
        name, dtype, info.bits // 8, info.max, info.smallest_normal, info.smallest_normal * info.eps, info.eps, pad_multiple
    )


FP32 = _row("fp32", torch.float32, 4)
FP16 = _row("fp16", torch.float16, 8)
BF16 = _row("bf16", torch.bfloat16, 8)

FORMATS: dict[str, Format] = {row.name: row for row in (FP32, FP16, BF16)}
LOW_FORMATS = (FP16, BF16)

_SPELLINGS = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}


def is_far(value: object, fmt: Format) -> bool:
    """Whether `value` is a finite number beyond the range of `fmt`."""
    return isinstance(value, float) and math.isfinite(value) and abs(value) > fmt.max


def saturate(value: torch.Tensor, limit: float) -> torch.Tensor:
    """Finite values clamped to [-limit, limit]; infinities stay, for the model wrote them itself."""
    return torch.where(value.isinf(), value, value.clamp(-limit, limit))


def parse_format(dtype: str | torch.dtype | Format) -> Format:
    """The format named `dtype`: "bf16", "fp16", "fp32", a longer spelling of those, or a torch dtype.

    Raises PolicyError for anything else.
    """
    if isinstance(dtype, Format):
        return dtype
    if isinstance(dtype, torch.dtype):
        for row in FORMATS.values():
            if row.dtype == dtype:
                return row
    elif isinstance(dtype, str):
        name = dtype.removeprefix("torch.").lower()
        name = _SPELLINGS.get(name, name)
        if name in FORMATS:
            return FORMATS[name]
    raise PolicyError(f"dtype={shown(dtype)} is not a format amprewrite knows; use one of {', '.join(FORMATS)}, or their torch dtypes")


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of any torch dtype: fp32, bf16, int64, bool."""
    for row in FORMATS.values():
        if row.dtype == dtype:
            return row.name
    return str(dtype).removeprefix("torch.")
