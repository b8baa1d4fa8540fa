"""Find sums that change one value in many small steps, such as a repeated `x = x + 0.1 * f(x)`: the part that all kinds of graphs share.

A step computes `a * x + b * f(x)` of a value x, in one op or several, where f contains a product. The search expands a sum as a linear form
through sums, scalings and copies until it finds such an x. A subclass for each kind of graph tells which ops are linear, and their factors.
A factor is a number or a *schedule*, a value that is known only in a call. A step in the body of a loop counts as many steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

from amprewrite.ir.op_graph import reached

SMALL, MANY = 0.25, 8
"""A step is small if the factor of f(x) is at most SMALL times the factor of x. A chain of at least MANY small steps is kept in fp32.

Eight sums, each rounded, are off by about three roundings. If f is scaled down to a quarter, its rounding errors give a quarter of that.
torch.autocast keeps such sums in fp32, because their first value is fp32.
"""
FEW = 16
"""Largest number of ops to expand in the search for one step.

One step of DDIM has eight: two scalings of the network's result, two of the state, two sums, and one or two scalings in the network.
"""

Node = TypeVar("Node", bound=Hashable)


@dataclass(frozen=True)
class Factor:
    """The factor of a summand: a number times schedules (values known only in a call), each with its use: s, 1 / s, or 1 - s."""

    number: float = 1.0
    schedules: frozenset[tuple[Hashable, str]] = frozenset()

    def __mul__(self, other: Factor) -> Factor:
        return Factor(self.number * other.number, self.schedules | other.schedules)

    def __add__(self, other: Factor) -> Factor:
        if self.schedules == other.schedules:
            return Factor(self.number + other.number, self.schedules)
        larger = self if self.schedules < other.schedules else other
        if larger.schedules <= self.schedules & other.schedules:
            return larger  # a summand with fewer schedules counts as the larger one: `1 - schedule` counts as 1
        return Factor(1.0, self.schedules | other.schedules)

    def is_small(self, beside: Factor) -> bool:
        """True if this factor is small compared with `beside`, or has a schedule that `beside` lacks."""
        return not self.schedules <= beside.schedules or abs(self.number) <= SMALL * abs(beside.number)


def _may_be_small(factors: Collection[Factor]) -> bool:
    """False if no factor is small compared with another: all have the same schedules, and their numbers are of about one size."""
    numbers = [abs(factor.number) for factor in factors]
    return min(numbers) <= SMALL * max(numbers) or len({factor.schedules for factor in factors}) > 1


class SmallSteps(ABC, Generic[Node]):
    """Finds the sums of one graph that change a value in many small steps `x = x + 0.1 * f(x)`. A subclass reads one kind of graph."""

    order: Mapping[Node, int]
    """The position of each value in the order of the graph."""
    heavy: set[Node]
    """Results of matrix products, convolutions and other ops that contain such products."""

    @abstractmethod
    def inputs(self, node: Node) -> Iterable[Node]:
        """Return all operands of an op."""

    @abstractmethod
    def terms(self, node: Node) -> dict[Node, Factor]:
        """Return the summands of an op, each with its factor; {} if the op is not known to be linear. Plain numbers are left out."""

    @abstractmethod
    def only(self, node: Node) -> Node | None:
        """Return the only tensor that an op reads, apart from schedules; None if there are several, or if the op is a product."""

    @abstractmethod
    def shape(self, node: Node) -> tuple[object, ...] | None:
        """Return the sizes of a value; None if it is no tensor."""

    def found(self, is_sum: Callable[[Node], bool], in_turns: Callable[[Node], bool] = lambda _: False) -> set[Node]:
        """Return the sums that belong to a chain of many small steps `x = x + 0.1 * f(x)`, and the ops that pass x on between these sums.

        `is_sum` is True for ops that may be steps. `in_turns` is True for a value that a loop passes to its next iteration.
        """
        terms, shape = cache(self.terms), cache(self.shape)
        before: dict[Node, Node | None] = {}
        between: dict[Node, list[Node]] = {}
        so_far: dict[Node, int] = {}
        for node in self.order:
            step = self._step(node, terms, shape) if is_sum(node) else None
            if step is None:
                continue
            value, passed = step
            way = list(self._alike(value))
            last = next((place for place, each in enumerate(way) if each in before), None)
            before[node] = way[last] if last is not None else None
            between[node] = passed + way[: last or 0]
            turns = MANY if in_turns(way[-1]) else 1
            so_far[node] = turns + (so_far[way[last]] if last is not None else 0)
        whole = dict(so_far)
        for node, behind in reversed(before.items()):
            if behind is not None:
                whole[behind] = max(whole[behind], whole[node])
        return {each for node, steps in whole.items() if steps >= MANY for each in (node, *between[node])}

    def _step(
        self, node: Node, parts_of: Callable[[Node], dict[Node, Factor]], shape: Callable[[Node], tuple[object, ...] | None]
    ) -> tuple[Node, list[Node]] | None:
        """Return (x, ops between x and the sum) if the sum `node` adds a small step to an earlier value x; None if it does not.

        `parts_of` and `shape` are the methods `terms` and `shape`, called once for each node of the graph.
        """
        read: dict[Node, dict[Node, Factor]] = {}
        terms: dict[Node, Factor] = {node: Factor()}
        for _ in range(FEW):
            made = {each: parts for each in terms if (parts := parts_of(each))}
            if not made:
                return None
            latest = max(made, key=self.order.__getitem__)
            read[latest] = made[latest]
            factor = terms.pop(latest)
            for part, times in made[latest].items():
                terms[part] = terms[part] + factor * times if part in terms else factor * times
            if not _may_be_small(terms.values()):
                continue
            plainest = sorted(terms, key=lambda each: len(terms[each].schedules))  # so that x is tried before `schedule * cos(x)`
            value = next((each for each in plainest if shape(each) == shape(node) and self._goes_on(each, terms)), None)
            if value is not None:
                passed = {value}
                for each in reversed(read):
                    if not passed.isdisjoint(read[each]):
                        passed.add(each)
                return value, [each for each in read if each in passed]
        return None

    def _goes_on(self, value: Node, terms: dict[Node, Factor]) -> bool:
        """True if some of `terms`, the summands, are computed from `value` by a product, and all these summands have small factors."""
        others = {each: factor.is_small(terms[value]) for each, factor in terms.items() if each is not value}
        if not any(others.values()):
            return False
        alike = list(self._alike(value))
        small = any(self._leads_through(each, step) for step, is_small in others.items() if is_small for each in alike)
        return small and not any(self._leads_through(each, step) for step, is_small in others.items() if not is_small for each in alike)

    def _alike(self, value: Node) -> Iterator[Node]:
        """Yield `value`, then the values upstream that lead to it through ops with one tensor operand: copies, activations, scalings."""
        yield value
        while (only := self.only(value)) is not None:
            value = only
            yield value

    def _leads_through(self, value: Node, step: Node) -> bool:
        """True if `step` is computed from `value` with a product on the way."""
        first = self.order[value]
        seen = set(reached([step], lambda each: (source for source in self.inputs(each) if self.order[source] >= first)))
        return value in seen and not self.heavy.isdisjoint(seen - {value})
