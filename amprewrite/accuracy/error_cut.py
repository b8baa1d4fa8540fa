"""Find plans with ever more ops in fp32, from the planner's own plan to all fp32. Minimum cuts weigh the time of a plan against its error.

Let each cut of a flow network be a plan: ops on the source side are low. Then a plan's time and its squared error are both costs of cuts
(Kolmogorov and Zabih 2004). So for every price λ a minimum cut finds the plan with the least time + λ·error². The squared errors of single
roundings, estimated by `sensitivity`, are added up.

1. Arcs give the times of ops and casts, as in `amprewrite.planner.assignment`.
2. An edge (value, reader) with squared error w is rounded if the value is low (v = 1) or the reader is low (r = 1). So its cost is
   w·max(v, r) = w·v + w·r·(1 − v): one arc from the value to the sink, and one arc from the reader to the value. An op of kind CLEAR, such
   as a reshape, does not round what it reads. So an edge to a low CLEAR op costs nothing: the rounding counts at the edges from its result.
3. A plan with more low ops never has a smaller error. So as λ grows, nodes become fp32 and stay so: let A, B be the least optimal sets of
   low ops at λ < μ. By submodularity A ∩ B is optimal at μ, hence B ⊆ A. (Gallo, Grigoriadis and Tarjan 1989 show this for linear errors;
   the argument holds for monotone submodular errors.)
4. In a first series of cuts, ops that Tensor Cores speed up (matmuls, convolutions) stay low while λ grows. A second series makes these
   ops fp32 as well: its cuts minimise (FLOPs of fp32 matmuls) + λ·error², which does not depend on the device. If two matmuls reduce the
   error only together, both become fp32 at the same λ.
5. Equal layers change colour at the same λ, so two consecutive cuts may differ by many nodes. Plans between the two are added to the
   chain: of the nodes in which the cuts differ, they keep only the first ones high (fp32), in graph order. No λ gives these plans,
   since they are off the convex hull.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set

from amprewrite.accuracy.strict.edges import Edges
from amprewrite.accuracy.strict.metric import Metric
from amprewrite.graphs.fx.captured import Captured
from amprewrite.ir.evidence.ranges import KeepHigh, fingerprint
from amprewrite.ir.op_graph import Demand, Operand, OpNode
from amprewrite.ir.pass_base import Decisions, Problem, run_passes
from amprewrite.passes.paint.paint_after_deny import PaintAfterDeny
from amprewrite.passes.paint.paint_lists import PaintLists
from amprewrite.passes.paint.paint_ties import PaintTies
from amprewrite.passes.repaint.repaint_by_range import RepaintByRange
from amprewrite.planner.assignment import ColourNetwork, PricedNetwork
from amprewrite.planner.min_cut import INFINITE, SINK, SOURCE, min_cut
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

STEP = 2**0.5
"""Factor between consecutive values of λ, the price of a unit of squared error."""
SLICES, LEAST_SLICE = 16, 4
"""If many nodes become fp32, at most SLICES plans add them in steps: at least LEAST_SLICE nodes (matmuls: 1) in each but the last."""
HALVINGS = 3
"""Number of times that an interval of λ, the price of error, is halved if the plans for its ends differ by several matmuls."""
Kept = frozenset[tuple[str, str]]
"""Nodes to keep in fp32, each as (fingerprint of its graph, name)."""


def movable(node: OpNode) -> bool:
    """True if `node` is an op with fp32 values. A plan may choose the format of such nodes only."""
    return node.role == "op" and node.carries_fp32


class GraphErrors:
    """Finds the cheapest plan of one graph for a given price of errors. `kept` returns the ops that this plan keeps in fp32.

    `edges` has, for each pair (value, reader), the squared output error that rounding the value for this reader causes.
    """

    def __init__(self, problem: Problem, edges: Edges, metric: Metric) -> None:
        self.graph, self.edges, self.metric = problem.graph, edges, metric
        self.fingerprint = fingerprint(problem.graph)
        self.model = problem.costs
        decisions = Decisions()
        run_passes((PaintLists(), PaintAfterDeny(), PaintTies(), RepaintByRange()), problem, decisions)
        paints = decisions.paints
        fixed = {name: paint.colour for name, paint in paints.items() if paint.reason is not Reason.ON_ALLOWLIST}
        tied = {node.precision_group for node in self.graph if node.precision_group and node.name in fixed}
        self.open = {node.name for node in self.graph if movable(node) and node.name not in fixed and node.precision_group not in tied}
        self.low = {name for name, paint in paints.items() if name not in self.open and paint.colour is Colour.LOW}
        self.heavy = {node.name for node in self.graph if node.name in self.open and node.kind is OpKind.ALLOW}
        self.flops = {name: self.graph[name].flops + 1 for name in self.heavy}
        self.typical = sum(self.model.cast(node) + self.model.gradient_cast(node) for node in self.graph if movable(node))
        self.networks = {heavies: self._network(heavies) for heavies in (False, True)}

    def _network(self, heavies: bool) -> ColourNetwork:
        """Return a flow network in which each cut is a plan, and the capacity of the cut is the cost of the plan.

        If `heavies` is False, the cost is the modelled time of the plan. If it is True, the cost is the number of FLOPs of the matmuls and
        convolutions that could run low but run in fp32.
        """
        low = self.low if heavies else self.low | self.heavy
        colours = {node.name: Colour.LOW if node.name in low else Colour.HIGH for node in self.graph}
        free = [node for node in self.graph if node.name in self.open and (node.name in self.heavy) is heavies]
        if not heavies:
            return PricedNetwork(self.graph, colours, free, self.model)
        found = ColourNetwork(colours, free)
        for name, flops in self.flops.items():
            found.network.arc(SOURCE, found.end(name), flops)
        return found

    def kept(self, price: float, heavies: bool) -> set[str]:
        """Return the ops that stay fp32 in the plan with the least cost, if a unit of squared error costs `price`.

        Only open ops are returned: ops whose format no rule fixes. If `heavies` is True, the plan decides only ops on the allowlist: other
        open ops run in fp32. If `heavies` is False, open ops on the allowlist run low, and the plan decides the other open ops.
        """
        made = self.networks[heavies]
        low, _ = min_cut(made.network, self._errors(made, price))
        return {name for name in self.open if not low[made.end(name)]}

    def _errors(self, made: ColourNetwork, price: float) -> Iterator[tuple[int, int, int]]:
        """Yield arcs (tail, head, capacity) that add the errors of roundings to the cost of a cut, at `price` per unit of squared error."""
        # No arc needs a larger capacity than `most`, which already exceeds the sum of all finite capacities of the network.
        most = 1 + sum(capacity for capacity in made.network.capacities if capacity != INFINITE)
        for (value, name), squared in self.edges.items():
            node, reader = self.graph.nodes.get(value), self.graph.nodes.get(name)
            if node is None or reader is None or not squared:
                continue
            # Limit the error to 1e6: (rounding error * gradient) may overflow to infinity in fp32, but capacities must be finite.
            cost = min(round(price * min(squared, 1e6)), most)
            if reader.role == "op" and reader.kind is OpKind.CLEAR:
                yield made.end(value), made.end(name), cost
                continue
            yield made.end(value), SINK, cost
            if any(operand.value == value and _rounds(operand) for operand in reader.operands):
                yield made.end(name), made.end(value), cost

    def why(self, name: str) -> str:
        """Return the reason why node `name` stays fp32, in words: the largest output error from rounding its result or an operand.

        The reason is "its neighbours are kept" if no such error was measured.
        """
        touching = {edge: squared for edge, squared in self.edges.items() if name in edge}
        if not touching:
            return "its neighbours are kept"
        (value, reader), squared = max(touching.items(), key=lambda item: item[1])
        return f"rounding {value} for {reader} adds {self.metric.of_squares(squared):.2g} to the output's error ({self.metric.estimated})"


def _rounds(operand: Operand) -> bool:
    """True if the op that reads this operand rounds it when the op runs low. False, for instance, if it always reads it in fp32."""
    return operand.demand is Demand.COLOUR or (operand.demand is Demand.PROMOTE and not operand.scalar)


class Chain:
    """A series of plans of one model, each with more fp32 nodes than the plan before. A node that becomes fp32 stays fp32 from then on.

    The first is the planner's own plan. The last keeps in fp32 every node that the planner runs low.
    """

    def __init__(self, edges: Sequence[tuple[Captured, Edges]], own: Callable[[Captured], set[str]], metric: Metric) -> None:
        """Compute the plans of the chain, by minimum cuts that weigh output errors against the cost of fp32.

        `edges` has, for each graph, the squared output error of each (value, reader) pair. `own` returns the names of the nodes of a
        graph that the planner runs low. `metric` converts squared errors to the unit of the messages that say why a node stays fp32.
        """
        self.lows = {fingerprint(captured.problem.graph): own(captured) for captured, _ in edges}
        self.graphs = [GraphErrors(captured.problem, found, metric) for captured, found in edges]
        ranks = ((g, name, rank) for g in self.graphs for name, rank in g.graph.rank.items())
        self._rank = {(g.fingerprint, name): (self.graphs.index(g), rank) for g, name, rank in ranks}
        self._sets: list[tuple[Kept, bool]] = [(frozenset(), False)]
        flops = {(g.fingerprint, name): count for g in self.graphs for name, count in g.flops.items()}
        for price in self._prices(sum(g.typical for g in self.graphs)):
            self._add(self._kept(price, heavies=False), heavies=False)
        for kept in self._raised(self._prices(sum(flops.values())), flops.keys()):
            self._add(kept, heavies=True)
        self._add(frozenset((g.fingerprint, node.name) for g in self.graphs for node in g.graph if movable(node)), heavies=True)
        self.raised = [len(kept & flops.keys()) for kept, _ in self._sets]
        self.flops = [sum(flops.get(each, 0) for each in kept) for kept, _ in self._sets]
        """For each plan of the chain, the FLOPs of its fp32 matmuls and convolutions that the planner alone would run low."""
        self.heavy = len(flops)

    def _kept(self, price: float, heavies: bool) -> Kept:
        return frozenset((g.fingerprint, name) for g in self.graphs for name in g.kept(price, heavies))

    def _raised(self, prices: Sequence[float], heavy: Set[tuple[str, str]]) -> Iterator[Kept]:
        """Yield, for each price of a unit of squared error in `prices` (ascending), the nodes that run in fp32 in the cheapest plan.

        `heavy` holds the matmuls and convolutions, as pairs (graph fingerprint, node name). If several of them become fp32 between two
        prices, also try prices in between, and yield the nodes for each of these prices.
        """

        def between(low: float, high: float, first: Kept, last: Kept, left: int) -> Iterator[Kept]:
            if left and len((last - first) & heavy) > 1:
                middle = math.sqrt(low * high)
                kept = self._kept(middle, heavies=True)
                yield from between(low, middle, first, kept, left - 1)
                yield kept
                yield from between(middle, high, kept, last, left - 1)

        before: tuple[float, Kept] | None = None
        for price in prices:
            kept = self._kept(price, heavies=True)
            if before is not None:
                yield from between(before[0], price, before[1], kept, HALVINGS)
            yield kept
            before = price, kept

    def _prices(self, typical: int) -> list[float]:
        """Return the prices to try for a unit of squared error, ascending. `typical` is a typical cost of a plan (modelled time or FLOPs).

        The first price is so low that errors hardly count: the sum of all squared errors costs about 1e-4 of `typical`. The last is so high
        that even a billionth of this sum costs about 10 times `typical`. Return [] if this sum or `typical` is 0.
        """
        squares = [squared for g in self.graphs for squared in g.edges.values() if squared > 0]
        if not squares or not typical:
            return []
        low, high = math.log(typical / sum(squares) / 1e4, STEP), math.log(typical / (sum(squares) * 1e-9) * 10, STEP)
        return [STEP**k for k in range(math.floor(low), math.ceil(high) + 1)]

    def _add(self, kept: Kept, heavies: bool) -> None:
        """Append a plan to the chain. It keeps in fp32 the last plan's fp32 nodes, and also the nodes of `kept` that the planner runs low.

        If no node is new, append nothing. If many are new, first append plans with only some of them, so that the chain has small steps.
        Each of these smaller plans adds at least LEAST_SLICE nodes, or one if `heavies` is True: nodes are then matmuls, which cost more.
        """
        last = self._sets[-1][0]
        kept = last | frozenset((graph, name) for graph, name in kept if name in self.lows[graph])
        fresh = sorted(kept - last, key=lambda each: self._rank[each])
        size = max(math.ceil(len(fresh) / SLICES), 1 if heavies else LEAST_SLICE)
        for stop in range(size, len(fresh), size):
            self._sets.append((last | frozenset(fresh[:stop]), heavies))
        if fresh:
            self._sets.append((kept, heavies))

    def __len__(self) -> int:
        return len(self._sets)

    def words(self, index: int) -> str:
        """Describe the plan at `index` of the chain: "the planner's own choice" for 0, otherwise the number of nodes it keeps in fp32."""
        kept, raised = len(self._sets[index][0]), self.raised[index]
        if index == 0:
            return "the planner's own choice"
        matmuls = f", {raised} of {self.heavy} matmuls among them" if raised else ""
        return f"{kept} nodes kept high{matmuls}"

    def keep_high(self, index: int) -> KeepHigh:
        """Return, for each graph, {node that the plan at `index` of the chain keeps in fp32: the reason in words}."""
        kept = self._sets[index][0]
        graphs = {g.fingerprint: {name: g.why(name) for graph, name in sorted(kept) if graph == g.fingerprint} for g in self.graphs}
        return KeepHigh(graphs)
