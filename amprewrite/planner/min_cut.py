"""Compute minimum s–t cuts of networks with integer capacities of up to 64 bits.

The solver is Dinic's algorithm in scipy, which takes only int32 capacities. Larger capacities are handled exactly by capacity scaling
(Edmonds and Karp 1972, Gabow 1985):

1. No arc can carry more than the flow that is still missing. So capacities are clipped to an upper bound of the missing flow.
2. Divide the capacities by 2^s, so that they fit, and find a maximum flow. This flow times 2^s is a flow of the true network. The missing
   flow has to cross the cut that the scaled network gave. The capacity left on the arcs of this cut is a far smaller upper bound.
3. Repeat on the residual network until s is 0. Then the sum of the flows is a maximum flow, and the residual network gives the cut.

`heaviest_closure` uses a minimum cut to choose items with the largest total gain, if an item may have a cost or require other items.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from amprewrite.tables.errors import AmpRewriteError

SOURCE, SINK = 0, 1
INFINITE = -1
"""Capacity of an arc that must not be cut."""
_BITS = 29
"""Scaled capacities stay below 2 to this power, so that the sum over an arc and its reverse fits int32. A stage rounds each capacity down
by less than 2^s. So in a network of fewer than 2^28 arcs, the flow that is missing after a stage is below the bound of that stage."""


class Contradiction(AmpRewriteError):
    """Raised if every cut contains an infinite arc. `chain` holds the vertices of a path of infinite arcs from source to sink."""

    def __init__(self, chain: list[int], names: Sequence[str] = ()) -> None:
        """Make the error's message from `names`: the ops along the path `chain`. Without `names` it lists the numbers of vertices."""
        joined = ", ".join(names) or f"vertices {chain}"
        super().__init__(f"{joined} must share one precision, and what stands at the ends asks for both; remove an override of one of them")
        self.chain = chain


class Network:
    """A flow network under construction. Vertex 0 is the source, 1 the sink."""

    def __init__(self) -> None:
        self.size = 2
        self.tails: list[int] = []
        self.heads: list[int] = []
        self.capacities: list[int] = []

    def vertex(self) -> int:
        """Add a vertex and return its number."""
        self.size += 1
        return self.size - 1

    def arc(self, tail: int, head: int, capacity: int) -> None:
        """Add an arc. A cut with `tail` on the source's side and `head` on the sink's side pays `capacity`; INFINITE forbids such a cut.

        Loops and arcs with a capacity of 0 are ignored.
        """
        if tail != head and capacity:
            self.tails.append(tail)
            self.heads.append(head)
            self.capacities.append(capacity)

    def once(self, maker: int, readers: Iterable[int], cost: int, outwards: bool, named: bool = False) -> int:
        """Add the cost of one copy of a value, such as a cast. A cut pays `cost` once, however many of the `readers` need the copy.

        `maker` is the vertex of the op that makes the value, and `readers` are the vertices of the ops that read it. With `outwards`, a
        reader on the source's side needs the copy if the maker is on the sink's side. Without `outwards`, the two sides are exchanged.

        Return the vertex that stands for the copy. It is on the same side as the readers that need the copy. Usually it is a new vertex, or
        the reader if there is only one. With `named`, it is a new vertex even then. But it is the source (with `outwards`) or the sink
        (without) if that is itself a reader, or, without `named`, if nothing has to be paid.
        """
        always, ends = SOURCE if outwards else SINK, set(readers) - {maker}
        if not named and not (ends and cost):
            return always
        copy = always if always in ends else next(iter(ends)) if len(ends) == 1 and not named else self.vertex()
        for reader in ends if copy not in ends else ():
            self.arc(*((reader, copy) if outwards else (copy, reader)), INFINITE)
        self.arc(*((copy, maker) if outwards else (maker, copy)), cost)
        return copy


def min_cut(network: Network, extra: Iterable[tuple[int, int, int]] = ()) -> tuple[npt.NDArray[np.bool_], int]:
    """Return a minimum cut as (boolean mask of the vertices on the source's side, cost of the cut).

    Of all minimum cuts it has the fewest vertices on the source's side. `extra` holds further arcs (tail, head, capacity), which are not
    added to `network`. Raises Contradiction if every cut contains an infinite arc.
    """
    tails, heads, capacities = (np.fromiter(column, np.int64) for column in (network.tails, network.heads, network.capacities))
    more = np.array(list(extra), np.int64).reshape(-1, 3)
    tails, heads, capacities = (np.concatenate((a, b)) for a, b in zip((tails, heads, capacities), more.T, strict=True))
    tails, heads = tails.astype(np.int32), heads.astype(np.int32)  # csgraph takes only int32 indices, and older scipy does not convert them
    endless = capacities == INFINITE
    _refuse_contradiction(network.size, tails[endless], heads[endless])
    bound = int(capacities[~endless].sum())
    capacities[endless] = bound + 1
    shape = (network.size, network.size)
    residual = csr_array((capacities, (tails, heads)), shape=shape)
    residual.sum_duplicates()
    value = 0
    while True:
        shift = max(bound.bit_length() - _BITS, 0)
        scaled = residual.copy()
        scaled.data = np.minimum(scaled.data, bound) >> shift
        scaled.eliminate_zeros()
        flow = maximum_flow(scaled.astype(np.int32), SOURCE, SINK)
        value += int(flow.flow_value) << shift
        moved = csr_array(flow.flow).astype(np.int64)
        moved.data <<= shift
        residual = csr_array(residual - moved)
        residual.eliminate_zeros()
        if not shift:
            return _reached(residual), value
        left = scaled.astype(np.int64) - csr_array(flow.flow).astype(np.int64)
        left.eliminate_zeros()
        bound = _leaving(residual, _reached(csr_array(left)))


def _reached(residual: csr_array) -> npt.NDArray[np.bool_]:
    found = np.zeros(residual.shape[0], np.bool_)
    found[breadth_first_order(residual, SOURCE, return_predecessors=False)] = True
    return found


def _leaving(residual: csr_array, side: npt.NDArray[np.bool_]) -> int:
    """Return the sum of the residual capacities of all arcs out of `side`, a mask of vertices. The flow can grow by at most this sum."""
    arcs = residual.tocoo()
    return int(arcs.data[side[arcs.row] & ~side[arcs.col]].sum())


def _refuse_contradiction(size: int, tails: npt.NDArray[np.int32], heads: npt.NDArray[np.int32]) -> None:
    """Raise Contradiction with the shortest path from source to sink over the infinite arcs (`tails` to `heads`), if there is one."""
    if SOURCE not in tails or SINK not in heads:
        return
    arcs = csr_array((np.ones(len(tails), np.int8), (tails, heads)), shape=(size, size))
    _, before = breadth_first_order(arcs, SOURCE)
    if before[SINK] < 0:
        return
    chain: deque[int] = deque([SINK])
    while chain[0] != SOURCE:
        chain.appendleft(int(before[chain[0]]))
    raise Contradiction(list(chain))


Item = TypeVar("Item", bound=Hashable)


def heaviest_closure(weights: Mapping[Item, int], needs: Iterable[tuple[Item, Item]]) -> frozenset[Item]:
    """Return the closed set of items with the largest sum of weights. A set is closed if it holds all items that its items need.

    `weights` gives the weight of every item: a gain above 0, or a cost below 0. `needs` holds pairs (item, item that it needs). If no set
    has a sum above 0, the result is empty. Of several best sets the smallest is returned.

    A minimum cut of this network gives the set (Picard, "Maximal closure of a graph and applications to combinatorial problems", 1976).
    An item with a gain is called a project, an item with a cost a need. If several projects share a need, its cost is paid once:

        source → project   its gain, lost if the project is not in the set
        project → need     must not be cut
        need → sink        its cost, paid if the need is in the set
    """
    network = Network()
    vertices = {item: network.vertex() for item in weights}
    for item, weight in weights.items():
        if weight > 0:
            network.arc(SOURCE, vertices[item], weight)
        elif weight < 0:
            network.arc(vertices[item], SINK, -weight)
    for item, need in needs:
        network.arc(vertices[item], vertices[need], INFINITE)
    if not any(weight > 0 for weight in weights.values()):
        return frozenset()
    taken, _ = min_cut(network)
    return frozenset(item for item, vertex in vertices.items() if taken[vertex])
