"""Choose items with gains and costs, where an item may require other items: a maximum-weight closure, found by one minimum cut.

An item with a gain is called a project, an item with a cost a need. A project requires its needs, directly or through other needs. A need
that several projects share is paid once (Picard, "Maximal closure of a graph and applications to combinatorial problems", 1976):

    source → project   its gain, lost if it is not taken
    project → need     must not be cut
    need → sink        its cost, paid if it is taken

Of several best sets the smallest is chosen.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from amprewrite.planner.min_cut import INFINITE, SINK, SOURCE, Network, min_cut

Item = TypeVar("Item", bound=Hashable)


def heaviest_closure(weights: Mapping[Item, int], needs: Iterable[tuple[Item, Item]]) -> frozenset[Item]:
    """Return the closed set of items with the largest sum of weights. A closed set contains all items that its items need.

    `weights` gives the weight of every item: a gain above 0, or a cost below 0. `needs` are pairs (item, item that it needs). The set is
    empty if no set has a sum above 0.
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
