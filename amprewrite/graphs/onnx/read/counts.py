"""Find the matrix products of an ONNX file in which a low format would round positions, lengths or steps (`ir/evidence/counts.py`).

Constants are judged by their values, weights as well, because a file does not say which of them were learnt. This file has special code for
`OneHot`, which the vocabulary maps to a scatter.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from amprewrite.graphs.onnx.ops import bodies, constant_tensor, format_of, op_of
from amprewrite.graphs.onnx.read.reader import OnnxReading
from amprewrite.graphs.onnx.run.samples import elements
from amprewrite.ir.evidence.counts import FRACTIONS, Count, keep_counts, made_of, most_exact
from amprewrite.ir.op_graph import OpGraph, OpNode
from amprewrite.tables.formats import Format


def with_counts(reading: OnnxReading, model: ir.Model, low: Format) -> OpGraph:
    """Return the op graph of `reading` with a mark (`OpNode.counted`) on each matrix product in which `low` would round whole numbers.

    Such numbers are positions, lengths, indices and time steps: rounded to a low format, neighbouring numbers become equal. A marked
    product runs in fp32.
    """
    if not any(node.flops for node in reading.graph):
        return reading.graph
    found = dict[ir.Value, Count]()
    for value in model.graph.inputs:
        found[value] = _entering(value, low)
    for node in model.graph.all_nodes():
        given = [_read(value, found, low) for value in node.inputs if value is not None]
        numbers = [number for value in node.inputs if value is not None for number in _number(value)]
        op = "one_hot" if node.op_type == "OneHot" else op_of(node)
        for body in bodies(node):
            found |= {value: _entering(value, low) for value in body.inputs}
        found |= {value: made_of(op, format_of(value), given, numbers, low) for value in node.outputs}
    counts = {name: _read(value, found, low) for name, value in reading.values.items()}

    def summed(node: OpNode) -> int:
        return node.flops // (2 * max(elements(reading.values[node.name]), 1)) if node.name in reading.values else 0

    return keep_counts(reading.graph, counts, summed)


def _entering(value: ir.Value, low: Format) -> Count:
    """Return the `Count` of an input of a graph or body: NOT if its dtype has fractions or is unknown, otherwise WHOLE or LARGE.

    Booleans and integers of at most 8 bits are WHOLE. Wider integers are LARGE, because they may be positions of any magnitude.
    """
    dtype = format_of(value)
    return Count.NOT if dtype.startswith(FRACTIONS) or not dtype else made_of("", dtype, (), (), low)


def _read(value: ir.Value, found: dict[ir.Value, Count], low: Format) -> Count:
    """Return the `Count` of a value that a node reads: from `found`, or for a constant from its values, and store it in `found`.

    Any other value is NOT a count.
    """
    if value not in found:
        held = constant_tensor(value)
        numbers = np.zeros(0) if held is None or held.dtype.is_string() else np.asarray(held.numpy(), np.float64)
        whole = numbers.size > 0 and np.array_equal(numbers, np.round(numbers))
        beyond = whole and np.abs(numbers).max() > most_exact(low)
        found[value] = Count.NOT if held is None else Count.LARGE if beyond else Count.WHOLE if whole else Count.SMALL
    return found[value]


def _number(value: ir.Value) -> Iterator[float]:
    """Yield the number that a constant of one element holds; nothing for any other value."""
    held = constant_tensor(value)
    if held is not None and held.size == 1 and not held.dtype.is_string():
        yield float(held.numpy().reshape(-1)[0])
