"""Products of rows and a matrix, for which fp8 kernels exist."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixProduct:
    """The product `x · wᵀ`, or `x · w` if `transposed`. x holds rows along its last dim, w has two dims."""

    x: str
    """Name of the vertex that makes x."""
    w: str
    x_version: int
    """Number of in-place writes to x before the product reads it."""
    w_version: int
    rows: int
    inner: int
    columns: int
    x_learns: bool
    """Whether a backward gives x a gradient."""
    w_learns: bool
    transposed: bool = False


__all__ = ["MatrixProduct"]
