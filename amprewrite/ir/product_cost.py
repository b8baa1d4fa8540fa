"""Facts about products of rows and a matrix, for which fp8 kernels exist, and the time that fp8 saves in their GEMMs and costs in copies.

The model is torchao's roofline, applied to amprewrite's table of devices. A GEMM takes the longest of its arithmetic, its memory traffic
and a launch. Each kernel that makes a copy takes the longer of its memory traffic and its launches. Large kernels reach only a share of a
device's peak rates: `REACHED_FLOPS` and `REACHED_BANDWIDTH` (torchao, `testing/training/roofline_utils.py`, measured on H100).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from amprewrite.ir.cost import ticks
from amprewrite.tables.devices import Device
from amprewrite.tables.recipes import BASE, FP8, ROWS, STRAIGHT, Recipe, W

REACHED_FLOPS, REACHED_BANDWIDTH = 0.78, 0.92
COMPILED_LAUNCH = 2e-6
"""Least time of a kernel in a compiled graph, in seconds."""
WIDE, NARROW = BASE.bytes, 1
"""Bytes per element of a bf16 value, and of its fp8 copy."""
ALONE_AMAX, ALONE_CAST = (12, 4), (45, 6)
"""(bytes of traffic per element, launches) of computing the amax, and of casting, with eager PyTorch's kernels alone."""

EAGER_HOST = 0.67e-3
"""Seconds that the host takes for one fp8 GEMM and its copies without a compiler. Measured with an H100: 2.0 ms for the three GEMMs of a
product (`examples/benchmarks/fp8.py`, 26 November 2026)."""


@dataclass(frozen=True)
class ProductPrices:
    """Computes prices of GEMMs and fp8 copies on one device, in ticks of 0.1 ns."""

    device: Device
    fused: bool
    """Whether a compiler fuses the amaxes and casts with the ops that make the values."""
    kernel: bool
    """Whether amprewrite's own kernel casts and transposes, where no compiler does."""

    @property
    def launch(self) -> float:
        return COMPILED_LAUNCH if self.fused else self.device.launch

    def saved(self, rows: int, inner: int, columns: int) -> int:
        """Return the time that a GEMM [rows, inner] @ [inner, columns] saves in fp8 compared with bf16; below 0 if fp8 is slower."""
        return self._gemm(rows, inner, columns, BASE.name, WIDE) - self._gemm(rows, inner, columns, FP8, NARROW)

    def waits_for_host(self, rows: int, inner: int, columns: int) -> bool:
        """True if no compiler runs the graph (`fused`), and the host takes longer to launch the GEMM and its copies in fp8 than the device
        takes to compute the GEMM in bf16."""
        return not self.fused and self._gemm(rows, inner, columns, BASE.name, WIDE) < ticks(EAGER_HOST)

    def _gemm(self, rows: int, inner: int, columns: int, rate: str, size: int) -> int:
        arithmetic = 2 * rows * inner * columns / (self.device.rate(rate) * REACHED_FLOPS)
        moved = (rows * inner + inner * columns) * size + rows * columns * WIDE
        return ticks(max(arithmetic, moved / (self.device.bandwidth * REACHED_BANDWIDTH), self.launch))

    def copy(self, recipe: Recipe, role: str, way: str, numel: int) -> Iterator[tuple[str, int]]:
        """Yield (name, price) of each kernel that makes one fp8 copy of a matrix with `numel` elements.

        `role` is "x", "w" (operands of a product) or "g" (gradient of its result). `way` is the layout of the copy: STRAIGHT (not
        transposed) or TURNED. Copies of one value share kernels of the same name.
        """
        by_rows, held = recipe.scaling(role, way) == ROWS, role == W
        if not (self.fused or self.kernel):
            yield f"amax of {way if by_rows else 'all'}", self._pass(numel, *ALONE_AMAX)
            yield f"cast by {way if by_rows else 'all'}", self._pass(numel, *ALONE_CAST)
            if way != STRAIGHT:
                yield "transpose", self._pass(numel, 2 * NARROW)
        elif by_rows:
            fuses = self.fused and not held
            if way == STRAIGHT:  # one kernel suffices: a row stays in a cache between its amax and its cast
                yield way, self._pass(numel, NARROW if fuses else WIDE + NARROW)
            else:
                yield "transposed", self._pass(numel, (WIDE if fuses else 2 * WIDE) if self.fused else WIDE)
                yield way, self._pass(numel, WIDE + NARROW)
        else:
            # computing the amax takes no pass over the matrix if it follows from the scales of rows, or if the compiler computes it in the
            # kernel that makes the matrix
            known = recipe.scaling(role, STRAIGHT) == ROWS or (self.fused and not held)
            yield "amax", self._pass(numel, 0 if known else WIDE)
            if not (held and known):
                yield "scale", self._pass(0, 0)
            if self.fused and held:  # a weight: forward and backward read different layouts and are compiled apart, each with a cast kernel
                yield f"cast {way}", self._pass(numel, WIDE + NARROW)
            else:
                yield "cast", self._pass(numel, WIDE)
                yield f"cast {way}", self._pass(numel, NARROW, 0)

    def _pass(self, numel: int, size: int, launches: int = 1) -> int:
        return ticks(max(numel * size / (self.device.bandwidth * REACHED_BANDWIDTH), launches * self.launch))


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
