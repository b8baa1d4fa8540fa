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
    """Version of x that the product reads: each in-place write to x makes a new version (see `Operand.write_version`)."""
    w_version: int
    """Version of w that the product reads: each in-place write to w makes a new version (see `Operand.write_version`)."""
    rows: int
    inner: int
    columns: int
    x_learns: bool
    """Whether a backward computes a gradient of x."""
    w_learns: bool
    """Whether a backward computes a gradient of w."""
    transposed: bool = False
    """Whether w is stored as [inner, columns], instead of [columns, inner] as in a linear layer."""
