"""Which fx nodes share memory that is written in place, and how many writes a reader comes after."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx

from amprewrite.frontends.fx_facts import Fact, example_value, is_batched, tensors
from amprewrite.tensor_hooks import hooked


def _storage(value: Any) -> set[int]:
    found = set()
    for tensor in tensors(value):
        if tensor.layout == torch.strided and not is_batched(tensor):
            found.add(tensor.untyped_storage()._cdata)
    return found


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


def memory(facts: dict[torch.fx.Node, Fact]) -> tuple[Ties, Callable[[torch.fx.Node, Fact], int]]:
    writes: dict[int, list[int]] = defaultdict(list)
    for fact in facts.values():
        for target in fact.writes:
            for storage in _storage(example_value(target)):
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
        for storage in _storage(fact.value) if writes else ():
            if fact.position <= max(writes.get(storage, (-1,))):  # made after the last write: nothing is shared any more
                union.join(node, first.setdefault(storage, node))
    for node, fact in facts.items():
        if fact.role != "op" and fact.dtype == "fp32" and any(storage in writes for storage in _storage(fact.value)):
            state.add(union.find(node))
    group = {node: union.find(node) for node in list(union.parent)}

    def epoch(value: torch.fx.Node, reader: Fact) -> int:
        if not writes:
            return 0
        return sum(position < reader.position for storage in _storage(facts[value].value) for position in writes.get(storage, ()))

    return Ties(group, state, Counter(group.values())), epoch
