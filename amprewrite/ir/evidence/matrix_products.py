"""Facts about products of rows and a matrix, such as linear layers. fp8 kernels exist for these products."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixProduct:
    """The product `x · wᵀ`, or `x · w` if `transposed`. Its sizes are [rows, inner] times [inner, columns].

    The last dim of x is the inner dim, and all other dims of x together are the rows. w has two dims.
    """

    x: str
    """Name of the node that makes x."""
    w: str
    """Name of the node that makes w."""
    x_version: int
    """Number of in-place writes to x before the product reads it."""
    w_version: int
    """Number of in-place writes to w before the product reads it."""
    rows: int
    inner: int
    columns: int
    x_learns: bool
    """Whether a backward computes a gradient of x."""
    w_learns: bool
    """Whether a backward computes a gradient of w."""
    transposed: bool = False
    """Whether w is stored as [inner, columns], instead of [columns, inner] as in a linear layer."""
