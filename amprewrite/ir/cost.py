"""Predict the run time of a plan with a roofline model: per kernel, a launch plus the longer of compute time and memory traffic.

The model is Williams et al. (2009). Its rules here:

1. An op takes `launch + max(FLOPs / rate, bytes / bandwidth)` in the format in which it runs. A training step takes three times as long:
   its backward computes gradients of two operands, or reads saved values again.
2. A cast takes a launch and the transfer of its bytes. In training the gradient is cast back, once for all readers of the value.
3. A kernel that promotes mixed dtypes reads a low operand next to a high one without a cast. In training the gradient is still cast back.
   In inference the kernel is a little slower, because it converts as it reads.
4. The cast of a parameter costs as much as any other cast, at every call. Copies that are kept between calls (`cache_weights="step"`,
   frozen weights, a file) cost nothing in a pass without gradients.
5. One plan may serve both training and inference. The price is then a weighted mean. `CostModel.training` is the weight of training.
6. If memory has a price (`rewrite(..., memory=...)`), a training step also pays for the bytes of every result and copy, because the
   backward may keep them.

Prices are integers in ticks of 0.1 ns, so that sums are exact and the choice of the cheapest plan depends on no rounding error.

`ProductPrices` predicts the time that fp8 GEMMs save and the time that fp8 copies cost. It applies torchao's roofline model to
amprewrite's device table. A GEMM takes the longest of three times: arithmetic, memory traffic, one launch. A kernel that makes a copy takes
the longer of two times: memory traffic, launches. Large kernels reach only a share of a device's peak: `REACHED_FLOPS` and
`REACHED_BANDWIDTH` (torchao, `testing/training/roofline_utils.py`, measured on H100).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from amprewrite.ir.op_graph import Operand, OpGraph, OpNode, anchor, wanted
from amprewrite.tables.devices import Device, fp32_rate
from amprewrite.tables.formats import BASE, FP8, FP32, ROWS, STRAIGHT, Format, Recipe, W
from amprewrite.tables.ops.op_lists import Trait, find_op, ops_with
from amprewrite.tables.vocabulary import Colour, OpKind

TICK = 1e-10
"""The unit of prices, in seconds: 0.1 ns."""
RISK = 0.02
"""Extra price of a low op that rounds, as a share of the launch time. An op that saves less than this in low precision stays fp32."""
MIXING = 0.1
"""Extra price of a kernel that reads a low and an fp32 operand, as a share of the price of a cast: such kernels do not vectorise."""
_CONVERSIONS = ops_with(Trait.CONVERTS)
"""Ops that convert dtypes. Such an op costs as much as a cast if it changes the format. Otherwise it is dropped and costs nothing."""


@dataclass
class Measured:
    """Measured seconds of the ops and casts of one graph."""

    ops: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds of an op, by (name of the node, name of the format)."""
    casts: dict[int, float] = field(default_factory=dict)
    """Seconds of a cast from fp32 to the low format, by number of elements."""
    refused: int = 0
    """Number of calls of ops that cannot be timed alone. Their prices come from the device table."""


@dataclass(frozen=True)
class CostModel:
    """Computes the prices of ops and casts on one device. All prices are in ticks of 0.1 ns."""

    device: Device
    low: Format
    training: float
    """Weight of a training step in prices: 0 for inference, 1 for training, or a number between. Inference has the weight 1 - training."""
    cached_weights: bool = True
    """Whether calls without gradients keep the low copies of parameters for the next call."""
    timings: Measured | None = None
    """Measured times from which prices are computed; None to compute them from the device table."""
    memory: float = 0.0
    """Price in seconds of one byte that is kept for the backward."""

    @property
    def time(self) -> CostModel:
        """Copy of this cost model in which memory has no price. Its prices are then predicted run times, for reports."""
        return replace(self, memory=0.0)

    @property
    def place(self) -> str:
        """Name of the device, and whether its prices were modelled or measured: "h100 (modelled)" or "cpu (measured)"."""
        return f"{self.device.name} ({'modelled' if self.timings is None else 'measured'})"

    def op(self, node: OpNode, fmt: Format, read: int) -> int:
        """Return the price of `node` if it runs in the format `fmt` and reads `read` elements."""
        seconds = self._seconds(node, fmt, read)
        if fmt is not FP32 and node.kind is not OpKind.CLEAR:
            seconds += RISK * self.device.launch
        kept = 0.0 if moves_nothing(node) else self._kept(node.numel * fmt.bytes)
        return ticks(seconds * (1 + 2 * self.training) + kept)

    def _kept(self, size: int) -> float:
        return size * self.memory * self.training

    def _seconds(self, node: OpNode, fmt: Format, read: int) -> float:
        if moves_nothing(node):
            return 0.0
        measured = self.timings.ops.get((node.name, fmt.name)) if self.timings is not None else None
        if measured is not None:
            return measured
        moved = (read + node.numel) * fmt.bytes / self.device.bandwidth
        if not node.flops:
            return self.device.launch + moved
        rate = fp32_rate(self.device, node.op.startswith("conv")) if fmt is FP32 else fmt.name
        return self.device.launch + max(moved, node.flops / self.device.rate(rate))

    def cast(self, node: OpNode) -> int:
        """Return the price of casting the result of `node` once, from low to fp32 or back. The cast of the gradient is not included."""
        if not 0 < self.training < 1:
            return self._cast(node, bool(self.training))
        return round(self.training * self._cast(node, True) + (1 - self.training) * self._cast(node, False))

    def _cast(self, node: OpNode, training: bool) -> int:
        if node.role == "parameter" and self.cached_weights and not training:
            return 0
        measured = self.timings.casts.get(node.numel) if self.timings is not None else None
        moved = node.numel * (FP32.bytes + self.low.bytes) / self.device.bandwidth
        kept = node.numel * self.low.bytes * self.memory if training and node.role != "parameter" else 0.0
        return ticks((self.device.launch + moved if measured is None else measured) + kept)

    def gradient_cast(self, node: OpNode) -> int:
        """Return the price of one cast of the gradient of `node`; 0 without training, and for constants and buffers.

        The cast is needed if a reader sends gradients (`sends_gradients`) and runs in another format than `node`. It is paid once, however
        many such readers there are.
        """
        if not self.training or node.role in ("constant", "buffer"):
            return 0
        return round(self.training * self._cast(node, True))

    def mixed_read(self, node: OpNode) -> int:
        """Return the extra price, in inference, of a kernel that converts the low result of `node` to fp32 as it reads (see `mixes`)."""
        return 0 if self.training >= 1 else round((1 - self.training) * MIXING * self._cast(node, False))


def sends_gradients(reader: OpNode) -> bool:
    """True if `reader` sends gradients to its operands: it is an output of the graph, or its result is fp32 in the model, not int."""
    return reader.carries_fp32 or reader.role == "output"


def mixes(reader: OpNode, operand: Operand, want: Colour) -> bool:
    """True if `reader` needs `operand` in fp32 (the colour `want` is high), but its kernel takes a low operand and converts it itself."""
    return want is Colour.HIGH and operand in reader.promoted


def moves_nothing(node: OpNode) -> bool:
    """True if `node` has the price 0: it is a view, a conversion (priced as a cast instead), or an input, weight or output of the graph."""
    return node.role != "op" or _is_view(node.op)


@cache
def _is_view(op: str) -> bool:
    row = find_op(op)
    return op in _CONVERSIONS or (row is not None and row.view)


def elements_read(graph: OpGraph, node: OpNode) -> int:
    """Return the number of elements that the op `node` reads from its fp32 operands.

    If an op of kind CLEAR (harmless in any precision, such as an embedding or a view) reads a parameter, the read counts as a table lookup.
    A lookup reads at most as many elements as it returns.
    """
    total = 0
    for operand in node.operands:
        maker = graph[operand.value]
        lookup = node.kind is OpKind.CLEAR and maker.role == "parameter"
        total += min(maker.numel, node.numel) if lookup else maker.numel
    return total


@dataclass(frozen=True)
class Price:
    """Price of a graph for one choice of its ops' colours (low or high), in ticks of 0.1 ns."""

    ops: int
    casts: int
    """Price of all casts, casts of gradients included."""
    copies: int
    """Number of copies that the forward makes. This is a count, not a price."""

    @property
    def total(self) -> int:
        return self.ops + self.casts


class Prices:
    """Computes the price of one graph for many choices of its ops' colours (low or high). The constructor prices each op and cast once."""

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
        """Return the price of all ops and of the casts between them. `colours` maps the name of each node to its colour (low or high)."""
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
    """Return the price of `graph` with the colours (low or high) in `colours`, by name of the node. `Prices` is faster for many calls."""
    return Prices(graph, model).of(colours)


def ticks(seconds: float) -> int:
    """Convert seconds to a whole number of ticks (`TICK`, 0.1 ns)."""
    return round(seconds / TICK)


REACHED_FLOPS, REACHED_BANDWIDTH = 0.78, 0.92
COMPILED_LAUNCH = 2e-6
"""Least time of a kernel in a compiled graph, in seconds."""
WIDE, NARROW = BASE.bytes, 1
"""Bytes per element of a bf16 value, and of its fp8 copy."""
ALONE_AMAX, ALONE_CAST = (12, 4), (45, 6)
"""Cost of computing the amax, and of casting to fp8, in separate eager PyTorch kernels: (bytes of traffic per element, launches)."""

EAGER_HOST = 0.67e-3
"""Seconds that the host takes for one fp8 GEMM and its copies without a compiler. Measured with an H100: 2.0 ms for the three GEMMs of a
product (`examples/benchmarks/fp8.py`, 26 November 2026)."""


@dataclass(frozen=True)
class ProductPrices:
    """Computes prices of GEMMs and fp8 copies on one device, in ticks of 0.1 ns."""

    device: Device
    fused: bool
    """Whether a compiler fuses the computation of amaxes (largest magnitudes) and the casts with the ops that make the values."""
    kernel: bool
    """Whether amprewrite's own kernel casts to fp8 and transposes, if `fused` is False."""

    @property
    def launch(self) -> float:
        return COMPILED_LAUNCH if self.fused else self.device.launch

    def saved(self, rows: int, inner: int, columns: int) -> int:
        """Return the time, in ticks of 0.1 ns, that fp8 saves in a GEMM [rows, inner] @ [inner, columns], compared with bf16.

        The number is negative if fp8 is slower.
        """
        return self._gemm(rows, inner, columns, BASE.name, WIDE) - self._gemm(rows, inner, columns, FP8, NARROW)

    def waits_for_host(self, rows: int, inner: int, columns: int) -> bool:
        """True if the GEMM is bound by the host: the host takes longer to launch the fp8 version than the device takes for the bf16 one.

        False if a compiler runs the graph (`fused`), because the launch time, EAGER_HOST, was measured without one.
        """
        return not self.fused and self._gemm(rows, inner, columns, BASE.name, WIDE) < ticks(EAGER_HOST)

    def _gemm(self, rows: int, inner: int, columns: int, rate: str, size: int) -> int:
        arithmetic = 2 * rows * inner * columns / (self.device.rate(rate) * REACHED_FLOPS)
        moved = (rows * inner + inner * columns) * size + rows * columns * WIDE
        return ticks(max(arithmetic, moved / (self.device.bandwidth * REACHED_BANDWIDTH), self.launch))

    def copy(self, recipe: Recipe, role: str, way: str, numel: int) -> Iterator[tuple[str, int]]:
        """Yield (name, price) of each kernel that runs to make one fp8 copy of a matrix with `numel` elements.

        `recipe` tells which elements share a scale. `role` is "x" or "w" for an operand of a product, "g" for the gradient of its result.
        `way` is the layout of the copy: STRAIGHT (as stored) or TURNED (transposed). If two copies of a matrix need a kernel of the same
        name, such as "amax", the kernel runs once for both.
        """
        by_rows, held = recipe.scaling(role, way) == ROWS, role == W
        if not (self.fused or self.kernel):
            yield f"amax of {way if by_rows else 'all'}", self._pass(numel, *ALONE_AMAX)
            yield f"cast by {way if by_rows else 'all'}", self._pass(numel, *ALONE_CAST)
            if way != STRAIGHT:
                yield "transpose", self._pass(numel, 2 * NARROW)
        elif by_rows:
            fuses = self.fused and not held
            if way == STRAIGHT:  # one kernel suffices: a row stays in the cache from the computation of its amax to its cast
                yield way, self._pass(numel, NARROW if fuses else WIDE + NARROW)
            else:
                yield "transposed", self._pass(numel, (WIDE if fuses else 2 * WIDE) if self.fused else WIDE)
                yield way, self._pass(numel, WIDE + NARROW)
        else:
            # The amax needs no pass over the matrix if the straight copy has row scales, or the kernel that makes the matrix computes it.
            known = recipe.scaling(role, STRAIGHT) == ROWS or (self.fused and not held)
            yield "amax", self._pass(numel, 0 if known else WIDE)
            if not (held and known):
                yield "scale", self._pass(0, 0)
            if self.fused and held:  # a weight: forward and backward are compiled separately, and each casts the layout that it reads
                yield f"cast {way}", self._pass(numel, WIDE + NARROW)
            else:
                yield "cast", self._pass(numel, WIDE)
                yield f"cast {way}", self._pass(numel, NARROW, 0)

    def _pass(self, numel: int, size: int, launches: int = 1) -> int:
        return ticks(max(numel * size / (self.device.bandwidth * REACHED_BANDWIDTH), launches * self.launch))


@dataclass(frozen=True)
class MatrixProduct:
    """A matrix product x · wᵀ that fp8 kernels could run. Its sizes are [rows, inner] times [inner, columns].

    The last dim of x is the inner dim, and all other dims of x together are the rows. w has the shape [columns, inner], as in a linear
    layer. If `transposed` is True, w is stored the other way round, as [inner, columns], and the product is x · w."""

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
