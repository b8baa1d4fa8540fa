"""Products of rows and a matrix: those of which fp8 kernels exist."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixProduct:
    """`x · wᵀ`, or `x · w` if `transposed`: x are rows along the last dim, w has two dims."""

    x: str
    """Name of the vertex that makes x."""
    w: str
    x_version: int
    """How many writes in place the product's x has seen."""
    w_version: int
    rows: int
    inner: int
    columns: int
    x_learns: bool
    """A backward gives x a gradient."""
    w_learns: bool
    transposed: bool = False


__all__ = ["MatrixProduct"]
