"""Read the summands of the linear ops of an ONNX file, each with its factor: a constant or a schedule.

A constant varies along one dim at most, such as a LayerScale, and counts by its root mean square. A schedule is a value of one element that
no product made.

This file has special code for `loop` and `scan`, which begin a body.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from amprewrite.graphs.onnx.ops import constant_tensor
from amprewrite.graphs.onnx.read.reader import OnnxReading
from amprewrite.ir.evidence.summands import Factor, Summands, summands
from amprewrite.ir.op_graph import OpNode
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import OpKind

RANDOM = ops_with(Trait.RANDOM)
BODIES = ("loop", "scan")


def read_repeated(reading: OnnxReading) -> frozenset[str]:
    """Return the names of the values that a loop or scan passes from one iteration to the next."""
    return frozenset(node.name for node in reading.graph if node.op in BODIES and node.precision_group)


def read_summands(reading: OnnxReading) -> dict[str, Summands]:
    """Return {name of a linear op: the values that it adds up, each with its factor}."""
    names = {value: name for name, value in reading.values.items()}
    exact, found = set[str](), dict[str, Summands]()

    def name_of(value: ir.Value) -> str:
        return names.get(value, "") if constant_tensor(value) is None else ""

    def factor(given: Any, how: str) -> Factor | None:
        """Return the factor of a number, constant or schedule; None for any other value. `how` is "divided by" for a divisor, or ""."""
        tensor = constant_tensor(given) if isinstance(given, ir.Value) else None
        if tensor is not None:
            given = _size(tensor.numpy()) if sum(size > 1 for size in tensor.shape.numpy()) <= 1 and tensor.size else None
        if not isinstance(given, ir.Value):
            return None if given is None or (how and not given) else Factor(1.0 / given if how else given)
        name = names.get(given, "")
        schedule = name in exact and all(size == 1 for size in reading.graph[name].shape)
        return Factor(1.0, frozenset([(name, how)])) if schedule else None

    for node in reading.graph:
        if _is_exact(node, exact):
            exact.add(node.name)
        given = [each for each in reading.nodes[node.name].inputs if each is not None] if node.name in reading.nodes else []
        if node.role == "op" and node.op not in BODIES and (parts := summands(node.op, given, factor, name_of)):
            found[node.name] = parts
    return found


def _is_exact(node: OpNode, exact: set[str]) -> bool:
    """True if a value is computed without products, random ops and loops. `exact` names the values upstream for which this is true."""
    if node.role != "op":
        return node.role != "output"
    if node.flops or node.kind is OpKind.ALLOW or node.op in RANDOM or node.op in BODIES:  # FLOPs of unknown shapes are 0: ask the kind
        return False
    return all(operand.value in exact for operand in node.operands)


def _size(values: np.ndarray[Any, Any]) -> float:
    """Return the root mean square of numbers, with the sign of their mean."""
    return math.copysign(float(np.sqrt(np.square(values.astype(np.float64)).mean())), float(values.mean()))
