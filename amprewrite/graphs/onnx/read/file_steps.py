"""Find the sums of an ONNX file that change one value in many small steps: `x = x + 0.1 * f(x)`, unrolled or in the body of a loop.

A factor (0.1 here) is a constant or a schedule. A constant varies along one dim at most, such as a LayerScale, and counts by its root mean
square. A schedule is a value of one element that no product made.

This file has special code for linear ops (`add`, `sub`, `mul`, `div`, `neg`), and for `loop` and `scan`, where a body begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx_ir as ir

from amprewrite.graphs.onnx.ops import constant_tensor
from amprewrite.graphs.onnx.read.reader import OnnxReading
from amprewrite.graphs.step_search import Factor, SmallSteps
from amprewrite.ir.op_graph import OpNode
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import OpKind

LINEAR = ops_with(Trait.LINEAR_IN_FIRST, Trait.BOUNDS)
"""Ops that count as only moving or bounding the elements of their first operand, if the result has as many elements."""
RANDOM = ops_with(Trait.RANDOM)
SUMS = ops_with(Trait.ADDS_UP)
BODIES = ("loop", "scan")


def read_small_steps(reading: OnnxReading) -> tuple[str, ...]:
    """Return the sums that change one value in many small steps, and the ops that scale or copy the value between these sums.

    Each step contains a product.
    """
    steps = _OnnxSteps(reading)
    kept = steps.found(lambda name: reading.graph[name].op in SUMS and len(steps.given(name)) == 2, steps.is_state)
    return tuple(node.name for node in reading.graph if node.name in kept)


class _OnnxSteps(SmallSteps[str]):
    """Finds the sums of one file that change a value in many small steps, by the names of op-graph nodes."""

    def __init__(self, reading: OnnxReading) -> None:
        self.graph, self.nodes = reading.graph, reading.nodes
        self.order = self.graph.rank
        self.names = {value: name for name, value in reading.values.items()}
        # the kind counts as well, because FLOPs are 0 for unknown shapes
        self.heavy = {node.name for node in self.graph if node.flops or node.kind is OpKind.ALLOW}
        self.exact = set[str]()
        for node in self.graph:
            if self._is_exact(node):
                self.exact.add(node.name)

    def is_state(self, name: str) -> bool:
        """True if a value is the state that a loop passes from one iteration to the next."""
        node = self.graph[name]
        return node.op in BODIES and bool(node.precision_group)

    def inputs(self, node: str) -> Iterable[str]:
        return (operand.value for operand in self.graph[node].operands)

    def shape(self, node: str) -> tuple[object, ...] | None:
        return self.graph[node].shape

    def given(self, name: str) -> list[ir.Value]:
        """Return the operands of the op `name`; [] if it is no op of the file, or a `loop` or `scan`, where a subgraph begins or ends."""
        node = self.graph[name]
        if node.role != "op" or node.op in BODIES or name not in self.nodes:
            return []
        return [value for value in self.nodes[name].inputs if value is not None]

    def terms(self, node: str) -> dict[str, Factor]:
        op, given = self.graph[node].op, self.given(node)
        parts: list[tuple[ir.Value, Factor | None]] = []
        if op in SUMS and len(given) == 2:
            parts = [(given[0], Factor()), (given[1], Factor(-1.0 if op == "sub" else 1.0))]
        elif op == "neg":
            parts = [(given[0], Factor(-1.0))]
        elif op == "mul" and len(given) == 2:
            factor = self._factor(given[1])
            parts = [(given[0], factor)] if factor is not None else [(given[1], self._factor(given[0]))]
        elif op == "div":
            parts = [(given[0], self._factor(given[1], "divided by"))]
        elif op in LINEAR and given and self.only(node) == self.names.get(given[0]):
            parts = [(given[0], Factor())]
        found: dict[str, Factor] = {}
        for value, times in parts:
            name = self.names.get(value)
            if times is None:
                return {}
            if name is not None and constant_tensor(value) is None:
                found[name] = found[name] + times if name in found else times
        return found

    def only(self, node: str) -> str | None:
        given = {self.names[value] for value in self.given(node) if value in self.names and constant_tensor(value) is None}
        if len(given) > 1 and node not in self.heavy:
            given = {each for each in given if not self._is_schedule(each)}
        return given.pop() if len(given) == 1 and node not in self.heavy else None

    def _factor(self, value: ir.Value, how: str = "") -> Factor | None:
        """Return the factor of a constant or a schedule; None for any other value. `how` is "divided by" for a divisor, otherwise ""."""
        tensor = constant_tensor(value)
        if tensor is not None:
            number = _size(tensor.numpy()) if sum(size > 1 for size in tensor.shape.numpy()) <= 1 and tensor.size else None
            return None if number is None or (how and not number) else Factor(1.0 / number if how else number)
        name = self.names.get(value, "")
        return Factor(1.0, frozenset([(name, how)])) if name and self._is_schedule(name) else None

    def _is_exact(self, node: OpNode) -> bool:
        """True if a value is computed without products, random ops and loops."""
        if node.role != "op":
            return node.role != "output"
        if node.name in self.heavy or node.op in RANDOM or node.op in BODIES:
            return False
        return all(operand.value in self.exact for operand in node.operands)

    def _is_schedule(self, name: str) -> bool:
        """True if a value has one element and is made without products."""
        return name in self.exact and all(size == 1 for size in self.graph[name].shape)


def _size(values: np.ndarray[Any, Any]) -> float:
    """Return the root mean square of numbers, with the sign of their mean."""
    return math.copysign(float(np.sqrt(np.square(values.astype(np.float64)).mean())), float(values.mean()))
