"""Find sums that change one value in many small steps, as samplers and solvers do: `x = x + 0.1 * f(x)`, again and again.

A step computes `a * x + b * f(x)` of a value x, in one op or several, where f contains a product. The search expands a sum as a linear form
through sums, scalings and copies until it finds such an x. The factors a and b consist of numbers, *learnt factors*, *schedules* and
*noise*. Learnt factors and schedules vary along one dim at most.

1. A schedule is computed without a product from buffers, inputs and constants of a sampler or solver, such as `sigmas[i + 1] - sigmas[i]`
   or `alphas[t].sqrt()`. It varies along fewer dims than the value. Its numbers are known only when the graph runs. Samplers and solvers
   with a schedule take small steps. A value computed from random draws or booleans (stochastic depth, padding) is no schedule, because
   such values scale residual streams, which take large steps.
2. A learnt factor is computed from parameters and numbers (LayerScale, ReZero, a learnt step). Its size is its root mean square, which is
   known at capture. A learnt factor of unknown size counts as small.
3. Noise is drawn from a normal distribution, is a floating input, or is computed from such values. A stochastic solver multiplies the
   result of a network by noise. A value computed from integers is no noise, because it may be a mask.

This file has special code for linear ops: `add`, `sub`, `rsub`, `mul`, `div`, `neg`, `addcmul`, `addcdiv`, `lerp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import comparable, example_value
from amprewrite.graphs.step_search import Factor, SmallSteps
from amprewrite.ir.op_graph import OpGraph
from amprewrite.tables.ops.op_lists import Trait, find_op, op_name, ops_with
from amprewrite.tables.vocabulary import OpKind
from amprewrite.torch_internals.operators import HigherOrderOperator

LINEAR = ops_with(Trait.LINEAR_IN_FIRST, Trait.BOUNDS)
"""Ops whose result counts as the first operand times one, if both have the same number of elements: copies, views, conversions, bounds."""
RANDOM = ops_with(Trait.RANDOM)
SUMS, NORMAL = ops_with(Trait.ADDS_UP), ops_with(Trait.DRAWS_NORMAL)


def read_small_steps(
    graph: OpGraph, nodes: Mapping[str, torch.fx.Node], factors: Mapping[str, float], repeated: bool = False
) -> tuple[str, ...]:
    """Return the names of the sums that change one value in many small steps, and of the ops between these sums that scale or copy it.

    `factors` are the signed root mean squares of parameters that may scale a value. `repeated` is True for a body graph, which the graph
    around it may run many times.
    """
    if not nodes:
        return ()
    steps = _Steps(graph, nodes, factors)
    kept = steps.found(
        lambda node: node in steps.names and op_name(node.target) in SUMS, lambda node: repeated and node.op == "placeholder"
    )
    return tuple(name for node, name in steps.names.items() if node in kept)


class _Steps(SmallSteps[torch.fx.Node]):
    """Finds the sums of one fx graph that change a value in many small steps, like the steps of a diffusion sampler."""

    def __init__(self, graph: OpGraph, nodes: Mapping[str, torch.fx.Node], factors: Mapping[str, float]) -> None:
        self.names = {node: name for name, node in nodes.items()}
        self.factors = factors
        self.order = {node: place for place, node in enumerate(next(iter(self.names)).graph.nodes)}
        self.heavy = {node for name, node in nodes.items() if graph[name].flops}
        self.exact, self.learnt, self.noise = set[torch.fx.Node](), set[torch.fx.Node](), set[torch.fx.Node]()
        for node in self.order:
            role = graph[self.names[node]].role if node in self.names else ""
            if role and self._is_noise(node, role):
                self.noise.add(node)
            if role and self._is_exact(node, role):
                self.exact.add(node)
            elif role == "parameter" or (role and self._is_made_of(node, self.exact | self.learnt)):
                self.learnt.add(node)

    def inputs(self, node: torch.fx.Node) -> Iterable[torch.fx.Node]:
        return node.all_input_nodes

    def shape(self, node: torch.fx.Node) -> tuple[Any, ...] | None:
        return _shape_of(node)

    def terms(self, node: torch.fx.Node) -> dict[torch.fx.Node, Factor]:
        op = op_name(node.target) if node.op.startswith("call") else ""
        first, second, third = (*node.args[:3], None, None, None)[:3]
        one, parts = Factor(), list[tuple[Any, Factor | None]]()
        if (op == "rsub" or op in ("add", "sub")) and second is not None:
            other = self._factor(node.kwargs.get("alpha", 1.0), node)
            minus = Factor(-1.0)
            parts = [(first, minus if op == "rsub" else one), (second, other * minus if op == "sub" and other else other)]
        elif op == "neg":
            parts = [(first, Factor(-1.0))]
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
            parts = [(first, one)] if self.only(node) is first else []
        found: dict[torch.fx.Node, Factor] = {}
        for part, times in parts:
            if isinstance(part, torch.fx.Node) and isinstance(example_value(part), torch.Tensor):
                if times is None:
                    return {}
                found[part] = found[part] + times if part in found else times
        return found

    def _factor(self, given: Any, node: torch.fx.Node, how: str = "") -> Factor | None:
        """Return the argument `given` of `node` as a factor, if it is one of the kinds that this file lists; otherwise None.

        The kinds are numbers, schedules, learnt factors and noise. `how` is the use of the factor: "" to multiply by it, "divided by", or
        "rest" to multiply by one minus the factor.
        """
        value = example_value(given) if isinstance(given, torch.fx.Node) else given
        if type(value) in (int, float):
            if how == "rest":
                return Factor(1.0 - value)
            return Factor(value) if not how else (Factor(1.0 / value) if value else None)
        if not isinstance(given, torch.fx.Node):
            return None
        if given in self.learnt and _dims(given) <= 1 and (size := self._size(given)) is not None:
            return self._factor(size, node, how)
        known = not isinstance(value, torch.Tensor) or self._is_schedule(given, node) or given in self.noise
        return Factor(1.0, frozenset([(given, how)])) if known else None

    def _size(self, node: torch.fx.Node) -> float | None:
        """Return the signed root mean square of a learnt factor, or of element-wise ops on a learnt factor; None if it is unknown."""
        if node in self.names and self.names[node] in self.factors:
            return self.factors[self.names[node]]
        given = [each for each in node.all_input_nodes if isinstance(example_value(each), torch.Tensor)]
        row = find_op(op_name(node.target)) if node.op.startswith("call") else None
        size = self._size(given[0]) if len(given) == 1 and given[0] in self.learnt else None
        if row is None or size is None:
            return None
        made = _applied(node, size) if row.kind is OpKind.CLEAR or _elements(node) == _elements(given[0]) else None
        return size if made is None and row.kind is OpKind.CLEAR else made

    def _is_exact(self, node: torch.fx.Node, role: str) -> bool:
        """True if a value is computed without parameters, gradients, products, random draws and booleans, so that it may be a schedule.

        `role` is the role of `node` in the op graph. Buffers, constants and inputs that require no gradient count as such values, too.
        """
        value = example_value(node)
        if not isinstance(value, torch.Tensor) or value.dtype == torch.bool or role == "output":
            return False
        if role != "op":
            return role != "parameter" and not value.requires_grad
        return self._is_made_of(node, self.exact)

    def _is_noise(self, node: torch.fx.Node, role: str) -> bool:
        """True if a value is a normal draw, a floating input without gradient, or computed from such values alone, without a product."""
        value = example_value(node)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or role == "output":
            return False
        if role != "op":
            return role == "input" and not value.requires_grad
        return op_name(node.target) in NORMAL or (bool(node.all_input_nodes) and self._is_made_of(node, self.noise))

    def _is_made_of(self, node: torch.fx.Node, sources: Set[torch.fx.Node]) -> bool:
        """True if `node` is a tensor, its op reads no tensors but `sources`, and the op is no product, random draw or higher-order op."""
        if node in self.heavy or op_name(node.target) in RANDOM or isinstance(node.target, HigherOrderOperator):
            return False
        given = [each for each in node.all_input_nodes if isinstance(example_value(each), torch.Tensor)]
        return isinstance(example_value(node), torch.Tensor) and all(each in sources for each in given)

    def _is_schedule(self, node: torch.fx.Node, beside: torch.fx.Node) -> bool:
        """True if the op `beside` may use `node` as a step size: it varies along one dim at most, and along fewer than the result.

        It must also be computed without parameters (be in `exact`), or be a learnt factor (in `learnt`) if `beside` is a `mul` or `div`.
        """
        scales = node in self.exact or (node in self.learnt and op_name(beside.target) in ("mul", "div"))
        return scales and _dims(node) <= 1 and _dims(node) < _dims(beside)

    def only(self, node: torch.fx.Node) -> torch.fx.Node | None:
        given = [each for each in node.all_input_nodes if isinstance(example_value(each), torch.Tensor)]
        if len(given) > 1:
            given = [each for each in given if not self._is_schedule(each, node)] if node not in self.heavy else []
        return given[0] if len(given) == 1 else None


def _shape_of(node: torch.fx.Node) -> tuple[Any, ...] | None:
    value = example_value(node)
    return tuple(map(comparable, value.shape)) if isinstance(value, torch.Tensor) else None


def _applied(node: torch.fx.Node, size: float) -> float | None:
    """Return the result of the op of `node` if the number `size` replaces its only tensor; None if the op cannot run on a number."""
    number = torch.tensor([size], device="cpu")
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda _: number)
    try:
        with torch.no_grad():
            made = getattr(number, node.target)(*args[1:], **kwargs) if isinstance(node.target, str) else node.target(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError):
        return None
    return float(made) if isinstance(made, torch.Tensor) and made.numel() == 1 and bool(made.isfinite()) else None


def _elements(node: torch.fx.Node) -> Any:
    value = example_value(node)
    return comparable(value.numel()) if isinstance(value, torch.Tensor) else None


def _dims(node: torch.fx.Node) -> int:
    """Return the number of dims of `node` whose size is symbolic or above 1."""
    return sum(not isinstance(size, int) or size > 1 for size in _shape_of(node) or ())
