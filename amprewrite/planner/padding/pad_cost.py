"""Predict, in seconds, the cost of unaligned sizes and of pads. `pad="auto"` uses these predictions. `pad="measure"` measures products.

The model: a matrix product takes the longer of two times. One is its arithmetic at the device's rate, reduced by an efficiency that depends
on alignment. The other is its bytes at the device's bandwidth. The efficiencies are for cuBLAS on Tensor Cores: rows whose size is a
multiple of 16 bytes reach the peak rate; multiples of 8, 4 and 2 bytes need 2, 4 and 8 times the load instructions (NVIDIA, "Matrix
Multiplication Background User's Guide", figure on alignment).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from amprewrite.tables.devices import Device
from amprewrite.tables.formats import Format

EFFICIENCY = ((16, 1.0), (8, 0.75), (4, 0.55), (2, 0.4))
"""(bytes, share of the peak rate if the size of a row is a multiple of these bytes), the largest first."""
MARGIN = 1.05
"""An unaligned product is padded only if it is predicted to be slower than the padded product by at least this factor."""


def efficiency(size: int, itemsize: int) -> float:
    """Return the share, from 0 to 1, of the peak rate that a matrix product reaches with rows of `size` elements of `itemsize` bytes."""
    return next((share for grain, share in EFFICIENCY if size * itemsize % grain == 0), EFFICIENCY[-1][1])


@dataclass
class PadCost:
    """Computes the cost of products, pads and slices on one device, in seconds."""

    device: Device
    low: Format
    training: bool
    measure: Callable[[Product, Product], tuple[float, float] | None] | None = None
    """Function that returns the measured seconds of a product and of its padded form, or None if they cannot be timed. If the field is
    None, times are predicted."""
    measured: dict[Product, float] = field(default_factory=dict)
    """Seconds that padding saves in a step, for each product that was timed; negative if padding makes it slower."""
    cached_weights: bool = True
    """True if calls without gradients keep the low copies of parameters for the next call."""

    @property
    def itemsize(self) -> int:
        return self.low.bytes

    @property
    def passes(self) -> int:
        """Number of products that a step runs for each product of the forward pass: 3 in training (two compute gradients), otherwise 1."""
        return 3 if self.training else 1

    @property
    def gains(self) -> bool:
        """True if aligned sizes are faster on this device."""
        return self.device.type != "cpu" and self.low.name in self.device.low_formats

    def pad(self, numel: int) -> float:
        """Return the seconds to pad an activation of `numel` elements. The backward is a slice: a view, which takes no time."""
        return 2 * self.device.launch + 2 * numel * self.itemsize / self.device.bandwidth

    def weight(self, numel: int) -> float:
        """Return the seconds that a call of the model needs to make a padded fp32 copy of a parameter of `numel` elements.

        Training makes the copy anew in every call; calls without gradients reuse it if `cached_weights` is True. (A parameter that is read
        in the low format needs no such copy, because the cast to this format pads it.)
        """
        if self.cached_weights and not self.training:
            return 0.01 * self.device.launch
        return self.device.launch + 8 * numel / self.device.bandwidth

    def slice(self, numel: int) -> float:
        """Return the seconds to slice a padded value to `numel` elements and make it dense; in training, also to pad the gradient."""
        seconds = self.device.launch + 2 * numel * self.itemsize / self.device.bandwidth
        return seconds + (self.pad(numel) if self.training else 0)

    def inside(self, added: float) -> float:
        """Return the seconds that a step needs to write and read `added` elements of padding. In training this includes the backward."""
        return 2 * added * self.itemsize / self.device.bandwidth * self.passes

    def product(self, product: Product) -> float:
        """Return the predicted seconds of one matrix product."""
        share = min(efficiency(product.n, self.itemsize), efficiency(product.k, self.itemsize))
        arithmetic = 2 * product.m * product.n * product.k / (self.device.rate(self.low.name) * share)
        moved = product.m * product.k + product.k * product.n + product.m * product.n
        return max(arithmetic, moved * self.itemsize / self.device.bandwidth)

    def gain(self, product: Product, padded: Product) -> float:
        """Return the seconds that a step saves if it runs the matrix product `padded` instead of `product`; 0 if it saves nothing.

        The seconds are measured if `measure` can time both products, otherwise predicted. A predicted saving within `MARGIN` counts as 0.
        """
        if self.measure is not None:
            found = self.measure(product, padded)
            if found is not None:
                self.measured[product] = (found[0] - found[1]) * self.passes
                return max(self.measured[product], 0.0)
        before, after = self.product(product), self.product(padded)
        return (before - after) * self.passes if before > after * MARGIN else 0.0


@dataclass(frozen=True)
class Product:
    """The sizes of a matrix product [m, k] @ [k, n]. A convolution counts as the matrix product to which it is lowered."""

    m: int
    n: int
    k: int


_TIMES: dict[tuple[Any, ...], tuple[float, float]] = {}
"""Cache of measured seconds by (device name, dtype, sizes, padded sizes). All models share it, since times depend on nothing else."""


def stopwatch(device: str, dtype: Any) -> Callable[[Product, Product], tuple[float, float] | None]:
    """Return a function that times a product and its padded form on a CUDA device: (product, padded product) → seconds of both.

    The function times both products alternately, five times each (ten runs at a time), and returns the shortest mean time of each. It
    returns None if the tensors would take more than a quarter of the device's free memory. Results are cached in `_TIMES`.
    """
    import torch

    name = torch.cuda.get_device_name(device)

    def seconds(product: Product) -> float:
        left = torch.zeros(product.m, product.k, dtype=dtype, device=device)
        right = torch.zeros(product.k, product.n, dtype=dtype, device=device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.mm(left, right)
        start.record()
        for _ in range(10):
            torch.mm(left, right)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e4

    def measure(product: Product, padded: Product) -> tuple[float, float] | None:
        key = (name, dtype, product, padded)
        if key not in _TIMES:
            size = max(p.m * p.k + p.k * p.n + p.m * p.n for p in (product, padded))
            if size * dtype.itemsize > torch.cuda.mem_get_info(device)[0] / 4:
                return None
            with torch.no_grad():
                pairs = [(seconds(product), seconds(padded)) for _ in range(5)]
            _TIMES[key] = min(p[0] for p in pairs), min(p[1] for p in pairs)
        return _TIMES[key]

    return measure
