"""Recipes that quantise products to fp8: the GEMMs in fp8, their formats, and the part of a matrix that shares a scale.

A product y = x · wᵀ is three GEMMs in a step of training. Each reads two matrices along the last dim of both:

    out          x  · w      gives y
    grad_in      g  · wᵀ     gives the gradient of x; g is the gradient of y
    grad_weight  gᵀ · xᵀ     gives the gradient of w

So a matrix is read "straight" or transposed ("turned"), and scales of rows belong to the rows as the GEMM reads them. The limits of CUDA
are from ATen/native/cuda/ScaledBlas.cpp. A CPU takes more.
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
"""The low format of products that may run in fp8: their values, from which copies are made, and their results are in it."""
FP8 = "fp8"
WIDE = "wide"
"""Word for products that multiply operands in `BASE` and return fp32."""
ALIGNMENT = E4M3.pad_multiple
"""Both dims of a weight must be a multiple of this. Rows of x and g are padded when they are quantised."""
PAIRS = frozenset({(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)})
"""Pairs of operand formats that a CUDA GEMM takes."""


@dataclass(frozen=True)
class Recipe:
    """One way to quantise a product."""

    name: str
    gemms: tuple[str, ...]
    """The GEMMs that may run in fp8; the rest stay in bf16."""
    gradient: Format
    """Format of g; x and w are e4m3."""
    rows: tuple[tuple[str, str], ...] = ()
    """Matrices (role, way) with a scale for each row. All others have one scale for the tensor."""
    power_of_two: bool = False
    """True if scales are rounded down to powers of two, so that scaling itself rounds nothing."""
    fast: tuple[str, ...] = (OUT,)
    """GEMMs that a GPU may accumulate with fewer bits. Gradients are not among them."""

    def format(self, role: str) -> Format:
        """The format of the matrix in this role."""
        return self.gradient if role == G else E4M3

    def scaling(self, role: str, way: str) -> str:
        """Part of the matrix that shares a scale: "tensor" or "rows"."""
        return ROWS if (role, way) in self.rows else TENSOR

    def pair(self, gemm: str) -> str:
        """The formats of the operands of a GEMM, in words."""
        return " x ".join(self.format(role).name for role, _ in READS[gemm])


TENSORWISE = Recipe("tensorwise", GEMMS, E5M2)
"""One scale for each tensor. The fastest: both layouts of a matrix share one amax."""
ROWWISE = Recipe("rowwise", GEMMS, E4M3, tuple((role, way) for role in ROLES for way in WAYS), power_of_two=True)
"""A scale for each row. An outlier costs only its own row small values, not the whole tensor."""
SAFE = Recipe("rowwise, grad_weight in bf16", (OUT, GRAD_IN), E4M3, tuple((role, STRAIGHT) for role in ROLES), power_of_two=True)
"""As `ROWWISE`, but gradients of weights, sums over all tokens, stay in bf16. The most exact, and the fastest at width 1,024."""

RECIPES = {recipe.name: recipe for recipe in (TENSORWISE, ROWWISE, SAFE)}


@dataclass(frozen=True)
class Preset:
    """A word of `products=`."""

    recipe: Recipe
    priced: bool = True
    """True if GEMMs run in fp8 only where the prices say that it pays and the model does not need more bits."""


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
    "WIDE",
    "G",
    "Preset",
    "Recipe",
    "W",
    "X",
]  # fmt: skip
