"""Choose which open ops run low so that a graph costs least, by minimum s-t cuts. Open ops are ops whose colour no rule has fixed.

Each open op has a vertex. Vertices on the source's side run low. An arc is a price that is paid if its tail is low and its head is high
(Kolmogorov and Zabih, "What energy functions can be minimized via graph cuts?", 2004). All prices but one have this form:

1. An op pays the extra price of low on an arc to the sink, of fp32 on one from the source. Ops of one precision group share a vertex.
2. A value that is read in the other format pays for one copy, however many readers need it. An extra vertex stands for "a low copy
   exists" or, for an fp32 copy, "every reader is low". Infinite arcs join it to the readers. An arc with the copy's price joins it to the
   op that makes the value. Casts of gradients (`gradient_cast`) and conversions in kernels (`mixed_read`) are priced in the same way.
3. The exception: an op that promotes mixed dtypes and runs in fp32 pays for a copy of one operand, its anchor, only if all its operands are
   low. This price depends on three or more colours at once, which no arc can express. But arcs can express two lower bounds of it. The
   first is 0. It is exact unless the copy has to be paid. The second, if the op is high, is the price of the copy (0 if the anchor is
   high), minus the price of a cast for each other operand that is high. It is exact unless it is below 0.
4. Solve with the first bound. If the solution has to pay a copy, solve with the second bound. If this bound is not exact either, branch on
   the colour of an operand, and prune branches by the bounds. A solution is optimal if its bound is exact for it.

Of several cheapest solutions the cut nearest to the source is taken: the solution with the fewest low ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from amprewrite.ir.cost import CostModel, elements_read, mixes, sends_gradients
from amprewrite.ir.op_graph import OpGraph, OpNode, anchor, wanted
from amprewrite.planner.min_cut import INFINITE, SINK, SOURCE, Contradiction, Network, min_cut
from amprewrite.tables.formats import FP32
from amprewrite.tables.vocabulary import Colour

Side = npt.NDArray[np.bool_]
Key = tuple[str, int]
"""(name of a value, its write version: the number of in-place writes and changes of the grad mode before it is read)."""


@dataclass(slots=True)
class _Copies:
    """The ops that read one value. Each list holds the readers that may cause one kind of conversion of the value or of its gradient.

    An op is listed as its vertex in the flow network. Ops may share a vertex, so a list may hold a vertex twice.
    """

    low: list[int] = field(default_factory=list)
    """Readers that need a low copy of the value when they run low."""
    high: list[int] = field(default_factory=list)
    """Readers that need an fp32 copy of the value when they run in fp32."""
    senders: list[int] = field(default_factory=list)
    """Readers that, when they run in fp32, return an fp32 gradient, which is cast if the value is low."""
    mixers: list[int] = field(default_factory=list)
    """Readers whose kernels, when they run in fp32, convert a low value themselves."""


@dataclass(frozen=True)
class _Mixer:
    """An op that promotes mixed dtypes, and may run in fp32 while all its operands are low (rule 3 of this file).

    The op computes in the widest dtype of its operands. If all are low, casting one of them to fp32 is enough to make the op compute in
    fp32. This operand is the anchor, and the op pays for the cast.
    """

    op: int
    """The op's vertex in the flow network."""
    anchor: Key
    """The operand of which an fp32 copy is made."""
    others: tuple[int, ...]
    """Vertices of the ops that make the other operands. Ops that always run low are left out."""


@dataclass(frozen=True)
class Assignment:
    """Result of `cheapest`: which of the ops without a fixed colour run low."""

    low: frozenset[str]
    """Names of the open ops (ops whose format no rule has fixed) that run low. All other open ops run in fp32."""
    gap: int
    """Upper bound, in ticks of 0.1 ns, on the saving of a better assignment; 0 if this assignment is optimal."""


def cheapest(graph: OpGraph, colours: dict[str, Colour], open_nodes: list[OpNode], model: CostModel) -> Assignment:
    """Return the cheapest colours (low or high) of `open_nodes`. `colours` holds the fixed colours of all other nodes.

    The search solves at most 500 minimum-cut problems, and fewer if the graph is large. If it stops early, the best assignment found is
    returned, and its `gap` is an upper bound on what a better assignment would save. Raises Contradiction if nodes that must share a colour
    are forced to both colours.
    """
    search = _Search(graph, colours, open_nodes, model)
    try:
        side, gap = search.run(max(4, min(500, 1_000_000 // search.network.size)))
    except Contradiction as error:
        raise Contradiction(error.chain, [name for name, vertex in search.vertices.items() if vertex in error.chain]) from error
    return Assignment(frozenset(name for name, vertex in search.vertices.items() if side[vertex]), gap)


class ColourNetwork:
    """A flow network with a vertex for each op whose colour (low or high) is searched. Ops that must have equal colours share a vertex."""

    def __init__(self, colours: Mapping[str, Colour], open_nodes: Iterable[OpNode]) -> None:
        """Add the vertices for `open_nodes`. `colours` holds the fixed colours of all other nodes, by name."""
        self.colours, self.network = colours, Network()
        self.vertices: dict[str, int] = {}
        groups: dict[str, int] = {}
        for node in open_nodes:
            known = groups.get(node.precision_group) if node.precision_group else None
            self.vertices[node.name] = self.network.vertex() if known is None else known
            groups[node.precision_group] = self.vertices[node.name]

    def end(self, name: str) -> int:
        """Return the vertex of the node `name`. If its colour is fixed, this is the source (low) or the sink (high)."""
        vertex = self.vertices.get(name)
        if vertex is not None:
            return vertex
        return SOURCE if self.colours[name] is Colour.LOW else SINK


class PricedNetwork(ColourNetwork):
    """A flow network in which the cost of a cut is the price of running the ops on the source's side low and all other ops in fp32.

    The cost may be too small: if an op that promotes mixed dtypes runs in fp32, and all its operands are low, one operand must be cast. The
    network leaves out this cast (rule 3 of this file).
    """

    def __init__(self, graph: OpGraph, colours: Mapping[str, Colour], open_nodes: Iterable[OpNode], model: CostModel) -> None:
        open_nodes = list(open_nodes)
        super().__init__(colours, open_nodes)
        self.graph, self.model = graph, model
        self._price_ops(open_nodes)
        self.copies: dict[Key, _Copies] = {}
        self.mixers: list[_Mixer] = []
        for node in graph:
            self._read(node)
        self.high_copies: dict[Key, int] = {}
        anchors = {mixer.anchor for mixer in self.mixers}
        for key, copies in self.copies.items():
            self._price_copies(key, copies, key in anchors)

    def _price_ops(self, open_nodes: list[OpNode]) -> None:
        for node in open_nodes:
            read = elements_read(self.graph, node)
            more = self.model.op(node, self.model.low, read) - self.model.op(node, FP32, read)
            self.network.arc(self.vertices[node.name], SINK, max(more, 0))
            self.network.arc(SOURCE, self.vertices[node.name], max(-more, 0))

    def _read(self, node: OpNode) -> None:
        """Record which casts `node` needs for its operands and their gradients if it runs low, and which if it runs in fp32."""
        own, mixing = self.end(node.name), node.promoted
        mixer = self._mixer(node, own) if mixing else None
        for operand, want in wanted(node, Colour.LOW):
            end = SINK if want is Colour.HIGH else own
            key = (operand.value, operand.write_version)
            copies = self.copies.get(key)
            if copies is None:
                copies = self.copies[key] = _Copies()
            if end != SINK:
                copies.low.append(end)
            if end == SOURCE:
                continue
            if sends_gradients(node):
                copies.senders.append(end)
            if mixes(node, operand, Colour.HIGH):
                copies.mixers.append(end)
            if operand not in mixing or (mixer is not None and not mixer.others and mixer.anchor == key):
                copies.high.append(end)
        if mixer is not None and mixer.others:
            self.mixers.append(mixer)

    def _mixer(self, node: OpNode, own: int) -> _Mixer | None:
        """Return a `_Mixer` for the op `node`, which promotes mixed dtypes, if it may run in fp32 while all its operands are low.

        Return None if this cannot happen: the op always runs low, or one operand is always high, or one operand shares the op's vertex and
        so its colour. `own` is the vertex of the op.
        """
        ends = [self.end(operand.value) for operand in node.promoted]
        if own == SOURCE or SINK in ends or own in ends:
            return None
        cast = anchor(node, self.graph.nodes)
        assert cast is not None
        others = tuple(dict.fromkeys(end for end in ends if end not in (SOURCE, self.end(cast.value))))
        return _Mixer(own, (cast.value, cast.write_version), others)

    def _price_copies(self, key: Key, copies: _Copies, is_anchor: bool) -> None:
        maker = self.end(key[0])
        low = {reader for reader in copies.low if reader != maker} if maker != SOURCE else set()
        high = {reader for reader in copies.high if reader != maker} if maker != SINK else set()
        node = self.graph[key[0]]
        forward, sent, mixed = self.model.cast(node), self.model.gradient_cast(node), self.model.mixed_read(node)
        beyond: dict[frozenset[int], int] = {}
        for readers, cost in ((copies.senders, sent), (copies.mixers, mixed)):
            others = frozenset(reader for reader in readers if reader != maker) if maker != SINK and cost else frozenset()
            beyond[others] = beyond.get(others, 0) + cost
        if not (low or high or any(beyond) or is_anchor):
            return
        self.network.once(maker, low, forward + sent, outwards=True)
        forward += 0 if is_anchor else beyond.pop(frozenset(high), 0)
        self.high_copies[key] = self.network.once(maker, high, forward, outwards=False, named=is_anchor)
        for others, cost in beyond.items():
            self.network.once(maker, others, cost, outwards=False)


class _Search(PricedNetwork):
    """A branch-and-bound search for the cheapest colours. It branches on operands of ops that promote dtypes (rule 4 of this file)."""

    # -- bounds ------------------------------------------------------------------------
    def _forward(self, mixer: _Mixer) -> int:
        return self.model.cast(self.graph[mixer.anchor[0]])

    def _second_bound(self, mixer: _Mixer, fixed: dict[int, bool]) -> tuple[list[tuple[int, int, int]], int]:
        """Return the change of the network that replaces the first bound of rule 3 by the second bound for one op, `mixer`.

        Return (arcs (tail, head, capacity) to add to the network, number to add to the cost of a cut). With the second bound, an op that
        is high while all its operands are low pays for the cast of one operand, its anchor. `fixed` holds the vertices whose colour the
        search has fixed: True for low. If an operand other than the anchor is fixed to high, the result is ([], 0): no cast is needed.
        """
        if any(fixed.get(other) is False for other in mixer.others):
            return [], 0
        arcs, cost = [], self._forward(mixer)
        copy = self.high_copies[mixer.anchor]
        if copy != SINK:
            arcs.append((copy, mixer.op, INFINITE))
        free = [other for other in mixer.others if other not in fixed]
        for other in free if cost else ():
            arcs.append((other, mixer.op, cost))
            if mixer.op != SINK:
                arcs.append((mixer.op, SINK, cost))
        return arcs, -cost * len(free)

    def _wrong(self, mixer: _Mixer, side: Side) -> bool:
        """True if the network leaves out a cost of the assignment `side` (rule 3): the op of `mixer` is high, and all its operands are low.

        The op then pays for an fp32 copy of one operand, its anchor. `side` is a mask of vertices: True for low.
        """
        return bool(not side[mixer.op] and side[self.end(mixer.anchor[0])] and all(side[other] for other in mixer.others))

    def _true_cost(self, side: Side) -> int:
        """Return the exact price of the assignment `side`, a mask of vertices: True for low.

        Costs that all assignments have are left out. The lower bounds leave them out, too, so that a bound and a price can be compared.
        """
        side = side.copy()
        for key in {mixer.anchor for mixer in self.mixers}:
            copy = self.high_copies[key]
            if copy != SINK:
                maker = self.end(key[0])
                side[copy] = side[maker] and all(side[reader] for reader in self.copies[key].high)
        tails, heads, capacities = self._columns
        cut = side[tails] & ~side[heads]
        cost = int(capacities[cut].sum())
        unpaid = {mixer.anchor: self._forward(mixer) for mixer in self.mixers if self._wrong(mixer, side)}
        return cost + sum(cost for key, cost in unpaid.items() if self.high_copies[key] != SINK and side[self.high_copies[key]])

    # -- search --------------------------------------------------------------------------
    def run(self, cuts: int) -> tuple[Side, int]:
        """Search for the cheapest assignment, with at most about `cuts` minimum cuts.

        Return (best assignment found, upper bound on the saving of a better one, in ticks of 0.1 ns).
        """
        self._columns = tuple(np.array(c, np.int64) for c in (self.network.tails, self.network.heads, self.network.capacities))
        members = np.zeros(self.network.size, np.int64)
        np.add.at(members, list(self.vertices.values()), 1)
        best: tuple[int, int] | None = None
        found: Side | None = None
        floor: int | None = None
        waiting: list[tuple[dict[int, bool], frozenset[int]]] = [({}, frozenset())]
        while waiting and (cuts > 0 or found is None):
            fixed, second = waiting.pop()
            while True:
                side, bound = self._cut(fixed, second)
                cuts -= 1
                floor = bound if floor is None else floor
                rank = (bound, int(members[side].sum()))
                if best is not None and rank >= best:
                    break
                wrong = {index for index, mixer in enumerate(self.mixers) if self._wrong(mixer, side)} - second
                if wrong and cuts > 0:
                    second |= wrong
                    continue
                true = self._true_cost(side)
                if best is None or (true, rank[1]) < best:
                    best, found = (true, rank[1]), side
                if true > bound:  # cuts may have run out while ops are still `wrong`: then keep this subproblem, which bounds the gap
                    waiting += [(fixed, second | wrong)] if wrong else self._branches(side, fixed, second)
                break
        assert found is not None and best is not None and floor is not None
        return found, max(best[0] - floor, 0) if waiting else 0

    def _cut(self, fixed: dict[int, bool], second: Iterable[int]) -> tuple[Side, int]:
        extra = [(SOURCE, vertex, INFINITE) if low else (vertex, SINK, INFINITE) for vertex, low in fixed.items()]
        constant = 0
        for index in sorted(second):
            arcs, less = self._second_bound(self.mixers[index], fixed)
            extra += arcs
            constant += less
        side, value = min_cut(self.network, extra)
        return side, value + constant

    def _branches(self, side: Side, fixed: dict[int, bool], second: frozenset[int]) -> Iterator[tuple[dict[int, bool], frozenset[int]]]:
        """Yield two subproblems of the search: one fixes an operand to low, the other fixes it to high.

        Yield nothing if the second bounds of rule 3 equal the true prices in the assignment `side`. A subproblem is ({vertex: True if fixed
        to low}, indices in `self.mixers` of the ops that get the second bound).
        """
        for index in sorted(second):
            mixer = self.mixers[index]
            free = [o for o in mixer.others if o not in fixed]
            settled = any(fixed.get(o) is False for o in mixer.others)
            if not settled and not side[mixer.op] and any(not side[o] for o in free):
                operand = next(o for o in free if not side[o])
                yield {**fixed, operand: True}, second
                yield {**fixed, operand: False}, second
                return


__all__ = ["Assignment", "ColourNetwork", "Contradiction", "PricedNetwork", "cheapest"]
