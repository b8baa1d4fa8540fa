"""Read evidence for passes from an ONNX graph: constants with an offset, and products whose operands may be quantised.

A constant has an offset if the common part of its values is larger than the differences. A product of rows and a constant matrix is a
`MatMul` or `Gemm`, the only ops with special code here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from amprewrite.graphs.onnx.ops import constant_tensor, format_of
from amprewrite.graphs.onnx.read.reader import OnnxReading
from amprewrite.ir.evidence.matrix_products import MatrixProduct
from amprewrite.ir.evidence.range_rules import has_offset, rows_have_offset, summands, tables
from amprewrite.tables.formats import FP32

FACTORS = {"alpha": 1.0, "beta": 1.0, "transA": 0}
"""Attributes of Gemm that change the product, each with the value that leaves the product unchanged."""


def read_offsets(reading: OnnxReading) -> frozenset[str]:
    """Return the names of the fp32 constants that have an offset and are added to a value, and of the tables whose rows share an offset."""
    added, looked_up = summands(reading.graph), tables(reading.graph)
    found = {name for name, values in _values(reading, added) if values.size > 1 and has_offset(values, added[name])}
    rows = ((name, values) for name, values in _values(reading, looked_up) if values.ndim > 1)
    return frozenset(found | {name for name, values in rows if rows_have_offset(values)})


def _values(reading: OnnxReading, names: Iterable[str]) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Return (name, values) of each fp32 constant among the op-graph nodes `names`. Empty constants are left out."""
    held = ((name, reading.values[name]) for name in names if name in reading.values)
    constants = ((name, constant_tensor(value)) for name, value in held if format_of(value) == FP32.name)
    return [(name, tensor.numpy()) for name, tensor in constants if tensor is not None and tensor.size]


def read_matrix_products(reading: OnnxReading) -> dict[str, MatrixProduct]:
    """Return {name: product} for the MatMul and Gemm nodes with a constant matrix.

    Operands are marked as trained, so that passes decide as in training.
    """
    found: dict[str, MatrixProduct] = {}
    for name, node in reading.nodes.items():
        read = {slot.index: value for (reader, value), slots in reading.slots.items() if reader == name for slot in slots}
        factors = any(key in node.attributes and node.attributes[key].value != plain for key, plain in FACTORS.items())
        if node.op_type not in ("MatMul", "Gemm") or node.domain or factors or not {0, 1} <= read.keys():
            continue
        x, w = reading.graph[read[0]], reading.values[read[1]]
        if len(x.shape) < 2 or constant_tensor(w) is None or w.shape is None or w.shape.rank() != 2:
            continue
        straight = bool(node.attributes.get_int("transB", 0))
        columns, inner = w.shape.numpy() if straight else reversed(w.shape.numpy())
        found[name] = MatrixProduct(
            read[0], read[1], 0, 0, x.numel // max(inner, 1), inner, columns, x_learns=True, w_learns=True, transposed=not straight
        )
    return found
