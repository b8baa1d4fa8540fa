"""Colour what the lists leave open so that casts and bytes cost least: an s–t minimum cut.

1. Every open node (or tie of nodes) is a vertex; low is the source side.
2. A node pays its low cost on an arc to the sink, its high cost on an arc from the source.
3. A value that is read in the other format pays for one copy, however many read it: an extra vertex "a low copy exists"
   or "all readers are low" with infinite arcs from or to the readers and one arc of the copy's cost to or from the maker.
4. A low operand beside a high one in a promoting op costs a small share: the kernel promotes it for nothing.
5. The cut nearest to the source is taken: of all cheapest plans the one with the fewest low ops.

Exact, by Kolmogorov and Zabih, "What energy functions can be minimized via graph cuts?" (2004): every term is unary or of
the form w·a·(1−b). The solver is scipy's Dinic; capacities are scaled into its int32 range.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from amprewrite.colour import Colour, OpKind, Reason
from amprewrite.cost import FREE_PROMOTION, CostModel
from amprewrite.devices import device_row
from amprewrite.formats import FP32
from amprewrite.op_graph import Demand, OpNode
from amprewrite.pass_base import Pass
from amprewrite.program import Program

SOURCE, SINK = 0, 1
TOTAL = 2**30
"""Sum of all finite capacities after scaling; infinite arcs carry one more."""


class RepaintByCost(Pass):
    name = "repaint-by-cost"

    def call(self, program: Program) -> bool:
        if program.lists.rule != "cost":
            return False
        open_nodes = [node for node in program.graph if node.name not in program.paints]
        if not open_nodes:
            return False
        model = CostModel(device_row(program.device), program.policy.low, program.training)
        low = cheapest_low(program, open_nodes, model)
        for node in open_nodes:
            program.paint(node.name, Colour.LOW if node.name in low else Colour.HIGH, Reason.NOT_REACHED)
        for node in open_nodes:
            _give_reason(program, node)
        return True


class _Network:
    """Arcs of the flow network, collected in lists."""

    def __init__(self) -> None:
        self.size = 2
        self.tails: list[int] = []
        self.heads: list[int] = []
        self.weights: list[float] = []

    def vertex(self) -> int:
        self.size += 1
        return self.size - 1

    def arc(self, tail: int, head: int, weight: float) -> None:
        if tail != head and weight > 0:
            self.tails.append(tail)
            self.heads.append(head)
            self.weights.append(weight)

    def source_side(self) -> np.ndarray:
        """Vertices reachable from the source once the maximum flow runs."""
        weights = np.asarray(self.weights)
        finite = weights[np.isfinite(weights)]
        scale = TOTAL / max(finite.sum(), 1e-30)
        capacity = np.where(np.isfinite(weights), np.floor(np.where(np.isfinite(weights), weights, 0) * scale), TOTAL + 1)
        shape = (self.size, self.size)
        arcs = csr_array((capacity.astype(np.int64), (self.tails, self.heads)), shape=shape)
        arcs.data = np.minimum(arcs.data, TOTAL + 1)
        arcs = arcs.astype(np.int32)
        flow = maximum_flow(arcs, SOURCE, SINK).flow
        residual = csr_array(arcs.astype(np.int64) - flow.astype(np.int64))
        residual.data = np.maximum(residual.data, 0)
        residual.eliminate_zeros()
        return breadth_first_order(residual, SOURCE, return_predecessors=False)


def cheapest_low(program: Program, open_nodes: list[OpNode], model: CostModel) -> set[str]:
    """Names of the open nodes that run low in the cheapest plan."""
    network = _Network()
    vertices: dict[str, int] = {}
    by_tie: dict[str, int] = {}
    for node in open_nodes:
        if node.tie and node.tie in by_tie:
            vertices[node.name] = by_tie[node.tie]
            continue
        vertices[node.name] = network.vertex()
        if node.tie:
            by_tie[node.tie] = vertices[node.name]

    def side(name: str) -> int:
        """The vertex of a node: its own, or the terminal of the colour it has already."""
        if name in vertices:
            return vertices[name]
        return SOURCE if program.paints[name].colour is Colour.LOW else SINK

    for node in open_nodes:
        low, high = model.op(node, model.low), model.op(node, FP32)
        network.arc(side(node.name), SINK, max(low - high, 0))
        network.arc(SOURCE, side(node.name), max(high - low, 0))
    for node in program.graph:
        if node.carries_fp32:
            _price_copies(program, node, model, network, side)
    reached = set(network.source_side().tolist())
    return {name for name, vertex in vertices.items() if vertex in reached}


def _price_copies(program: Program, node: OpNode, model: CostModel, network: _Network, side) -> None:  # type: ignore[no-untyped-def]
    """Arcs for the low and the high copy of one value."""
    maker, cost = side(node.name), model.cast(node)
    low_readers: set[int] = set()
    high_readers: set[int] = set()
    for reader in program.graph.readers(node.name):
        for operand in reader.operands:
            if operand.value != node.name or operand.demand is Demand.ANY:
                continue
            end = side(reader.name) if operand.demand is not Demand.HIGH else SINK
            if operand.demand is Demand.PROMOTE:
                network.arc(maker, end, cost * FREE_PROMOTION)
                if not operand.scalar:
                    low_readers.add(end)
            else:
                low_readers.add(end)
                high_readers.add(end)
    _one_copy(network, {r for r in low_readers if r not in (maker, SINK)}, maker, cost, low=True)
    _one_copy(network, {r for r in high_readers if r not in (maker, SOURCE)}, maker, cost, low=False)


def _one_copy(network: _Network, readers: set[int], maker: int, cost: float, low: bool) -> None:
    if not readers:
        return
    if len(readers) == 1:
        (copy,) = readers
    else:
        copy = network.vertex()
        for reader in readers:
            network.arc(*((reader, copy) if low else (copy, reader)), float("inf"))
    network.arc(*((copy, maker) if low else (maker, copy)), cost)


def _give_reason(program: Program, node: OpNode) -> None:
    """Name the neighbour that the colour agrees with."""
    colour = program.paints[node.name].colour
    near = [*(operand.value for operand in node.operands), *(reader.name for reader in program.graph.readers(node.name))]
    ally = next((name for name in near if program.paints[name].colour is colour), "")
    if colour is Colour.LOW:
        reason = Reason.ON_INTERNALLIST if node.kind is OpKind.INTERNAL and ally else Reason.CHEAPER_LOW
    else:
        reason = Reason.CHEAPER_HIGH if any(program.paints[name].colour is Colour.LOW for name in near) else Reason.NOT_REACHED
    program.paint(node.name, colour, reason, because_of=ally)
