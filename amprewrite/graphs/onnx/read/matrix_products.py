"""Find the products of rows and a constant matrix in an ONNX graph. The operands of these products may be quantised.

Only `MatMul` and `Gemm` are such products.
"""

from __future__ import annotations

from amprewrite.graphs.onnx.ops import constant_tensor
from amprewrite.graphs.onnx.read.reader import OnnxReading
from amprewrite.ir.evidence.matrix_products import MatrixProduct

FACTORS = {"alpha": 1.0, "beta": 1.0, "transA": 0}
"""Attributes of Gemm that change the product, each with the value that leaves the product unchanged."""


def read_matrix_products(reading: OnnxReading) -> dict[str, MatrixProduct]:
    """Return {name: product} for MatMul and Gemm nodes with a constant matrix. Operands count as trained: passes decide as in training."""
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
