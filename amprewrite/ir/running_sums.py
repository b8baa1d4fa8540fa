"""Find running sums, which stay fp32: values that are updated many times by adding results of products, as in recurrences.

Examples: `h = h + u[:, t]`, `h = 0.99 * h + 0.01 * u[:, t]`, `h = n + z * (h - n)`. In a low format each sum would round all of h, and the
errors would add up. torch.autocast keeps h in fp32 if its start comes from no product: a learnt state, zeros, an input.

1. A sum *continues* an earlier sum if only elementwise ops, moves and choices lead from the earlier sum to it.
2. The later sum *carries* the earlier sum if the values added on the way come from products, but not from products of the earlier sum
   itself. The branch of a residual block is a product of the earlier sum. It does not count, because its own rounding is as large as the
   rounding of the stream. If a computed factor, such as a gate, scales the earlier sum on all paths to the later sum, then the later sum
   carries it in any case.
3. Only sums that torch.autocast holds in fp32 count, and only chains of at least `MANY` sums.
4. Residual streams of at least `DEEP` sums count as well. The roundings of so many sums, and of as many sums of the gradient in the
   backward, exceed the roundings of a branch. A norm ends a stream and begins a new one.

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
"""Least length of a running sum that stays fp32. One rounding in bf16 is off by up to 0.4 %, eight in the same direction by 3 %."""
DEEP = 32
"""Least number of sums of a residual stream that stays fp32. Their roundings are independent, so 32 of them are off by about six times the
error of one. Networks of a dozen layers have 25 sums and stay below this limit."""
FEW = 16
"""Largest number of ops on a path from a sum back to the earlier sum that it updates. Three or four are usual."""
SUMS, FACTORS = ops_with(Trait.ADDS_UP), ops_with(Trait.SCALES)
LEVEL = ops_with(Trait.TAKES_MEAN_AWAY, Trait.HAS_STEPS, Trait.SHARES_OUT)


def running_sums(problem: Problem) -> frozenset[str]:
    """Return the names of the summing ops that make up long running sums, and of the ops between one of these and the next.

    The set is empty if the graph has no long running sum.
    """
    graph = problem.graph
    if sum(node.op in SUMS for node in graph) < MANY:
        return frozenset()
    return _Sums(graph, held_wide(graph, problem.device, problem.held)).found()


@dataclass(frozen=True)
class _Way:
    """A path from a sum back to an earlier sum that it updates."""

    passed: tuple[str, ...] = ()
    """Names of the ops on the path, the later sum included."""
    added: tuple[str, ...] = ()
    """Names of the values that the sums on the path add."""
    scaled: bool = False
    """Whether, on the path, the earlier sum is multiplied by a factor that was computed by a product, such as a gate."""
    branch: bool = False
    """Whether an added value comes from a product of the earlier sum, as the branch of a residual block does."""


class _Sums:
    """Finds the running sums of one graph: long chains of sums, each of which updates the result of the one before.

    Sets of sums are ints with one bit for each sum.
    """

    def __init__(self, graph: OpGraph, wide: Set[str]) -> None:
        self.graph, self.wide = graph, wide
        self.rounded = set[str]()
        """Names of the values downstream of a product, results of products included."""
        self.bit: dict[str, int] = {}
        """The bit of each sum, by name."""
        self.made: dict[str, int] = {}
        """For each value: the set of the sums from which it is computed, with the value itself if it is a sum."""
        self.by_products: dict[str, int] = {}
        """For each value: the set of the sums from which it is computed through a product."""
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
        """Return the sums in chains of at least `many` sums, each of which updates the sum before, and the ops between them.

        `ways` holds for each sum, in the order of the graph, the earlier sums that it updates (carries, in rule 2), with the paths to them.
        """
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
        """Yield (name of an earlier sum that the sum `node` updates, the path back to it), by rule 2 of this file."""
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
        """True if a path from the later sum `to` back to an earlier sum may pass `node`: an elementwise op, or an op that moves elements.

        An op of kind INTERNAL counts as elementwise if its result has as many elements as `to`.
        """
        if node.role != "op" or is_product(node) or node.op in LEVEL:
            return False
        return node.kind in (OpKind.CLEAR, OpKind.INFER) or (node.kind is OpKind.INTERNAL and node.numel == to.numel)

    def _before(self, node: OpNode, way: _Way) -> Iterator[tuple[OpNode, _Way]]:
        for place, operand in enumerate(node.operands):
            others = tuple(other.value for other in node.operands if other is not operand)
            computed = not self.rounded.isdisjoint(others)
            scaled = way.scaled or (node.op in FACTORS and computed) or (node.op == "lerp" and not place and computed and len(others) > 1)
            yield self.graph[operand.value], _Way((*way.passed, node.name), way.added + others * (node.op in SUMS), scaled)
