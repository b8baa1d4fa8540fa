"""What is read off a value or an argument: every leaf of a structure, in order, and no structure is looked for where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx
from torch import nn
from torch.utils._pytree import tree_leaves

from amprewrite.graphs.fx import node_facts
from amprewrite.graphs.fx.node_facts import arguments, tensors

ONE, TWO = torch.ones(1), nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    "value",
    [ONE, TWO, None, 3, 2.5, True, "x", torch.bool, (), (ONE, None), [TWO, (ONE, {"a": TWO, "b": [3, ONE]})], torch.max(ONE, 0)],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_the_leaves_of_a_structure_in_order(value: Any) -> None:
    expected = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    found = tensors(value)
    assert len(found) == len(expected) and all(one is other for one, other in zip(found, expected, strict=True))


def test_no_structure_is_looked_for_in_one_tensor_or_number(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    plain, listed = graph.call_function(torch.add, (x, 2), {"alpha": y}), graph.call_function(torch.cat, ([x, y], 0))
    asked: list[Any] = []
    monkeypatch.setattr(node_facts, "tree_leaves", lambda value: asked.append(value) or tree_leaves(value))
    assert tensors(ONE) == [ONE] and tensors(None) == tensors(3) == [] and [node for _, node in arguments(plain)] == [x, y]
    assert not asked
    assert [node for _, node in arguments(listed)] == [x, y] and len(asked) == 1
