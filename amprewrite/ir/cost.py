"""Price a plan on a roofline: a launch, and the longer of arithmetic and memory traffic (Williams et al. 2009).

An op takes `launch + max(FLOPs / rate, bytes / bandwidth)` in the format it runs in, and three times that in a step of training:
gradients of two operands, or saved values read again. A cast takes a launch and its bytes; in training the gradient is cast
back, once for all readers of the value. A promoting kernel reads a low operand next to a high one without a cast. In training the
gradient is cast all the same; in inference a kernel that converts as it reads is a little slower. By default, every call makes low
copies of parameters. They and their gradients cost their bytes only, since a few launches make all of them. If copies are
kept (a block of frozen weights, `cache_weights="step"`, a file), they cost nothing without gradients.

A price may mix training and inference: if one plan serves both, `CostModel.training` is the weight of training.

If memory has a price (`rewrite(..., memory=...)`), a step of training also pays for the bytes of every result and copy, since
backward may keep them.

Prices are whole ticks of 0.1 ns. Sums are then exact, and the cheapest plan depends on no rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import numpy as np

from amprewrite.ir.op_graph import Operand, OpGraph, OpNode, anchor, wanted
from amprewrite.tables.devices import Device, fp32_rate
from amprewrite.tables.formats import FP32, Format
from amprewrite.tables.ops.op_lists import Trait, find_op, ops_with
from amprewrite.tables.vocabulary import Colour, OpKind

TICK = 1e-10
"""Seconds."""
RISK = 0.02
"""A rounding op runs low only if that saves more than this share of a launch: ties go to accuracy."""
MIXING = 0.1
"""Price in the forward of reading a low operand next to a high one, as a share of a cast: kernels that convert do not vectorise."""
_CONVERSIONS = ops_with(Trait.CONVERTS)
"""Conversions. They are priced as casts if the format changes; otherwise the rewrite drops them."""


class Timings(Protocol):
    """Measured seconds of a forward; None if there is no measurement."""

    def op(self, node: OpNode, fmt: Format) -> float | None: ...

    def cast(self, numel: int, fmt: Format) -> float | None: ...


@dataclass(frozen=True)
class CostModel:
    """Prices on a device. All results are in ticks of 0.1 ns."""

    device: Device
    low: Format
    training: float
    """Weight of a training step in the price, from 0 to 1; the rest is a pass without gradients. True is 1, False is 0."""
    cached_weights: bool = True
    """Whether low copies of parameters are kept between calls without gradients."""
    timings: Timings | None = None
    memory: float = 0.0
    """Price of a byte kept for backward, in seconds."""
    together: bool = False
    """Whether one launch makes all low copies of parameters and a few launches cast their gradients back."""

    @property
    def time(self) -> CostModel:
        """The same prices without the price of memory. Times shown to users come from these."""
        return replace(self, memory=0.0)

    @property
    def place(self) -> str:
        """Name of the device, and whether its prices are modelled or measured."""
        return f"{self.device.name} ({'modelled' if self.timings is None else 'measured'})"

    def op(self, node: OpNode, fmt: Format, read: int) -> int:
        """Price of the op in `fmt` if it reads `read` elements in that format."""
        seconds = self._seconds(node, fmt, read)
        if fmt is not FP32 and node.kind is not OpKind.CLEAR:
            seconds += RISK * self.device.launch
        kept = 0.0 if moves_nothing(node) else self._kept(node.numel * fmt.bytes)
        return _ticks(seconds * (1 + 2 * self.training) + kept)

    def _kept(self, size: int) -> float:
        return size * self.memory * self.training

    def _seconds(self, node: OpNode, fmt: Format, read: int) -> float:
        if moves_nothing(node):
            return 0.0
        measured = self.timings.op(node, fmt) if self.timings is not None else None
        if measured is not None:
            return measured
        moved = (read + node.numel) * fmt.bytes / self.device.bandwidth
        if not node.flops:
            return self.device.launch + moved
        rate = fp32_rate(self.device, node.op.startswith("conv")) if fmt is FP32 else fmt.name
        return self.device.launch + max(moved, node.flops / self.device.rate(rate))

    def cast(self, node: OpNode) -> int:
        """Price in the forward of one copy of the node's result in the other format."""
        if not 0 < self.training < 1:
            return self._cast(node, bool(self.training))
        return round(self.training * self._cast(node, True) + (1 - self.training) * self._cast(node, False))

    def _cast(self, node: OpNode, training: bool) -> int:
        if node.role == "parameter" and self.cached_weights and not training:
            return 0
        measured = self.timings.cast(node.numel, self.low) if self.timings is not None else None
        moved = node.numel * (FP32.bytes + self.low.bytes) / self.device.bandwidth
        if node.role == "parameter" and self.together:
            return _ticks(moved if measured is None else max(measured - self.device.launch, 0.0))
        kept = node.numel * self.low.bytes * self.memory if training and node.role != "parameter" else 0.0
        return _ticks((self.device.launch + moved if measured is None else measured) + kept)

    def gradient_cast(self, node: OpNode) -> int:
        """Price of casting a value's gradient back. It is paid once for all readers in the other format for which `sends_gradients`."""
        if not self.training or node.role in ("constant", "buffer"):
            return 0
        return round(self.training * self._cast(node, True))

    def mixed_read(self, node: OpNode) -> int:
        """Price, without gradients, of a kernel that reads this low value next to a high one and converts it (see `mixes`)."""
        return 0 if self.training >= 1 else round((1 - self.training) * MIXING * self._cast(node, False))


def sends_gradients(reader: OpNode) -> bool:
    """Whether the backward of this op gives its operands gradients in the op's own format."""
    return reader.carries_fp32 or reader.role == "output"


def mixes(reader: OpNode, operand: Operand, want: Colour) -> bool:
    """Whether a kernel that computes in the colour `want` reads the operand in another format and converts it itself."""
    return want is Colour.HIGH and operand in reader.promoted


def moves_nothing(node: OpNode) -> bool:
    """Whether the op costs nothing by itself: a view, a conversion, or a vertex that is no op."""
    return node.role != "op" or _is_view(node.op)


@cache
def _is_view(op: str) -> bool:
    row = find_op(op)
    return op in _CONVERSIONS or (row is not None and row.view)


def elements_read(graph: OpGraph, node: OpNode) -> int:
    """Elements of fp32 operands that the op reads. A lookup in a table reads as many as it returns."""
    total = 0
    for operand in node.operands:
        maker = graph[operand.value]
        lookup = node.kind is OpKind.CLEAR and maker.role == "parameter"
        total += min(maker.numel, node.numel) if lookup else maker.numel
    return total


@dataclass(frozen=True)
class Price:
    """Price of one colouring of a graph, in ticks of 0.1 ns."""

    ops: int
    casts: int
    """Time of all casts, casts of gradients included."""
    copies: int
    """Number of copies that the forward makes."""

    @property
    def total(self) -> int:
        return self.ops + self.casts


class Prices:
    """Price colourings of one graph on a device. The prices of its ops and values are computed once."""

    def __init__(self, graph: OpGraph, model: CostModel) -> None:
        self.places = {node.name: place for place, node in enumerate(graph)}
        self.low, self.high = np.zeros((2, len(self.places)), np.int64)
        keys: dict[tuple[str, int], int] = {}
        edges: list[tuple[int, int, int, bool, bool, bool, bool, bool]] = []
        for node in graph:
            place = self.places[node.name]
            if node.role == "op":
                read = elements_read(graph, node)
                self.low[place], self.high[place] = model.op(node, model.low, read), model.op(node, FP32, read)
            mixing = node.promoted
            cast = anchor(node, graph.nodes) if mixing else None
            for operand, want in wanted(node, Colour.LOW):
                key = keys.setdefault((operand.value, operand.write_version), len(keys))
                edges.append((
                    place, self.places[operand.value], key, want is Colour.HIGH, operand in mixing, operand is cast,
                    sends_gradients(node), mixes(node, operand, Colour.HIGH),
                ))  # fmt: skip
        columns = np.array(edges, np.int64).reshape(-1, 8).T
        self.reader, self.maker, self.key = columns[:3]
        self.always_high, self.promoted, self.anchors, self.sends, self.mixes = columns[3:].astype(bool)
        self.cast = np.array([model.cast(graph[value]) for value, _ in keys], np.int64)
        self.gradient_cast = np.array([model.gradient_cast(graph[value]) for value, _ in keys], np.int64)
        self.mixed_read = np.array([model.mixed_read(graph[value]) for value, _ in keys], np.int64)

    def of(self, colours: Mapping[str, Colour]) -> Price:
        """The price of a colouring: its ops, and the casts that it needs."""
        low = np.array([colours[name] is Colour.LOW for name in self.places], bool)
        made_low, runs_low = low[self.maker], low[self.reader] & ~self.always_high
        mixing_high = np.bincount(self.reader[self.promoted & ~made_low], minlength=len(low)) > 0
        differs = made_low != runs_low
        fits = self.promoted & ~runs_low & (mixing_high[self.reader] | ~self.anchors)
        copied = np.unique(self.key[differs & ~fits])
        sent = np.unique(self.key[differs & self.sends])
        mixed = np.unique(self.key[differs & ~runs_low & self.mixes])
        ops = int(self.low[low].sum() + self.high[~low].sum())
        beyond = self.gradient_cast[sent].sum() + self.mixed_read[mixed].sum()
        return Price(ops, int(self.cast[copied].sum() + beyond), len(copied))


def price(graph: OpGraph, colours: Mapping[str, Colour], model: CostModel) -> Price:
    """The price of one colouring of a graph."""
    return Prices(graph, model).of(colours)


def _ticks(seconds: float) -> int:
    return round(seconds / TICK)
