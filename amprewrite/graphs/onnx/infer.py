"""Infer types and shapes that a model does not declare, by onnx's inference and by the schemas of ops. All are marked as guesses."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import onnx
import onnx_ir as ir

from amprewrite.graphs.onnx.guesses import forget_guesses, guess, guessed
from amprewrite.graphs.onnx.ops import fill_types
from amprewrite.tables.errors import one_line
from amprewrite.tables.ops.onnx_names import FLOW

HOLLOW = 1024
"""Initialisers with this many elements or more are no shapes or axes, so type inference does not need their values."""


def infer_types(model: ir.Model) -> list[str]:
    """Infer missing types and shapes of the top graph, as guesses. Returns a list with a note if that fails, otherwise [].

    `read/reader.py` infers the types in bodies (subgraphs).
    """
    missing = [v for node in model.graph if node.op_type not in FLOW for v in node.outputs if v.name and v.type is None]
    if not missing:
        return []
    try:
        inferred = onnx.shape_inference.infer_shapes(_hollow(model))
    except Exception as error:
        return [f"onnx could not infer types, so ops that read such values stay fp32: {one_line(error)}"]
    _take(missing, inferred.graph)
    for node in model.graph:  # onnx's inference stops at ops that it does not know; schemas may give the types of later results
        if node.op_type not in FLOW:
            fill_types(node, model.opset_imports[""])
    return []


@contextlib.contextmanager
def all_types(model: ir.Model) -> Iterator[None]:
    """Context manager that infers the types of all values where possible, also in subgraphs. It removes these guesses at its end."""
    known = set(guessed(model))
    try:
        with contextlib.suppress(Exception):  # ignored, because the schemas below may give the types all the same
            _take_all(model.graph, onnx.shape_inference.infer_shapes(_hollow(model)).graph)
        for graph in model.graphs():
            for node in graph:
                fill_types(node, model.opset_imports[""])
        yield
    finally:
        forget_guesses(model, but=known)


def _take_all(graph: ir.Graph, inferred: onnx.GraphProto) -> None:
    """Guess the missing types of a graph and its bodies from `inferred`, a protobuf with the same nodes in the same order."""
    _take([value for node in graph for value in node.outputs if value.name and value.type is None], inferred)
    for node, written in zip(graph, inferred.node, strict=True):
        for attribute in written.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _take_all(node.attributes[attribute.name].as_graph(), attribute.g)


def _take(missing: list[ir.Value], inferred: onnx.GraphProto) -> None:
    """Give each value of `missing` the type and shape that `inferred` has for its name, as guesses."""
    by_name = {str(value.name): value for value in missing}
    for info in inferred.value_info:
        value, found = by_name.get(info.name), info.type.tensor_type
        if value is None or not found.elem_type:
            continue
        dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in found.shape.dim]
        guess(value, ir.TensorType(ir.DataType(found.elem_type)), ir.Shape(dims) if found.HasField("shape") else None)


def _hollow(model: ir.Model) -> onnx.ModelProto:
    """Return a protobuf of the model in which large weights are inputs, because type inference would copy them."""
    proto = ir.to_proto(model)
    graph = proto.graph
    small = []
    for tensor in graph.initializer:
        if math.prod(tensor.dims) < HOLLOW:
            small.append(tensor)
        else:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    kept = onnx.GraphProto()
    kept.initializer.extend(small)
    del graph.initializer[:]
    graph.initializer.extend(kept.initializer)
    return proto
