"""Price what fp8 saves in a product's GEMMs, and its copies: the roofline that torchao publishes, on our table of devices.

A GEMM takes the longest of its arithmetic, its traffic and a launch. A copy takes the longer of its kernels' traffic and launches.
Large kernels reach the shares of a device's rates below (torchao, `testing/training/roofline_utils.py`, measured on H100).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from amprewrite.ir.cost import TICK
from amprewrite.tables.devices import Device
from amprewrite.tables.recipes import BASE, FP8, ROWS, STRAIGHT, Recipe, W

REACHED_FLOPS, REACHED_BANDWIDTH = 0.78, 0.92
COMPILED_LAUNCH = 2e-6
"""Seconds that any kernel of a compiled graph takes at least."""
WIDE, NARROW = BASE.bytes, 1
"""Bytes per element of a value and of its fp8 copy."""
ALONE_AMAX, ALONE_CAST = (12, 4), (45, 6)
"""Bytes per element, and launches, of amax and cast if neither a compiler nor our kernel fuses them."""


@dataclass(frozen=True)
class ProductPrices:
    """Prices of GEMMs and copies on a device, in ticks of 0.1 ns."""

    device: Device
    fused: bool
    """Whether a compiler fuses amaxes and casts with the ops that make the values."""
    kernel: bool
    """Whether one kernel of ours casts and transposes, if no compiler does."""

    @property
    def launch(self) -> float:
        return COMPILED_LAUNCH if self.fused else self.device.launch

    def saved(self, rows: int, inner: int, columns: int) -> int:
        """Time that a GEMM of these sizes saves in fp8."""
        return self._gemm(rows, inner, columns, BASE.name, WIDE) - self._gemm(rows, inner, columns, FP8, NARROW)

    def _gemm(self, rows: int, inner: int, columns: int, rate: str, size: int) -> int:
        arithmetic = 2 * rows * inner * columns / (self.device.rate(rate) * REACHED_FLOPS)
        moved = (rows * inner + inner * columns) * size + rows * columns * WIDE
        return _ticks(max(arithmetic, moved / (self.device.bandwidth * REACHED_BANDWIDTH), self.launch))

    def copy(self, recipe: Recipe, role: str, way: str, numel: int) -> Iterator[tuple[str, int]]:
        """The kernels of one copy, each with its price. Copies of one value share kernels of the same name."""
        by_rows, held = recipe.scaling(role, way) == ROWS, role == W
        if not (self.fused or self.kernel):
            yield f"amax of {way if by_rows else 'all'}", self._pass(numel, *ALONE_AMAX)
            yield f"cast by {way if by_rows else 'all'}", self._pass(numel, *ALONE_CAST)
            if way != STRAIGHT:
                yield "transpose", self._pass(numel, 2 * NARROW)
        elif by_rows:
            fuses = self.fused and not held
            if way == STRAIGHT:  # a row stays in a cache between its amax and its cast
                yield way, self._pass(numel, NARROW if fuses else WIDE + NARROW)
            else:
                yield "transposed", self._pass(numel, (WIDE if fuses else 2 * WIDE) if self.fused else WIDE)
                yield way, self._pass(numel, WIDE + NARROW)
        else:
            known = recipe.scaling(role, STRAIGHT) == ROWS or (self.fused and not held)  # from the scales of rows, or while it is made
            yield "amax", self._pass(numel, 0 if known else WIDE)
            if not (held and known):
                yield "scale", self._pass(0, 0)
            if self.fused and held:  # forward and backward are compiled apart
                yield f"cast {way}", self._pass(numel, WIDE + NARROW)
            else:
                yield "cast", self._pass(numel, WIDE)
                yield f"cast {way}", self._pass(numel, NARROW, 0)

    def _pass(self, numel: int, size: int, launches: int = 1) -> int:
        return _ticks(max(numel * size / (self.device.bandwidth * REACHED_BANDWIDTH), launches * self.launch))


def _ticks(seconds: float) -> int:
    return round(seconds / TICK)


__all__ = ["ProductPrices"]
