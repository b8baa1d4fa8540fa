"""The strict interpreter for ONNX files: every op computes in fp32, and each low result is really rounded.

ONNX Runtime's CPU provider runs chains of fp16 ops in fp32 and drops the casts between them, so its outputs hide rounding and
overflow; for bf16 it has hardly any kernels at all. Here the file itself is made explicit:

1. Low constants become fp32 constants of the same values, low inputs and outputs fp32 ones.
2. Behind every low result stand a cast down and a cast up.
3. ONNX Runtime runs that, unoptimised, so that nothing is fused away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from amprewrite.onnx_ops import format_of
from amprewrite.onnx_samples import Feed, session

LOW = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
_CARRIES = {"Constant", "If", "Loop", "Scan", "Identity", "Reshape", "Transpose"}
"""Ops that round nothing."""


def strict_outputs(model: ir.Model, feeds: Sequence[Feed]) -> list[list[np.ndarray]]:
    """Outputs of the rewritten model under true rounding, one list a feed."""
    runner = session(ir.to_proto(strict_model(model)), 0)
    floats = {str(v.name) for v in model.graph.inputs if format_of(v) in LOW}
    return [runner.run(None, {k: a.astype(np.float32) if k in floats else a for k, a in feed.items()}) for feed in feeds]


def strict_model(model: ir.Model) -> ir.Model:
    """An all-fp32 model that rounds as the low one would."""
    strict = model.clone()
    for graph in strict.graphs():
        for value in (*graph.inputs, *graph.initializers.values()):
            _raise_value(value)
        for node in list(graph):
            for attribute in list(node.attributes.values()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in LOW.values():
                    node.attributes[attribute.name] = ir.AttrTensor(attribute.name, _raised(attribute.as_tensor()))
            for value in node.outputs:
                low = format_of(value)
                if low not in LOW:
                    continue
                value.type = ir.TensorType(ir.DataType.FLOAT)
                if node.op_type == "Cast":
                    node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
                if node.op_type not in _CARRIES:
                    _round(graph, node, value, LOW[low])
    return strict


def _raise_value(value: ir.Value) -> None:
    if format_of(value) in LOW:
        value.type = ir.TensorType(ir.DataType.FLOAT)
        if value.const_value is not None:
            value.const_value = _raised(value.const_value)


def _raised(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(np.ascontiguousarray(tensor.numpy().astype(np.float32)), name=tensor.name)


def _round(graph: ir.Graph, node: ir.Node, value: ir.Value, low: ir.DataType) -> None:
    down = ir.node("Cast", [value], {"to": int(low)})
    up = ir.node("Cast", [down.outputs[0]], {"to": int(ir.DataType.FLOAT)})
    down.outputs[0].name, up.outputs[0].name = f"{value.name}__down", f"{value.name}__up"
    up.outputs[0].type, up.outputs[0].shape = value.type, value.shape
    for use in list(value.uses()):
        if use.node is not down:
            use.node.replace_input_with(use.idx, up.outputs[0])
    if value.is_graph_output():
        for index, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[index] = up.outputs[0]
        value.name, up.outputs[0].name = f"{value.name}__raw", value.name
    graph.insert_after(node, [down, up])


def relative_error(wanted: Sequence[Sequence[np.ndarray]], got: Sequence[Sequence[np.ndarray]]) -> float:
    """Relative L2 error of all floating outputs together; infinite where a value is not finite that should be."""
    error = size = 0.0
    for wants, gots in zip(wanted, got, strict=True):
        for want, have in zip(wants, gots, strict=True):
            if want.dtype.kind != "f":
                continue
            left, right = want.astype(np.float64), have.astype(np.float64)
            same = np.isfinite(left)
            if not np.isfinite(right[same]).all():
                return float("inf")
            error += float(((left - right)[same] ** 2).sum())
            size += float((left[same] ** 2).sum())
    return (error / size) ** 0.5 if size else error**0.5
