"""Infer types and shapes that a model does not declare, by onnx's inference and by the schemas of ops. All are marked as guesses."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator

import onnx
import onnx_ir as ir

from amprewrite.graphs.onnx.guesses import forget_guesses, guess, guessed
from amprewrite.graphs.onnx.ops import fill_operand_types, fill_types
from amprewrite.tables.errors import one_line
from amprewrite.tables.ops.onnx_names import FLOW

HOLLOW = 1024
"""Initialisers with this many elements or more are no shapes or axes, so type inference does not need their values."""


def infer_types(model: ir.Model) -> list[str]:
    """Infer missing types and shapes of the top graph, as guesses. Returns a list with a note if that fails, otherwise [].

    Schemas give types where onnx's inference stops, at ops that it does not know: from operands to results, and from results to operands.
    `read/reader.py` infers the types in bodies (subgraphs).
    """
    nodes = [node for node in model.graph if node.op_type not in FLOW]
    if all(value.type is not None for node in nodes for value in node.outputs if value.name):
        return []
    try:
        _take(nodes, _inferred(model))
    except Exception as error:
        return [f"onnx could not infer types, so ops that read such values stay fp32: {one_line(error)}"]
    opset = model.opset_imports[""]
    for fill, order in ((fill_types, nodes), (fill_operand_types, nodes[::-1]), (fill_types, nodes)):
        for node in order:
            fill(node, opset)
    return []


@contextlib.contextmanager
def all_types(model: ir.Model) -> Iterator[None]:
    """Context manager that infers the types of all values where possible, also in subgraphs. It removes these guesses at its end."""
    known = set(guessed(model))
    try:
        with contextlib.suppress(Exception):  # ignored, because the schemas below may give the types all the same
            _take_all(model.graph, _inferred(model))
        for graph in model.graphs():
            for node in graph:
                fill_types(node, model.opset_imports[""])
        yield
    finally:
        forget_guesses(model, but=known)


def _take_all(graph: ir.Graph, inferred: onnx.GraphProto) -> None:
    """Guess the missing types of a graph and its bodies from `inferred`, a protobuf with the same nodes in the same order."""
    _take(graph, inferred)
    for node, written in zip(graph, inferred.node, strict=True):
        for attribute in written.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _take_all(node.attributes[attribute.name].as_graph(), attribute.g)


def _take(nodes: Iterable[ir.Node], inferred: onnx.GraphProto) -> None:
    """Give the results of `nodes` without a type the types and shapes that `inferred` has for their names, as guesses."""
    missing = {value.name: value for node in nodes for value in node.outputs if value.name and value.type is None}
    for info in inferred.value_info:
        if info.name in missing and info.type.tensor_type.elem_type:
            told = ir.from_proto(info)
            guess(missing[info.name], told.type, told.shape)


def _inferred(model: ir.Model) -> onnx.GraphProto:
    """Return the graph with the types that onnx infers. Large weights are inputs of this graph, because onnx would copy them."""
    proto = ir.to_proto(model)
    held = proto.graph.initializer
    for place in reversed(range(len(held))):
        if math.prod(held[place].dims) >= HOLLOW:
            tensor = held.pop(place)
            proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return onnx.shape_inference.infer_shapes(proto).graph
