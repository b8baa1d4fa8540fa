"""The cut against networkx, with capacities far beyond the solver's int32."""

from __future__ import annotations

import random

import networkx as nx
import numpy as np
import pytest

from amprewrite.planner import min_cut as cutting
from amprewrite.planner.min_cut import INFINITE, SINK, SOURCE, Contradiction, Network, min_cut


def random_networks(rng: random.Random) -> tuple[Network, nx.DiGraph]:
    network, twin = Network(), nx.DiGraph()
    network.size = rng.randint(3, 14)
    twin.add_nodes_from(range(network.size))
    largest = rng.choice((3, 10**3, 2**31, 10**15))
    for _ in range(rng.randint(1, 40)):
        tail, head = rng.sample(range(network.size), 2)
        capacity = INFINITE if rng.random() < 0.1 else rng.randint(1, largest)
        network.arc(tail, head, capacity)
        known = twin.get_edge_data(tail, head, {"capacity": 0}).get("capacity")
        if known is None or capacity == INFINITE:
            twin.remove_edges_from([(tail, head)])
            twin.add_edge(tail, head)  # without a capacity: networkx takes it for endless
        else:
            twin.add_edge(tail, head, capacity=known + capacity)
    return network, twin


def nearest_side(twin: nx.DiGraph) -> set[int]:
    """What the source still reaches under networkx's maximum flow: the smallest source side of all minimum cuts."""
    residual = nx.algorithms.flow.preflow_push(twin, SOURCE, SINK)
    open_arcs = [(u, v) for u, v, data in residual.edges(data=True) if data["flow"] < data["capacity"]]
    return {SOURCE} | nx.descendants(nx.DiGraph([*open_arcs, (SOURCE, SOURCE)]), SOURCE)


@pytest.mark.parametrize("bits", [7, 12, cutting._BITS], ids="capacities of {} bits a stage".format)
def test_cuts_are_minimum_and_nearest_to_the_source(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "_BITS", bits)
    rng, contradictions = random.Random(bits), 0
    for _ in range(350):
        network, twin = random_networks(rng)
        try:
            side, value = min_cut(network)
        except Contradiction as error:
            steps = list(zip(error.chain, error.chain[1:], strict=False))
            assert (error.chain[0], error.chain[-1]) == (SOURCE, SINK)
            assert all("capacity" not in twin.edges[step] for step in steps)
            contradictions += 1
            continue
        assert value == nx.minimum_cut(twin, SOURCE, SINK)[0]
        assert set(np.flatnonzero(side).tolist()) == nearest_side(twin)
    assert 10 < contradictions < 200


def test_further_arcs_count_without_being_kept() -> None:
    network = Network()
    middle = network.vertex()
    network.arc(SOURCE, middle, 5)
    network.arc(middle, SINK, 3)
    assert min_cut(network)[1] == 3
    assert min_cut(network, [(middle, SINK, 10**12)])[1] == 5
    assert min_cut(network)[1] == 3


def test_the_chain_of_a_contradiction_is_the_shortest() -> None:
    network = Network()
    a, b, c = (network.vertex() for _ in range(3))
    for tail, head in ((SOURCE, a), (a, b), (b, SINK), (a, c), (c, b)):
        network.arc(tail, head, INFINITE)
    with pytest.raises(Contradiction) as caught:
        min_cut(network)
    assert caught.value.chain == [SOURCE, a, b, SINK]


def test_an_empty_network_has_an_empty_cut() -> None:
    side, value = min_cut(Network())
    assert (side.tolist(), value) == ([True, False], 0)
