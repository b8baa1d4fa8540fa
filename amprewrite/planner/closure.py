"""Choose projects that share needs: a maximum-weight closure, found by one minimum cut.

A project has a gain and requires its needs, directly or through other needs. A need that several projects share is paid once (Picard,
"Maximal closure of a graph and applications to combinatorial problems", 1976):

    source → project   its gain, lost if it is not taken
    project → need     must not be cut
    need → sink        its cost, paid if it is taken

Of all best sets the smallest is taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from amprewrite.planner.min_cut import INFINITE, SINK, SOURCE, Network, min_cut

Item = TypeVar("Item", bound=Hashable)


def heaviest_closure(weights: Mapping[Item, int], needs: Iterable[tuple[Item, Item]]) -> frozenset[Item]:
    """The set of items with the largest sum of weights that contains all needs of its items.

    `weights` are gains, and negative for costs. `needs` are pairs (item, item that it needs).
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


__all__ = ["heaviest_closure"]
