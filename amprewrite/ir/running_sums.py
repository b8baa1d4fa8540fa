"""Running sums: a value is updated many times by adding results of products, as in recurrences and moving averages.

Examples: `h = h + u[:, t]`, `h = 0.99 * h + 0.01 * u[:, t]`, `h = n + z * (h - n)`. Each sum rounds all of h, and the errors add up.
torch.autocast keeps h in fp32 if its start comes from no product: a learnt state, zeros, an input.

1. A sum continues an earlier one if only elementwise ops, moves and choices lead from the earlier sum to it.
2. It carries the earlier sum if the values added on the way come from products, but not from products of the earlier sum. A branch of a
   residual stream comes from those; its own rounding is as large as the stream's. A sum that a computed factor scales, as a gate does,
   is always carried, unless a path without such a factor exists as well.
3. Only values that torch.autocast holds in fp32 count, and only from `MANY` sums in a row.
4. A residual stream of `DEEP` sums in a row is carried as well. The roundings of so many sums, and of as many sums of its gradient in
   the backward, exceed those of a branch. A norm ends a stream and begins a new one.

`lerp` is known by name: it scales its first operand by one minus its weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace

from amprewrite.ir.held_wide import held_wide, is_product
from amprewrite.ir.op_graph import OpGraph, OpNode
from amprewrite.ir.problem import Problem
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import OpKind

MANY = 8
"""Least number of sums in a row that stay fp32: one rounding in bf16 is off by up to 0.4 %, eight in the same direction by 3 %."""
DEEP = 32
"""Least number of sums of a residual stream that stay fp32. Their roundings are independent, so 32 of them are off by six times the error
of one. Networks of a dozen layers have 25."""
FEW = 16
"""Most ops between a sum and the earlier sum that it continues: three or four are usual."""
SUMS, FACTORS = ops_with(Trait.ADDS_UP), ops_with(Trait.SCALES)
LEVEL = ops_with(Trait.TAKES_MEAN_AWAY, Trait.HAS_STEPS, Trait.SHARES_OUT)


def running_sums(problem: Problem) -> frozenset[str]:
    """The sums of a graph that are part of long running sums, and the ops that pass the value from one sum to the next."""
    graph = problem.graph
    if sum(node.op in SUMS for node in graph) < MANY:
        return frozenset()
    return _Sums(graph, held_wide(graph, problem.device, problem.held)).found()


@dataclass(frozen=True)
class _Way:
    """A path from a value back to an earlier sum."""

    passed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    """Values that sums add on the path."""
    scaled: bool = False
    """Whether a computed factor scales the carried value."""
    branch: bool = False
    """Whether the added values come from the sum itself, through products."""


class _Sums:
    """The sums of one graph, each with a bit, and the values downstream of them as sets of bits."""

    def __init__(self, graph: OpGraph, wide: Set[str]) -> None:
        self.graph, self.wide = graph, wide
        self.rounded = set[str]()
        """Values downstream of a product."""
        self.bit: dict[str, int] = {}
        self.made: dict[str, int] = {}
        """For each value: the sums upstream."""
        self.by_products: dict[str, int] = {}
        """For each value: the sums upstream with a product in between."""
        for node in graph:
            self._read(node)

    def _read(self, node: OpNode) -> None:
        given = [operand.value for operand in node.operands]
        made = by_products = 0
        for value in given:
            made |= self.made.get(value, 0)
            by_products |= self.by_products.get(value, 0)
        product = is_product(node)
        self.by_products[node.name] = made if product else by_products
        if node.op in SUMS:
            self.bit[node.name] = 1 << len(self.bit)
            made |= self.bit[node.name]
        self.made[node.name] = made
        if product or not self.rounded.isdisjoint(given):
            self.rounded.add(node.name)

    def found(self) -> frozenset[str]:
        sums = [node for node in self.graph if node.op in SUMS and node.name in self.wide]
        carried = {node.name: dict(self._carried(node)) for node in sums}
        plain = {name: {before: way for before, way in ways.items() if not way.branch} for name, ways in carried.items()}
        return self._in_a_row(plain, MANY) | (self._in_a_row(carried, DEEP) if len(sums) >= DEEP else frozenset())

    def _in_a_row(self, ways: dict[str, dict[str, _Way]], many: int) -> frozenset[str]:
        """The sums in rows of at least `many`, and the ops between them. `ways` holds the paths from each sum to earlier sums."""
        steps: dict[str, int] = {}
        for name, given in ways.items():
            steps[name] = 1 + max((steps.get(before, 1) for before in given), default=0)
        whole = dict(steps)
        for name in reversed(ways):
            for before in ways[name]:
                whole[before] = max(whole.get(before, 0), whole[name])
        kept = [name for name, length in whole.items() if length >= many]
        passed = (each for name in kept for way in ways.get(name, {}).values() for each in way.passed)
        return frozenset(each for each in (*kept, *passed) if each in self.wide)

    def _carried(self, node: OpNode) -> Iterator[tuple[str, _Way]]:
        """The earlier sums that a sum carries, each with the path to it. The values added must come from products, or be scaled."""
        plain, scaled = dict[str, _Way](), dict[str, _Way]()
        waiting = deque([(node, _Way())])
        for _ in range(FEW**2):
            if not waiting:
                break
            last, way = waiting.popleft()
            if last is not node and last.name in self.bit and last.name in self.wide:
                (scaled if way.scaled else plain).setdefault(last.name, way)
            if len(way.passed) < FEW and (last is node or self._hands_on(last, node)):
                waiting += self._before(last, way)
        for name, way in {**scaled, **plain}.items():
            if way.scaled or not self.rounded.isdisjoint(way.added):
                branch = not way.scaled and any(self.by_products[each] & self.bit[name] for each in way.added)
                yield name, replace(way, branch=branch)

    def _hands_on(self, node: OpNode, to: OpNode) -> bool:
        """Whether an op works element by element, moves values or chooses among them, and so continues a sum."""
        if node.role != "op" or is_product(node) or node.op in LEVEL:
            return False
        return node.kind in (OpKind.CLEAR, OpKind.INFER) or (node.kind is OpKind.INTERNAL and node.numel == to.numel)

    def _before(self, node: OpNode, way: _Way) -> Iterator[tuple[OpNode, _Way]]:
        for place, operand in enumerate(node.operands):
            others = tuple(other.value for other in node.operands if other is not operand)
            computed = not self.rounded.isdisjoint(others)
            scaled = way.scaled or (node.op in FACTORS and computed) or (node.op == "lerp" and not place and computed and len(others) > 1)
            yield self.graph[operand.value], _Way((*way.passed, node.name), way.added + others * (node.op in SUMS), scaled)


__all__ = ["running_sums"]
