"""What comes in: ONNX models read from anywhere, and made ready for the passes.

1. Read a path, a protobuf or an onnx_ir model; refuse what is broken, incomplete or too old.
2. Inline local functions; turn initialisers that are inputs, too, into constants.
3. Fill in missing types; raise the opset where listed ops take the low format only at a later one.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as ir_passes

from amprewrite.colour import OpKind
from amprewrite.errors import CaptureError, PolicyError, one_line
from amprewrite.formats import Format
from amprewrite.onnx_ops import FLOW, OLDEST, fill_types, format_of, op_of, opset_taking
from amprewrite.onnx_run import is_large
from amprewrite.oplists import OpLists

Source = str | Path | onnx.ModelProto | ir.Model
HOLLOW = 1024
"""Elements from which on an initialiser is no shape or axis, so that type inference need not see it."""


def load(source: Source) -> ir.Model:
    """A copy of the model to work on. CaptureError for what is no ONNX model, or lacks its external data."""
    if isinstance(source, ir.Model):
        return source.clone()
    if not isinstance(source, onnx.ModelProto | str | Path):
        raise PolicyError(f"rewrite_onnx takes a path, a ModelProto or an onnx_ir.Model, not {type(source).__name__}")
    name = "the model" if isinstance(source, onnx.ModelProto) else str(source)
    try:
        model = ir.from_proto(copy.deepcopy(source)) if isinstance(source, onnx.ModelProto) else ir.load(source)
    except FileNotFoundError as error:
        raise CaptureError(f"there is no file {source}; check the path") from error
    except OSError as error:
        raise CaptureError(f"{name} cannot be read: {one_line(error)}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {one_line(error)}"
        raise CaptureError(f"{name} is no ONNX model, or a truncated one ({said}); export it again") from error
    if model.graph is None or not len(model.graph.outputs):
        raise CaptureError(f"{name} holds no ONNX graph with outputs; export it again")
    _check_external(model, name)
    return model


def _check_external(model: ir.Model, name: str) -> None:
    """All external data must be there, and whole. What fits is read now, so that the model depends on no file."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            held = value.const_value
            if held is None:
                raise CaptureError(f"{name}: initialiser {value.name} holds no data; export it again")
            if not isinstance(held, ir.ExternalTensor):
                continue
            where = f"{name}: the data of {value.name} is"
            path = Path(held.path)
            if not path.is_file():
                raise CaptureError(f"{where} missing: there is no {path}; put it beside the model")
            length = held.nbytes if held.length is None else held.length
            if (held.offset or 0) + length > path.stat().st_size:
                raise CaptureError(f"{where} cut off: {path} ends before it; copy the file again")
    if not is_large(model):
        ir.external_data.load_to_model(model)


def make_ready(model: ir.Model, low: Format, lists: OpLists) -> tuple[ir.Model, list[str]]:
    """The model as the passes take it, and notes on what was done to it. CaptureError for opsets that are too old."""
    notes: list[str] = []
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    if opset < OLDEST:
        remedy = "raise it with onnx.version_converter.convert_version"
        raise CaptureError(f"the model is of opset {opset}, older than {OLDEST}; {remedy}")
    model.opset_imports[""] = opset
    if model.functions:
        notes.append(f"{len(model.functions)} local functions were inlined")
        ir_passes.InlinePass()(model)
    if any(value.is_graph_input() for value in model.graph.initializers.values()):
        ir_passes.RemoveInitializersFromInputsPass()(model)
        model.ir_version = max(model.ir_version, 4)
        notes.append("initialisers that were inputs, too, are constants now")
    notes += infer_types(model)
    model, more = raise_opset(model, low, lists)
    notes += more
    if not any(format_of(v) == "fp32" for g in model.graphs() for n in g for v in n.outputs):
        notes.append("no value of the model is fp32: there is nothing to rewrite")
    return model, notes


def infer_types(model: ir.Model) -> list[str]:
    """Fill in missing types and shapes of the top graph; the reader works out those of bodies. Notes on failure."""
    plain = (node for node in model.graph if node.op_type not in FLOW)  # what a body gives, the reader sees itself
    missing = {str(v.name): v for node in plain for v in node.outputs if v.name and v.type is None}
    if not missing:
        return []
    try:
        inferred = onnx.shape_inference.infer_shapes(_hollow(model))
    except Exception as error:
        return [f"onnx could not infer types, so ops that read such values stay fp32: {one_line(error)}"]
    for info in inferred.graph.value_info:
        value, found = missing.get(info.name), info.type.tensor_type
        if value is None or not found.elem_type:
            continue
        value.type = ir.TensorType(ir.DataType(found.elem_type))
        if found.HasField("shape"):
            dims = found.shape.dim
            value.shape = ir.Shape([d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims])
    for node in model.graph:  # behind ops that onnx does not know
        if node.op_type not in FLOW:
            fill_types(node, model.opset_imports[""])
    return []


def _hollow(model: ir.Model) -> onnx.ModelProto:
    """The model as a protobuf whose larger weights are inputs: type inference would copy them."""
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


def raise_opset(model: ir.Model, low: Format, lists: OpLists) -> tuple[ir.Model, list[str]]:
    """The model at the opset at which all listed ops of it take the low format, as far as there is one."""
    opset = model.opset_imports[""]
    wanted = {n.op_type for g in model.graphs() for n in g if not n.domain and _wants_low(n, lists)}
    needed = max((opset_taking(op_type, opset, low) for op_type in wanted), default=opset)
    if needed == opset:
        return model, []
    from onnxscript import version_converter

    raised = model.clone()
    try:
        version_converter.convert_version(raised, needed, fallback=True)
    except Exception as error:
        return model, [f"opset {opset} could not be raised to {needed} for {low.name}: {one_line(error)}"]
    if raised.opset_imports[""] != needed:
        return model, [f"opset {opset} could not be raised to {needed} for {low.name}: the converter has no way"]
    least = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", needed)])
    raised.ir_version = max(raised.ir_version, least)
    return raised, [f"opset raised from {opset} to {needed}, at which more of its ops take {low.name}"]


def _wants_low(node: ir.Node, lists: OpLists) -> bool:
    kind = lists.kind(op_of(node))
    return kind not in (None, OpKind.DENY) and any(format_of(value) == "fp32" for value in node.outputs)
