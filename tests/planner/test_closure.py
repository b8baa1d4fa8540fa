"""The heaviest closure against all subsets."""

from __future__ import annotations

import itertools
import random

from amprewrite.planner.min_cut import heaviest_closure


def closed(chosen: set[int], needs: list[tuple[int, int]]) -> bool:
    return all(need in chosen for item, need in needs if item in chosen)


def best_of_all(weights: list[int], needs: list[tuple[int, int]]) -> int:
    """The most that any closed set weighs."""
    subsets = (set(s) for size in range(len(weights) + 1) for s in itertools.combinations(range(len(weights)), size))
    return max(sum(weights[i] for i in chosen) for chosen in subsets if closed(chosen, needs))


def test_no_closed_set_weighs_more() -> None:
    rng = random.Random(44)
    taken = 0
    for _ in range(1200):
        count = rng.randint(2, 9)
        weights = [rng.randint(-20, 20) for _ in range(count)]
        needs = [(a, b) for a in range(count) for b in range(count) if a != b and rng.random() < 0.2]
        found = set(heaviest_closure(dict(enumerate(weights)), needs))
        assert closed(found, needs)
        assert sum(weights[i] for i in found) == best_of_all(weights, needs)
        taken += bool(found)
    assert 300 < taken < 1200  # neither always nothing nor always something


def test_what_two_share_is_paid_once() -> None:
    weights = {"q": 6, "k": 6, "copy": -10}
    assert heaviest_closure(weights, [("q", "copy"), ("k", "copy")]) == {"q", "k", "copy"}
    assert heaviest_closure({"q": 6, "copy": -10}, [("q", "copy")]) == frozenset()


def test_a_tie_takes_nothing() -> None:
    assert heaviest_closure({"q": 10, "copy": -10}, [("q", "copy")]) == frozenset()


def test_large_weights_are_exact() -> None:
    assert heaviest_closure({"q": 2**50 + 1, "copy": -(2**50)}, [("q", "copy")]) == {"q", "copy"}
