"""Read the summands of ops such as `add` and `lerp`, each with its factor: `add(x, y, alpha=0.1)` has the summands x (1.0) and y (0.1).

The pass `repaint-small-steps` finds samplers and solvers by these factors. They take many small steps: each step adds a small multiple of
`f(x)` to x. A factor is a number or a tensor of one of three kinds. For the number of its dims, dims of size 1 do not count.

1. A schedule holds step sizes, such as `sigmas[i + 1] - sigmas[i]` or `alphas[t].sqrt()`. It has at most one dim, and fewer dims than the
   result of the op that uses it. It is computed from buffers, inputs and constants, without matrix products. A value computed from random
   draws or booleans (stochastic depth, padding) is no schedule, because such values scale residual streams, which take large steps.
2. A learnt factor is computed from parameters (LayerScale, ReZero, a learnt step) and has at most one dim. Its size is its root mean
   square, which is known at capture. A learnt factor of unknown size counts as small.
3. Noise has any number of dims. It is drawn from a normal distribution, is a floating input, or is computed from these alone. A stochastic
   solver multiplies the result of a network by noise. A value computed from integers is no noise, because it may be a mask.

The numbers of schedules and noise are known only when the graph runs, so both count as small. An input may count as a schedule or as noise.

This file has special code for `div`, which is not linear if it has a rounding mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import comparable, example_value, is_opaque
from amprewrite.ir.evidence.summands import Factor, Summands, summands
from amprewrite.ir.op_graph import OpGraph
from amprewrite.tables.ops.op_lists import Trait, find_op, op_name, ops_with
from amprewrite.tables.vocabulary import OpKind

OPERANDS = ("other", "end", "tensor1", "tensor2", "weight")
"""Keywords for the operands after the first of `add`, `sub`, `mul`, `div`, `addcmul`, `addcdiv` and `lerp`, in the operands' order."""
RANDOM, NORMAL, FACTORS = ops_with(Trait.RANDOM), ops_with(Trait.DRAWS_NORMAL), ops_with(Trait.SCALES)


def read_summands(graph: OpGraph, nodes: Mapping[str, torch.fx.Node], sizes: Mapping[str, float]) -> dict[str, Summands]:
    """Return {name of an op such as `add`, `mul` or `lerp`: {name of a value that it adds up: its factor}}.

    `sizes` has the size of each parameter that may scale a value, as LayerScale does: its root mean square, with the sign of its mean.
    """
    factors = _Factors(graph, nodes, sizes)
    return {name: found for name, node in nodes.items() if (found := factors.summands(node))}


class _Factors:
    """Finds the values of one fx graph that may be factors of a summand, such as `step` in `x + step * y`."""

    def __init__(self, graph: OpGraph, nodes: Mapping[str, torch.fx.Node], sizes: Mapping[str, float]) -> None:
        self.names = {node: name for name, node in nodes.items()}
        self.sizes = sizes
        self.heavy = {node for name, node in nodes.items() if graph[name].flops}
        self.exact, self.learnt, self.noise = set[torch.fx.Node](), set[torch.fx.Node](), set[torch.fx.Node]()
        for name, node in nodes.items():
            self._read(node, graph[name].role)

    def summands(self, node: torch.fx.Node) -> Summands:
        op = op_name(node.target) if node.op.startswith("call") else ""
        if op == "div" and "rounding_mode" in node.kwargs:
            return {}
        given = [*node.args, *(node.kwargs[name] for name in OPERANDS if name in node.kwargs)]
        scale = node.kwargs.get("alpha", node.kwargs.get("value", 1.0))
        return summands(op, given, lambda each, how: self._factor(each, node, how), self._name, scale)

    def _name(self, given: Any) -> str:
        tensor = isinstance(given, torch.fx.Node) and isinstance(example_value(given), torch.Tensor)
        return self.names.get(given, "") if tensor else ""

    def _factor(self, given: Any, node: torch.fx.Node, how: str = "") -> Factor | None:
        """Return the argument `given` of the op `node` as a `Factor`; None if it cannot be one.

        A factor is a number, a schedule (step sizes of a sampler), a learnt factor such as LayerScale, or noise. `how` is "" if the op
        multiplies by the factor, "divided by" if it divides by the factor, "rest" if it multiplies by 1 minus the factor, as `lerp` does.
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
        """Return the root mean square of a learnt factor, or of a value computed from one, with the sign of its mean; None if unknown."""
        if node in self.names and self.names[node] in self.sizes:
            return self.sizes[self.names[node]]
        given = [each for each in node.all_input_nodes if isinstance(example_value(each), torch.Tensor)]
        row = find_op(op_name(node.target)) if node.op.startswith("call") else None
        size = self._size(given[0]) if len(given) == 1 and given[0] in self.learnt else None
        if row is None or size is None:
            return None
        made = _applied(node, size) if row.kind is OpKind.CLEAR or _elements(node) == _elements(given[0]) else None
        return size if made is None and row.kind is OpKind.CLEAR else made

    def _read(self, node: torch.fx.Node, role: str) -> None:
        """Add `node` to the sets `exact`, `learnt` and `noise` if it belongs there. `role` is, for example, "input", "parameter" or "op".

        `exact`: values that may be schedules (step sizes). These are buffers, constants, inputs without gradients, and values computed only
        from these or from numbers. `learnt`: parameters, and values computed from parameters and exact values. `noise`: draws from a normal
        distribution, floating inputs without gradients, and values computed from these alone. Booleans, results of matrix products and
        convolutions, and other random draws are in no set.
        """
        value, op = example_value(node), op_name(node.target)
        if role == "output" or not isinstance(value, torch.Tensor):
            return
        feeders = node.all_input_nodes
        given = [each for each in feeders if isinstance(example_value(each), torch.Tensor)]
        computed = node not in self.heavy and op not in RANDOM and not is_opaque(node)
        if value.is_floating_point():
            free = role == "input" and not value.requires_grad
            made = op in NORMAL or (computed and bool(feeders) and self.noise.issuperset(given))
            if made if role == "op" else free:
                self.noise.add(node)
        free = role != "parameter" and not value.requires_grad
        if value.dtype != torch.bool and (computed and self.exact.issuperset(given) if role == "op" else free):
            self.exact.add(node)
        elif role == "parameter" or (computed and given and value.dtype != torch.bool and (self.exact | self.learnt).issuperset(given)):
            self.learnt.add(node)

    def _is_schedule(self, node: torch.fx.Node, beside: torch.fx.Node) -> bool:
        """True if `node`, an operand of the op `beside`, may be a step size, such as `step` in `x + step * y`.

        It must have one dim at most, and fewer dims than the result of `beside`; dims of size 1 do not count. It must also be computed
        without parameters (`self.exact`), or be a learnt factor (`self.learnt`) of a `mul` or `div`.
        """
        scales = node in self.exact or (node in self.learnt and op_name(beside.target) in FACTORS)
        return scales and _dims(node) <= 1 and _dims(node) < _dims(beside)


def _applied(node: torch.fx.Node, size: float) -> float | None:
    """Run the op of `node` on the number `size` in place of its tensor. Return the result; None if it fails, or is no finite number."""
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
    value = example_value(node)
    return sum(not isinstance(size, int) or size > 1 for size in value.shape) if isinstance(value, torch.Tensor) else 0
