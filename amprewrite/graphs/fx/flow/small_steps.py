"""Sums that go on with one value in many small steps: `x = x + 0.1 * f(x)`, again and again.

A step makes `a * x + b * f(x)` of a value x, where a product is in f, by one op or several: the linear form of a sum is read through sums,
scalings and copies until such an x shows. Factors are numbers, or *schedules*: buffers, inputs and constants of a sampler or solver
(`sigmas[i + 1] - sigmas[i]`, `alphas[t].sqrt()`, one a sample), and what is made of them without a product. A schedule differs along one
dim at most, and along fewer than the value does. Its numbers show in a call alone: samplers and solvers that have one take small steps.
What is learnt is no schedule (LayerScale, ReZero), nor is what was drawn or made of booleans (stochastic depth, padding): the residual
streams that are scaled by those take large steps.

By name it knows how ops are linear: `add`, `sub`, `rsub`, `mul`, `div`, `neg`, `addcmul`, `addcdiv`, `lerp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import example_value
from amprewrite.ir.op_graph import OpGraph
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with

SMALL, MANY = 0.25, 8
"""A step is small if numbers scale f down to that, beside x, and this many in a row are many. The sums of eight, each rounded, are off by
three times what one is; a step that is scaled to a quarter is off by a quarter of that. torch.autocast keeps such sums in fp32, as their
first value is."""
FEW = 16
"""Ops that a step is looked for behind. One of DDIM has eight: two scalings of what the network gave, two of the state, two sums, and one
or two scalings in the network."""
LINEAR = ops_with(Trait.LINEAR_IN_FIRST, Trait.BOUNDS)
"""What hands on its first operand times one, if it has as many elements: copies, views, conversions, and bounds, which let it pass."""
RANDOM = ops_with(Trait.RANDOM)
SUMS = ops_with(Trait.ADDS_UP)


def read_small_steps(graph: OpGraph, nodes: Mapping[str, torch.fx.Node]) -> tuple[str, ...]:
    """Sums that go on with one value in many small steps, where products are in each, and what scales or copies that value in between."""
    return _Steps(graph, nodes).found() if nodes else ()


@dataclass(frozen=True)
class _Factor:
    """A number times schedules: each with what is done with it, multiplied, divided by, or taken from one."""

    number: float = 1.0
    schedules: frozenset[tuple[torch.fx.Node, str]] = frozenset()

    def __mul__(self, other: _Factor) -> _Factor:
        return _Factor(self.number * other.number, self.schedules | other.schedules)

    def __add__(self, other: _Factor) -> _Factor:
        if self.schedules == other.schedules:
            return _Factor(self.number + other.number, self.schedules)
        return _Factor(1.0, self.schedules | other.schedules)

    def is_small(self, beside: _Factor) -> bool:
        """Whether this is small beside another factor. If it has a schedule that the other has not it is."""
        return not self.schedules <= beside.schedules or abs(self.number) <= SMALL * abs(beside.number)


_Terms = dict[torch.fx.Node, _Factor]


class _Steps:
    """The steps of one graph."""

    def __init__(self, graph: OpGraph, nodes: Mapping[str, torch.fx.Node]) -> None:
        self.names = {node: name for name, node in nodes.items()}
        self.order = {node: place for place, node in enumerate(next(iter(self.names)).graph.nodes)}
        self.heavy = {node for name, node in nodes.items() if graph[name].flops}
        self.exact = set[torch.fx.Node]()
        for node in self.order:
            if node in self.names and self._is_exact(node, graph[self.names[node]].role):
                self.exact.add(node)

    def found(self) -> tuple[str, ...]:
        before: dict[torch.fx.Node, torch.fx.Node | None] = {}
        between: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        so_far: dict[torch.fx.Node, int] = {}
        for node in self.order:
            step = self._step(node) if node in self.names and op_name(node.target) in SUMS else None
            if step is None:
                continue
            value, passed = step
            way = list(self._alike(value))
            last = next((place for place, each in enumerate(way) if each in before), None)
            before[node] = way[last] if last is not None else None
            between[node] = passed + way[: last or 0]
            so_far[node] = 1 + (so_far[way[last]] if last is not None else 0)
        whole = dict(so_far)
        for node, behind in reversed(before.items()):
            if behind is not None:
                whole[behind] = max(whole[behind], whole[node])
        kept = {each for node, steps in whole.items() if steps >= MANY for each in (node, *between[node])}
        return tuple(name for node, name in self.names.items() if node in kept)

    def _step(self, node: torch.fx.Node) -> tuple[torch.fx.Node, list[torch.fx.Node]] | None:
        """The value that a sum takes a small step from, and the ops that hand it on until then; None if it is no such sum."""
        read: dict[torch.fx.Node, _Terms] = {}
        terms: _Terms = {node: _Factor()}
        for _ in range(FEW):
            made = {each: parts for each in terms if (parts := self._terms(each))}
            if not made:
                return None
            latest = max(made, key=self.order.__getitem__)
            read[latest] = made[latest]
            factor = terms.pop(latest)
            for part, times in made[latest].items():
                terms[part] = terms[part] + factor * times if part in terms else factor * times
            plainest = sorted(terms, key=lambda each: len(terms[each].schedules))  # x itself before `schedule * cos(x)`
            value = next((each for each in plainest if _shape_of(each) == _shape_of(node) and self._goes_on(each, terms)), None)
            if value is not None:
                passed = {value}
                for each in reversed(read):
                    if not passed.isdisjoint(read[each]):
                        passed.add(each)
                return value, [each for each in read if each in passed]
        return None

    def _goes_on(self, value: torch.fx.Node, terms: _Terms) -> bool:
        """Whether what products make of a value is small beside the value itself, and there is such."""
        others = {each: factor.is_small(terms[value]) for each, factor in terms.items() if each is not value}
        if not any(others.values()):
            return False
        alike = list(self._alike(value))
        small = any(self._leads_through(each, step) for step, is_small in others.items() if is_small for each in alike)
        return small and not any(self._leads_through(each, step) for step, is_small in others.items() if not is_small for each in alike)

    def _terms(self, node: torch.fx.Node) -> _Terms:
        """What an op adds up, each with its factor; {} if it is not linear, or if that is not known. Numbers that it adds are left out."""
        op = op_name(node.target) if node.op.startswith("call") else ""
        first, second, third = (*node.args[:3], None, None, None)[:3]
        one, parts = _Factor(), list[tuple[Any, _Factor | None]]()
        if (op == "rsub" or op in ("add", "sub")) and second is not None:
            other = self._factor(node.kwargs.get("alpha", 1.0), node)
            minus = _Factor(-1.0)
            parts = [(first, minus if op == "rsub" else one), (second, other * minus if op == "sub" and other else other)]
        elif op == "neg":
            parts = [(first, _Factor(-1.0))]
        elif op == "mul":
            factor = self._factor(second, node)
            parts = [(first, factor)] if factor is not None else [(second, self._factor(first, node))]
        elif op == "div" and "rounding_mode" not in node.kwargs:
            parts = [(first, self._factor(second, node, "divided by"))]
        elif op == "lerp":
            weight = node.kwargs.get("weight", third)
            parts = [(first, self._factor(weight, node, "rest")), (second, self._factor(weight, node))]
        elif op in ("addcmul", "addcdiv"):
            value = self._factor(node.kwargs.get("value", 1.0), node)
            factor = self._factor(third, node, "divided by" if op == "addcdiv" else "")
            if factor is None and op == "addcmul":
                second, factor = third, self._factor(second, node)
            parts = [(first, one), (second, value * factor if value and factor else None)]
        elif op in LINEAR and isinstance(first, torch.fx.Node) and _elements(first) == _elements(node):
            parts = [(first, one)] if self._only(node) is first else []
        found: _Terms = {}
        for part, times in parts:
            if isinstance(part, torch.fx.Node) and isinstance(example_value(part), torch.Tensor):
                if times is None:
                    return {}
                found[part] = found[part] + times if part in found else times
        return found

    def _factor(self, given: Any, node: torch.fx.Node, how: str = "") -> _Factor | None:
        """A number or a schedule among the arguments of an op, as a factor; None if it is neither."""
        value = example_value(given) if isinstance(given, torch.fx.Node) else given
        if type(value) in (int, float):
            if how == "rest":
                return _Factor(1.0 - value)
            return _Factor(value) if not how else (_Factor(1.0 / value) if value else None)
        known = isinstance(given, torch.fx.Node) and (not isinstance(value, torch.Tensor) or self._is_schedule(given, node))
        return _Factor(1.0, frozenset([(given, how)])) if known else None

    def _is_exact(self, node: torch.fx.Node, role: str) -> bool:
        """Whether a value is of numbers, buffers and inputs alone: neither a product nor a draw made it, nor booleans or a parameter."""
        value = example_value(node)
        if not isinstance(value, torch.Tensor) or value.dtype == torch.bool or role == "output":
            return False
        if role != "op":
            return role != "parameter" and not value.requires_grad
        if node in self.heavy or op_name(node.target) in RANDOM or isinstance(node.target, torch._ops.HigherOrderOperator):
            return False
        return all(each in self.exact for each in node.all_input_nodes if isinstance(example_value(each), torch.Tensor))

    def _is_schedule(self, node: torch.fx.Node, beside: torch.fx.Node) -> bool:
        """Whether a value may be the factor of one with more dims: numbers along one dim at most."""
        return node in self.exact and _dims(node) <= 1 and _dims(node) < _dims(beside)

    def _alike(self, value: torch.fx.Node) -> Iterator[torch.fx.Node]:
        """A value, and those that it is made of one by one: copies, views, activations, scalings by numbers or schedules."""
        yield value
        while value.op.startswith("call"):
            only = self._only(value)
            if only is None:
                return
            value = only
            yield value

    def _only(self, node: torch.fx.Node) -> torch.fx.Node | None:
        """The only tensor that an op reads beside schedules; None if there are more, or if it is a product."""
        given = [each for each in node.all_input_nodes if isinstance(example_value(each), torch.Tensor)]
        if len(given) > 1:
            given = [each for each in given if not self._is_schedule(each, node)] if node not in self.heavy else []
        return given[0] if len(given) == 1 else None

    def _leads_through(self, value: torch.fx.Node, step: torch.fx.Node) -> bool:
        """Whether `step` is made of `value`, and with a product."""
        seen, waiting = {step}, [step]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                if source not in seen and self.order[source] >= self.order[value]:
                    seen.add(source)
                    waiting.append(source)
        return value in seen and not self.heavy.isdisjoint(seen - {value})


def _shape_of(node: torch.fx.Node) -> tuple[Any, ...] | None:
    value = example_value(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _elements(node: torch.fx.Node) -> Any:
    value = example_value(node)
    return value.numel() if isinstance(value, torch.Tensor) else None


def _dims(node: torch.fx.Node) -> int:
    """Dims along which a value may differ."""
    return sum(not isinstance(size, int) or size > 1 for size in _shape_of(node) or ())


__all__ = ["read_small_steps"]
