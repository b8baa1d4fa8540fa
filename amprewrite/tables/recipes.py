"""How products are quantised to fp8: which of their GEMMs, in which formats, with a scale of what.

A product y = x · wᵀ is three GEMMs in a step of training. Each reads two matrices along the last dim of both:

    out          x  · w      gives y
    grad_in      g  · wᵀ     gives the gradient of x; g is that of y
    grad_weight  gᵀ · xᵀ     gives the gradient of w

So a matrix is read as it is ("straight") or transposed ("turned"), and the scales of its rows are those of rows as they are read. What
CUDA takes is read from ATen/native/cuda/ScaledBlas.cpp: a CPU takes more.
"""

from __future__ import annotations

from dataclasses import dataclass

from amprewrite.tables.formats import BF16, E4M3, E5M2, Format

OUT, GRAD_IN, GRAD_WEIGHT = GEMMS = ("out", "grad_in", "grad_weight")
X, W, G = ROLES = ("x", "w", "g")
STRAIGHT, TURNED = WAYS = ("straight", "turned")
READS = {
    OUT: ((X, STRAIGHT), (W, STRAIGHT)),
    GRAD_IN: ((G, STRAIGHT), (W, TURNED)),
    GRAD_WEIGHT: ((G, TURNED), (X, TURNED)),
}
"""The two matrices that each GEMM reads."""
TENSOR, ROWS = "tensor", "rows"
BASE = BF16
"""The low format of products that may run in fp8: copies are made of its values, and results come in it."""
FP8 = "fp8"
ALIGNMENT = E4M3.pad_multiple
"""What the two dims of a weight must be a multiple of. Rows of x and g are padded as they are quantised."""
PAIRS = frozenset({(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)})
"""Formats of the operands of one GEMM that CUDA takes."""


@dataclass(frozen=True)
class Recipe:
    """One way to quantise a product."""

    name: str
    gemms: tuple[str, ...]
    """The GEMMs that may run in fp8; the rest stay in bf16."""
    gradient: Format
    """Format of g; x and w are e4m3."""
    rows: tuple[tuple[str, str], ...] = ()
    """Matrices (role, way) with a scale a row; all others have one scale for the tensor."""
    power_of_two: bool = False
    """Scales are rounded down to powers of two, so that scaling itself rounds nothing."""
    fast: tuple[str, ...] = (OUT,)
    """GEMMs that a GPU may accumulate with fewer bits: gradients are not among them."""

    def format(self, role: str) -> Format:
        """The format of the matrix in this role."""
        return self.gradient if role == G else E4M3

    def scaling(self, role: str, way: str) -> str:
        """What a scale belongs to: "tensor" or "rows"."""
        return ROWS if (role, way) in self.rows else TENSOR

    def pair(self, gemm: str) -> str:
        """The formats of the operands of a GEMM, in words."""
        return " x ".join(self.format(role).name for role, _ in READS[gemm])


TENSORWISE = Recipe("tensorwise", GEMMS, E5M2)
"""One scale a tensor. The fastest: both ways of a matrix share one amax."""
ROWWISE = Recipe("rowwise", GEMMS, E4M3, tuple((role, way) for role in ROLES for way in WAYS), power_of_two=True)
"""A scale a row. An outlier costs its own row its small values, not the whole tensor."""
SAFE = Recipe("rowwise, grad_weight in bf16", (OUT, GRAD_IN), E4M3, tuple((role, STRAIGHT) for role in ROLES), power_of_two=True)
"""As `ROWWISE`, but gradients of weights, which are sums over all tokens, stay in bf16. The most exact, and the fastest at width 1,024."""

RECIPES = {recipe.name: recipe for recipe in (TENSORWISE, ROWWISE, SAFE)}


@dataclass(frozen=True)
class Preset:
    """A word of `products=`."""

    recipe: Recipe
    priced: bool = True
    """GEMMs run in fp8 only where the prices say that it pays, and where the model does not ask for more bits."""


PRESETS = {"fp8": Preset(TENSORWISE), "fp8-safe": Preset(SAFE), "fp8-rowwise": Preset(ROWWISE), "fp8-all": Preset(TENSORWISE, priced=False)}

__all__ = [
    "ALIGNMENT",
    "BASE",
    "FP8",
    "GEMMS",
    "GRAD_IN",
    "GRAD_WEIGHT",
    "OUT",
    "PAIRS",
    "PRESETS",
    "READS",
    "RECIPES",
    "ROWS",
    "STRAIGHT",
    "TENSOR",
    "TURNED",
    "WAYS",
    "G",
    "Preset",
    "Recipe",
    "W",
    "X",
]  # fmt: skip
