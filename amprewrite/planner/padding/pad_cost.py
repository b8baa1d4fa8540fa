"""Cost of unaligned sizes and of pads in seconds: `pad="auto"` compares them, `pad="measure"` times them.

The model: a matrix product takes the longer of two times, its arithmetic at the device row's rate times an efficiency by alignment, and its
bytes at the device's bandwidth. Efficiencies are for cuBLAS on Tensor Cores: rows of 16 bytes reach the peak; rows of 8, 4 and 2 bytes need
2, 4 and 8 times the load instructions (NVIDIA, "Matrix Multiplication Background User's Guide", figure on alignment; GPT-2's head of 50257
against 50304 columns is worth a quarter of a step).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from amprewrite.tables.devices import Device
from amprewrite.tables.formats import Format

EFFICIENCY = ((16, 1.0), (8, 0.75), (4, 0.55), (2, 0.4))
"""Share of the peak by the largest power of two of bytes that divides the rows."""
MARGIN = 1.05
"""Ratio by which an unaligned product must be predicted slower before padding it is considered."""


def efficiency(size: int, itemsize: int) -> float:
    """Share of the peak that rows of `size` elements allow."""
    return next((share for grain, share in EFFICIENCY if size * itemsize % grain == 0), EFFICIENCY[-1][1])


@dataclass
class PadCost:
    """Prices on one device. `measure` times a product: (op, shapes, padded shapes) → seconds of both, or None."""

    device: Device
    low: Format
    training: bool
    measure: Callable[[Product, Product], tuple[float, float] | None] | None = None
    measured: dict[Product, float] = field(default_factory=dict)
    cached_weights: bool = True
    """True if copies of parameters outlive a call without gradients."""
    together: bool = False
    """True if one launch makes all copies of parameters, where they do not outlive a call."""

    @property
    def itemsize(self) -> int:
        return self.low.bytes

    @property
    def passes(self) -> int:
        """Products that a step runs for each one of the forward: itself, and the gradients of both operands."""
        return 3 if self.training else 1

    @property
    def gains(self) -> bool:
        """True if aligned sizes are faster on this device."""
        return self.device.type != "cpu" and self.low.name in self.device.low_formats

    def pad(self, numel: int) -> float:
        """Seconds of one real pad of `numel` elements: forward, and the cost of its gradient."""
        return 2 * self.device.launch + 2 * numel * self.itemsize / self.device.bandwidth

    def weight(self, numel: int) -> float:
        """Seconds of a padded copy of an fp32 parameter that no cast reads: made at every call, or once if copies are kept."""
        moved = 8 * numel / self.device.bandwidth
        if self.training or not (self.cached_weights or self.together):
            return self.device.launch + moved
        return 0.01 * self.device.launch + (0.0 if self.cached_weights else moved)

    def slice(self, numel: int) -> float:
        """Seconds of one slice forward, which may need a dense copy, and in training of the pad of its gradient."""
        seconds = self.device.launch + 2 * numel * self.itemsize / self.device.bandwidth
        return seconds + (self.pad(numel) if self.training else 0)

    def inside(self, added: float) -> float:
        """Seconds to write and read `added` elements of padding once more, forward and backward."""
        return 2 * added * self.itemsize / self.device.bandwidth * self.passes

    def product(self, product: Product) -> float:
        """Seconds of one matrix product by the model."""
        share = min(efficiency(product.n, self.itemsize), efficiency(product.k, self.itemsize))
        arithmetic = 2 * product.batch * product.m * product.n * product.k / (self.device.rate(self.low.name) * share)
        moved = product.batch * (product.m * product.k + product.k * product.n + product.m * product.n)
        return max(arithmetic, moved * self.itemsize / self.device.bandwidth)

    def gain(self, product: Product, padded: Product) -> float:
        """Seconds that running `padded` in place of `product` saves in a step; at least 0."""
        if self.measure is not None:
            found = self.measure(product, padded)
            if found is not None:
                self.measured[product] = (found[0] - found[1]) * self.passes
                return max(self.measured[product], 0.0)
        before, after = self.product(product), self.product(padded)
        return (before - after) * self.passes if before > after * MARGIN else 0.0


@dataclass(frozen=True)
class Product:
    """The sizes of a batch of matrix products [m, k] @ [k, n]; a convolution counts as the product it is lowered to."""

    batch: int
    m: int
    n: int
    k: int


_TIMES: dict[tuple[Any, ...], tuple[float, float]] = {}
"""Measured seconds by (device name, dtype, sizes, padded sizes). A GPU's time does not depend on the model."""


def stopwatch(device: str, dtype: Any) -> Callable[[Product, Product], tuple[float, float] | None]:
    """A function that times products on a CUDA device, padded and not, in turn several times. Results are cached in memory."""
    import torch

    name = torch.cuda.get_device_name(device)

    def seconds(product: Product) -> float:
        left = torch.zeros(product.batch, product.m, product.k, dtype=dtype, device=device)
        right = torch.zeros(product.batch, product.k, product.n, dtype=dtype, device=device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.bmm(left, right)
        start.record()
        for _ in range(10):
            torch.bmm(left, right)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e4

    def measure(product: Product, padded: Product) -> tuple[float, float] | None:
        key = (name, dtype, product, padded)
        if key not in _TIMES:
            size = max(math.prod((p.batch, p.m * p.k + p.k * p.n + p.m * p.n)) for p in (product, padded))
            if size * dtype.itemsize > torch.cuda.mem_get_info(device)[0] / 4:
                return None
            with torch.no_grad():
                pairs = [(seconds(product), seconds(padded)) for _ in range(5)]
            _TIMES[key] = min(p[0] for p in pairs), min(p[1] for p in pairs)
        return _TIMES[key]

    return measure
