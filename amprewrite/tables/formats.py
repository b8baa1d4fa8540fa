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
    """Elements in 16 bytes: Tensor Core kernels want the inner dims to be a multiple of it (NVIDIA's GEMM guide)."""
    narrow: bool
    """True if its range is much smaller than fp32's, so that values have to be kept within it."""
    spellings: tuple[str, ...]
    """Other names that users may give it."""
    library_name: str
    """Its name in numpy (with ml_dtypes) and Triton."""
    onnx: str
    """Its name in ONNX's TensorProto."""
    onnx_type: str
    """The type string of ONNX's schemas."""
    ort_cpu: bool
    """True if ONNX Runtime has CPU kernels for it."""


def _row(name: str, dtype: torch.dtype, *spellings: str, onnx: str, narrow: bool = False, ort_cpu: bool = True) -> Format:
    info, library_name = torch.finfo(dtype), str(dtype).removeprefix("torch.")
    return Format(
        name=name,
        dtype=dtype,
        bytes=info.bits // 8,
        max=info.max,
        smallest_normal=info.smallest_normal,
        smallest_subnormal=info.smallest_normal * info.eps,
        eps=info.eps,
        pad_multiple=16 * 8 // info.bits,
        narrow=narrow,
        spellings=(library_name, *spellings),
        library_name=library_name,
        onnx=onnx,
        onnx_type=f"tensor({'float' if onnx == 'FLOAT' else library_name.replace('_', '')})",
        ort_cpu=ort_cpu,
    )


FP32 = _row("fp32", torch.float32, "float", onnx="FLOAT")
FP16 = _row("fp16", torch.float16, "half", onnx="FLOAT16", narrow=True)
BF16 = _row("bf16", torch.bfloat16, onnx="BFLOAT16", ort_cpu=False)

E4M3 = _row("e4m3", torch.float8_e4m3fn, onnx="FLOAT8E4M3FN")
E5M2 = _row("e5m2", torch.float8_e5m2, onnx="FLOAT8E5M2")

FORMATS: dict[str, Format] = {row.name: row for row in (FP32, FP16, BF16)}
LOW_FORMATS = (FP16, BF16)
LOW_NAMES = tuple(row.name for row in LOW_FORMATS)
LOW_DTYPES = tuple(row.dtype for row in LOW_FORMATS)
NARROW_DTYPES = tuple(row.dtype for row in LOW_FORMATS if row.narrow)
SCALED_FORMATS: dict[str, Format] = {row.name: row for row in (E4M3, E5M2)}
"""Formats of eight bits. A value in one has a meaning only with a scale, so no op runs in them: products read copies (`recipes.py`)."""
NARROWEST = FP16
"""The format whose range limits the loss scale."""
DEFAULT_LOW = BF16
"""The format that tools show and measure if none is named."""
DEFAULT_ONNX = FP16
"""The format to which ONNX files are converted if none is named: every runtime loads it."""

CONVERSIONS = tuple(word for row in FORMATS.values() for word in row.spellings if hasattr(torch.Tensor, word))
"""Methods of a tensor that convert it: float, half, bfloat16."""

_SPELLINGS = {spelling: row.name for row in FORMATS.values() for spelling in row.spellings}


def is_far(value: object, fmt: Format) -> bool:
    """True if `value` is a finite number beyond the range of `fmt`."""
    return isinstance(value, float) and math.isfinite(value) and abs(value) > fmt.max


def saturate(value: torch.Tensor, limit: float) -> torch.Tensor:
    """Finite values clamped to [-limit, limit]. Infinities are kept, because the model wrote them itself."""
    return torch.where(value.isinf(), value, value.clamp(-limit, limit))


def parse_format(dtype: str | torch.dtype | Format) -> Format:
    """The format named `dtype`: "bf16", "fp16", "fp32", a longer spelling of these, or a torch dtype.

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
        if name in ("fp8", *SCALED_FORMATS, *(row.library_name for row in SCALED_FORMATS.values())):
            raise PolicyError(f"dtype={shown(dtype)}: no op runs in it, but products may read copies; use dtype='bf16', products='fp8'")
    raise PolicyError(f"dtype={shown(dtype)} is not a format amprewrite knows; use one of {', '.join(FORMATS)}, or their torch dtypes")


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of any torch dtype: fp32, bf16, int64, bool."""
    for row in FORMATS.values():
        if row.dtype == dtype:
            return row.name
    return str(dtype).removeprefix("torch.")
