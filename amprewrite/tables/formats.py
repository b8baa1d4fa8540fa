"""The floating point formats that amprewrite knows: dtypes, ranges, names, and functions to look them up. Also recipes for fp8 products.

A recipe says which GEMMs run in fp8, in which fp8 formats, and which elements of a matrix share a scale. In a training step a product
y = x · wᵀ is three GEMMs. Each GEMM reads two matrices, a and b, and returns a · bᵀ, so it sums over the last dim of both:

    GEMM         a   b    a · bᵀ
    out          x   w    y
    grad_in      g   wᵀ   g · w, the gradient of x; g is the gradient of y
    grad_weight  gᵀ  xᵀ   gᵀ · x, the gradient of w

So a GEMM reads x, w or g as stored ("straight") or transposed ("turned"). If a scale belongs to each row, the row is one of the matrix as
the GEMM reads it. `ALIGNMENT` is CUDA's limit, from ATen/native/cuda/ScaledBlas.cpp. A CPU has fewer limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.errors import PolicyError


@dataclass(frozen=True)
class Format:
    """A floating point format.

    `bytes` is the size of a value, `eps` the distance from 1.0 to the next value. `max` is the largest number, `smallest_normal`
    the smallest positive number with all bits of precision, and `smallest_subnormal` the smallest positive number.
    """

    name: str
    dtype: torch.dtype
    bytes: int
    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float
    pad_multiple: int
    """Number of elements in 16 bytes. Tensor Core kernels are fast if inner dims are multiples of this (NVIDIA's GEMM guide)."""
    narrow: bool
    """True if the format's range is so much smaller than fp32's that values may leave it, as for fp16 but not for bf16."""
    spellings: tuple[str, ...]
    """Other names by which users may call the format, such as "float16"."""
    library_name: str
    """Name of the format in torch, Triton and numpy (with ml_dtypes), such as "bfloat16"."""
    onnx: str
    """Name of the format in ONNX's TensorProto.DataType, such as "FLOAT16"."""
    onnx_type: str
    """Name of the format in ONNX's operator schemas, such as "tensor(float16)"."""
    ort_cpu: bool
    """True if ONNX Runtime has CPU kernels for the format."""


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
NARROW_DTYPES = frozenset(row.dtype for row in LOW_FORMATS if row.narrow)
SCALED_FORMATS: dict[str, Format] = {row.name: row for row in (E4M3, E5M2)}
"""The fp8 formats. An fp8 value has a meaning only together with a scale. So no op runs in these formats, but products may read copies of
their operands in them (see `Recipe`)."""
NARROWEST = FP16
"""The low format with the smallest range, which limits the loss scale."""
DEFAULT_LOW = BF16
"""The low format that tools show and measure if the user names none."""
DEFAULT_ONNX = FP16
"""The format to which ONNX files are converted if the user names none, because every runtime loads it."""

CONVERSIONS = tuple(word for row in FORMATS.values() for word in row.spellings if hasattr(torch.Tensor, word))
"""Names of the tensor methods that convert a tensor to a format: float, half, bfloat16."""

_SPELLINGS = {spelling: row.name for row in FORMATS.values() for spelling in row.spellings}


def is_far(value: object, fmt: Format) -> bool:
    """True if `value` is a finite float whose magnitude is beyond the range of `fmt`. False for ints and anything else."""
    return isinstance(value, float) and math.isfinite(value) and abs(value) > fmt.max


def saturate(value: torch.Tensor, limit: float) -> torch.Tensor:
    """Return `value` with finite elements clamped to [-limit, limit]. Infinities stay, because the model itself made them."""
    return torch.where(value.isinf(), value, value.clamp(-limit, limit))


def parse_format(dtype: str | torch.dtype | Format) -> Format:
    """Return the format that `dtype` names: "bf16", "fp16", "fp32", a longer spelling such as "torch.float16", or a torch dtype.

    Raises PolicyError for anything else. This includes fp8: no op runs in fp8, but products can read fp8 copies (the option `products=`).
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
    """Return the short name of any torch dtype: "fp32", "bf16", "int64", "bool"."""
    for row in FORMATS.values():
        if row.dtype == dtype:
            return row.name
    return str(dtype).removeprefix("torch.")


OUT, GRAD_IN, GRAD_WEIGHT = GEMMS = ("out", "grad_in", "grad_weight")
X, W, G = ROLES = ("x", "w", "g")
STRAIGHT, TURNED = WAYS = ("straight", "turned")
READS = {OUT: ((X, STRAIGHT), (W, STRAIGHT)), GRAD_IN: ((G, STRAIGHT), (W, TURNED)), GRAD_WEIGHT: ((G, TURNED), (X, TURNED))}
"""For each GEMM: the two matrices that it reads, as (role, layout)."""
TENSOR, ROWS = "tensor", "rows"
BASE = BF16
"""Format of the operands and results of products that may run in fp8. Operands get fp8 copies for this; the results stay in BASE."""
FP8 = "fp8"
WIDE = "wide"
"""The word in `overrides=` for products that multiply operands in `BASE` (bf16) and return fp32."""
SMALLEST = 1e-12
"""Lower limit of amax, the largest magnitude of a tensor or row, so that a tensor of zeros has a finite scale, too."""
ALIGNMENT = E4M3.pad_multiple
"""Both dims of a weight must be multiples of this for fp8. Rows of x and g need no alignment, since they are padded when quantised."""


@dataclass(frozen=True)
class Recipe:
    """A way to run a product in fp8: which of its GEMMs, in which fp8 formats, and which elements of a matrix share a scale."""

    name: str
    gemms: tuple[str, ...]
    """The GEMMs that may run in fp8; the rest stay in bf16."""
    gradient: Format
    """fp8 format of g, the gradient of the result. x and w are always in e4m3."""
    rows: tuple[tuple[str, str], ...] = ()
    """Matrices with a scale for each row, as (role, layout), such as ("w", "straight"). All other matrices have one scale."""
    power_of_two: bool = False
    """True if scales are rounded down to powers of two, so that multiplying by a scale causes no rounding error."""
    fast: tuple[str, ...] = (OUT,)
    """GEMMs in which a GPU may use fast accumulation: it keeps fewer bits of partial sums. By default only the GEMM of the forward."""

    def format(self, role: str) -> Format:
        """Return the fp8 format of the matrix with this role: "x", "w" or "g"."""
        return self.gradient if role == G else E4M3

    def scaling(self, role: str, way: str) -> str:
        """Return which elements of a matrix share a scale: "tensor" if all do, "rows" if the elements of a row do.

        `role` is "x", "w" or "g". `way` is the layout in which the GEMM reads the matrix: "straight" or "turned" (transposed).
        """
        return ROWS if (role, way) in self.rows else TENSOR

    def pair(self, gemm: str) -> str:
        """Return the fp8 formats of both operands of a GEMM ("out", "grad_in" or "grad_weight") as text, such as "e5m2 x e4m3"."""
        return " x ".join(self.format(role).name for role, _ in READS[gemm])


TENSORWISE = Recipe("tensorwise", GEMMS, E5M2)
"""One scale for each tensor. The fastest recipe, because the straight and the turned layout of a matrix have the same scale."""
ROWWISE = Recipe("rowwise", GEMMS, E4M3, tuple((role, way) for role in ROLES for way in WAYS), power_of_two=True)
"""One scale for each row. So an outlier flushes small values only in its own row, not in the whole tensor."""
SAFE = Recipe("rowwise, grad_weight in bf16", (OUT, GRAD_IN), E4M3, tuple((role, STRAIGHT) for role in ROLES), power_of_two=True)
"""Like `ROWWISE`, with two differences: the GEMM grad_weight, which sums over all tokens, runs in bf16, and grad_in reads wᵀ with one scale
for the tensor. The most exact recipe, and the fastest for layers of width 1,024."""

RECIPES = {recipe.name: recipe for recipe in (TENSORWISE, ROWWISE, SAFE)}


@dataclass(frozen=True)
class Preset:
    """A value of the user's option `products=`, such as "fp8-safe": a recipe for fp8 products, and when to apply it."""

    recipe: Recipe
    priced: bool = True
    """True: a GEMM runs in fp8 only if this saves time and no rule keeps its operands in more bits. False: every GEMM that the recipe names
    runs in fp8."""


PRESETS = {"fp8": Preset(TENSORWISE), "fp8-safe": Preset(SAFE), "fp8-rowwise": Preset(ROWWISE), "fp8-all": Preset(TENSORWISE, priced=False)}
