"""Which fx nodes share memory that is written in place, and how many writes a reader comes after."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx

from amprewrite.graphs.fx.node_facts import LEAVES, RETURNED, Fact, example_value, is_opaque, storages
from amprewrite.graphs.fx.ops.tensor_hooks import hooked


class _Union:
    def __init__(self) -> None:
        self.parent: dict[Any, Any] = {}

    def find(self, x: Any) -> Any:
        self.parent.setdefault(x, x)
        while self.parent[x] != x:
            self.parent[x] = self.parent[self.parent[x]]
            x = self.parent[x]
        return x

    def join(self, a: Any, b: Any) -> None:
        self.parent[self.find(a)] = self.find(b)


@dataclass
class Ties:
    """Which nodes share a colour, and which of those groups write a model input, parameter or buffer."""

    group: dict[torch.fx.Node, torch.fx.Node]
    writes_state: set[torch.fx.Node]
    size: Counter[torch.fx.Node]


def _memory(fact: Fact) -> set[int]:
    """The memory that others see under a node's result; none where all read the copy that leaves instead."""
    return set() if any(user.meta.get(LEAVES) == RETURNED for user in fact.node.users) else storages(fact.value)


def memory(facts: dict[torch.fx.Node, Fact]) -> tuple[Ties, Callable[[torch.fx.Node, Fact], int]]:
    writes: dict[int, list[int]] = defaultdict(list)
    for fact in facts.values():
        for target in fact.writes:
            for storage in storages(example_value(target)):
                writes[storage].append(fact.position)
    union, state = _Union(), set()
    first: dict[int, torch.fx.Node] = {}
    for node, fact in facts.items():
        if fact.dtype != "fp32" or fact.role == "output":
            continue
        union.find(node)
        if fact.op == "getitem" and isinstance(node.args[0], torch.fx.Node) and isinstance(facts[node.args[0]].value, tuple | list):
            union.join(node, node.args[0])
        if node.target is hooked:
            union.join(node, node.args[0])
        for storage in _memory(fact) if writes else ():
            if fact.position <= max(writes.get(storage, (-1,))):  # made after the last write: nothing is shared any more
                union.join(node, first.setdefault(storage, node))
    for node, fact in facts.items():
        if fact.role != "op" and fact.dtype == "fp32" and any(storage in writes for storage in storages(fact.value)):
            state.add(union.find(node))
        if is_opaque(node):  # what is inside writes fp32
            state |= {union.find(target) for target in fact.writes if facts[target].dtype == "fp32"}
    group = {node: union.find(node) for node in list(union.parent)}

    def epoch(value: torch.fx.Node, reader: Fact) -> int:
        if not writes:
            return 0
        return sum(position < reader.position for storage in _memory(facts[value]) for position in writes.get(storage, ()))

    return Ties(group, state, Counter(group.values())), epoch
