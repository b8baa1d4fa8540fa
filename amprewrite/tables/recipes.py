"""Recipes to quantise products to fp8: which GEMMs run in fp8, in which formats, and which elements of a matrix share a scale.

In a training step a product y = x · wᵀ is three GEMMs. Each reads two matrices in the layout shown, and sums over the last dim of both:

    out          x  · w      gives y
    grad_in      g  · wᵀ     gives the gradient of x; g is the gradient of y
    grad_weight  gᵀ · xᵀ     gives the gradient of w

So a GEMM reads x, w or g as stored ("straight") or transposed ("turned"). Scales of rows belong to the rows of the matrix as the GEMM
reads it. The limits below are CUDA's, from ATen/native/cuda/ScaledBlas.cpp. A CPU has fewer limits.
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
"""For each GEMM: the two matrices that it reads, as (role, layout)."""
TENSOR, ROWS = "tensor", "rows"
BASE = BF16
"""The low format of products that may run in fp8. Operands, from which the fp8 copies are made, and results are in this format."""
FP8 = "fp8"
WIDE = "wide"
"""The user's word for products that multiply operands in `BASE` and return fp32."""
SMALLEST = 1e-12
"""Lower limit of amax, the largest magnitude of a tensor or row, so that a tensor of zeros has a finite scale, too."""
ALIGNMENT = E4M3.pad_multiple
"""Both dims of a weight must be multiples of this for fp8. Rows of x and g need no alignment, since they are padded when quantised."""


@dataclass(frozen=True)
class Recipe:
    """One way to quantise a product."""

    name: str
    gemms: tuple[str, ...]
    """The GEMMs that may run in fp8; the rest stay in bf16."""
    gradient: Format
    """fp8 format of g, the gradient of the result. x and w are always in e4m3."""
    rows: tuple[tuple[str, str], ...] = ()
    """Matrices, as (role, layout), that have a scale for each row. All other matrices have one scale for the whole tensor."""
    power_of_two: bool = False
    """True if scales are rounded down to powers of two, so that multiplying by a scale causes no rounding error."""
    fast: tuple[str, ...] = (OUT,)
    """GEMMs that a GPU may accumulate with fewer bits. By default GEMMs that compute gradients are not among them."""

    def format(self, role: str) -> Format:
        """Return the fp8 format of the matrix with this role: "x", "w" or "g"."""
        return self.gradient if role == G else E4M3

    def scaling(self, role: str, way: str) -> str:
        """Return which elements of a matrix in the layout `way` share a scale: "tensor" if all do, "rows" if those of each row do."""
        return ROWS if (role, way) in self.rows else TENSOR

    def pair(self, gemm: str) -> str:
        """Return the formats of both operands of a GEMM as text, such as "e5m2 x e4m3"."""
        return " x ".join(self.format(role).name for role, _ in READS[gemm])


TENSORWISE = Recipe("tensorwise", GEMMS, E5M2)
"""One scale for each tensor. The fastest recipe, because both layouts of a matrix share one amax."""
ROWWISE = Recipe("rowwise", GEMMS, E4M3, tuple((role, way) for role in ROLES for way in WAYS), power_of_two=True)
"""One scale for each row. So an outlier flushes small values only in its own row, not in the whole tensor."""
SAFE = Recipe("rowwise, grad_weight in bf16", (OUT, GRAD_IN), E4M3, tuple((role, STRAIGHT) for role in ROLES), power_of_two=True)
"""Like `ROWWISE`, but gradients of weights, which are sums over all tokens, are computed in bf16. The most exact recipe, and the fastest
for layers of width 1,024."""

RECIPES = {recipe.name: recipe for recipe in (TENSORWISE, ROWWISE, SAFE)}


@dataclass(frozen=True)
class Preset:
    """A named setting of the option `products=`."""

    recipe: Recipe
    priced: bool = True
    """True if GEMMs run in fp8 only where this saves time and the model does not need more bits; False if all GEMMs of the recipe do."""


PRESETS = {"fp8": Preset(TENSORWISE), "fp8-safe": Preset(SAFE), "fp8-rowwise": Preset(ROWWISE), "fp8-all": Preset(TENSORWISE, priced=False)}
