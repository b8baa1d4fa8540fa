"""Find the constants with an offset in an ONNX file: the common part of their values is larger than the differences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from amprewrite.graphs.onnx.ops import constant_tensor, format_of
from amprewrite.graphs.onnx.read.reader import OnnxReading
from amprewrite.ir.evidence.range_rules import has_offset, rows_have_offset, summands, tables
from amprewrite.tables.formats import FP32


def read_offsets(reading: OnnxReading) -> frozenset[str]:
    """Return the names of fp32 constants with an offset that are added to a value, and of tables whose rows have a common offset."""
    added, looked_up = summands(reading.graph), tables(reading.graph)
    found = {name for name, values in _values(reading, added) if values.size > 1 and has_offset(values, added[name])}
    rows = ((name, values) for name, values in _values(reading, looked_up) if values.ndim > 1)
    return frozenset(found | {name for name, values in rows if rows_have_offset(values)})


def _values(reading: OnnxReading, names: Iterable[str]) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Return (name, values) of each fp32 constant among the op-graph nodes `names`. Empty constants are left out."""
    held = ((name, reading.values[name]) for name in names if name in reading.values)
    constants = ((name, constant_tensor(value)) for name, value in held if format_of(value) == FP32.name)
    return [(name, tensor.numpy()) for name, tensor in constants if tensor is not None and tensor.size]
