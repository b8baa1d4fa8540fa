"""Run a rewritten ONNX file strictly: every op computes in fp32, and each low result is really rounded.

ONNX Runtime's CPU provider runs chains of fp16 ops in fp32 and drops the casts between them, so its outputs hide rounding and overflow; for
bf16 it has hardly any kernels at all. So a copy of the file is made in which each rounding is explicit:

1. A low value keeps its name and becomes fp32, so that its readers compute in fp32.
2. Its maker writes an unrounded value of another name. A cast to the low format and a cast back make the low value from it. A result that
   is low already (a constant, a cast, a fill) needs only the cast back.
3. ONNX Runtime runs that file unoptimised, so that nothing is fused away.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from amprewrite.graphs.onnx.ops import all_types, format_of, to_proto
from amprewrite.graphs.onnx.run.onnx_runtime import TimeLimit, run_within, seconds_for, session_of, weight_bytes
from amprewrite.graphs.onnx.run.samples import Feed
from amprewrite.tables.formats import LOW_FORMATS
from amprewrite.tables.ops.onnx_names import ROUNDS_NOTHING, TYPED_BY_ATTRIBUTE

LOW = {row.name: onnx.TensorProto.DataType.Value(row.onnx) for row in LOW_FORMATS}
FP32 = onnx.TensorProto.FLOAT
ROUNDING = 4.0
"""Factor on the time limit, because a strict run rounds every result and is not optimised."""


def strict_outputs(
    model: ir.Model, feeds: Sequence[Feed], proto: onnx.ModelProto | None = None, folder: Path | None = None, limit: TimeLimit = "auto"
) -> list[list[np.ndarray]]:
    """Return the outputs of the rewritten model under true rounding, one list for each feed.

    `proto` is the written model, with its external data in `folder`; None if all of it is in memory. Raises TooSlow if a run takes longer
    than ROUNDING times the limit of an ordinary run.
    """
    with all_types(model):
        strict, renamed = strict_model(model, to_proto(model) if proto is None else proto)
    runner = session_of(strict, folder)
    ordinary = seconds_for(weight_bytes(model), limit)
    seconds = None if ordinary is None else ROUNDING * ordinary
    raised = (
        {renamed.get(name, name): array.astype(np.float32) if name in renamed else array for name, array in feed.items()} for feed in feeds
    )
    return [run_within(runner, None, feed, seconds) for feed in raised]


def strict_model(model: ir.Model, proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Return (an all-fp32 model that rounds like the low model, {old name: new name} of its low inputs). `proto` is not changed."""
    strict = onnx.ModelProto()
    strict.CopyFrom(proto)
    rounding: list[onnx.NodeProto] = []
    renamed: dict[str, str] = {}
    names = _UnroundedNames(model)
    for value, declared in zip(model.graph.inputs, strict.graph.input, strict=True):
        low = LOW.get(format_of(value))
        if low is not None:
            rounding += names.round(declared.name, low)
            renamed[declared.name] = names.raw(declared.name)
            declared.name = renamed[declared.name]
    _open_graph(model.graph, strict.graph, names, rounding)
    return strict, renamed


class _UnroundedNames:
    """Names for values before they are rounded. They end in a mark that no name of the model holds."""

    def __init__(self, model: ir.Model) -> None:
        taken = {str(v.name) for g in model.graphs() for v in (*g.inputs, *g.initializers.values(), *(v for n in g for v in n.outputs))}
        self.mark = "__raw"
        while any(self.mark in name for name in taken):
            self.mark += "_"

    def raw(self, name: str) -> str:
        """Return the name of a value before it is rounded."""
        return name + self.mark

    def round(self, name: str, low: int) -> list[onnx.NodeProto]:
        """Return two casts that round the raw value to the type `low` and back to fp32. The result has the value's own name."""
        down = f"{self.raw(name)}_down"
        return [_cast(self.raw(name), down, low), _cast(down, name, FP32)]


def _open_graph(graph: ir.Graph, proto: onnx.GraphProto, names: _UnroundedNames, first: Sequence[onnx.NodeProto] = ()) -> None:
    """Make each rounding explicit in the protobuf of a graph and of its subgraphs. `first` are nodes to put at its beginning.

    The protobuf holds the same nodes in the same order as `graph`.
    """
    nodes = list(first)
    for tensor in proto.initializer:
        if tensor.data_type in LOW.values():
            nodes.append(_cast(names.raw(tensor.name), tensor.name, FP32))
            tensor.name = names.raw(tensor.name)
    for node, written in zip(graph, proto.node, strict=True):
        for attribute in written.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _open_graph(node.attributes[attribute.name].as_graph(), attribute.g, names)
        nodes.append(written)
        for place, value in enumerate(node.outputs):
            low = LOW.get(format_of(value))
            if low is None or not value.name or node.op_type in ROUNDS_NOTHING:
                continue
            written.output[place] = names.raw(value.name)
            aimed = node.op_type in TYPED_BY_ATTRIBUTE or "dtype" in node.attributes
            nodes += [_cast(names.raw(value.name), value.name, FP32)] if aimed else names.round(value.name, low)
    for declared in (*proto.input, *proto.output):
        if declared.type.tensor_type.elem_type in LOW.values():
            declared.type.tensor_type.elem_type = FP32
    kept = [onnx.NodeProto() for _ in nodes]
    for copy, each in zip(kept, nodes, strict=True):
        copy.CopyFrom(each)
    del proto.node[:]
    proto.node.extend(kept)
    del proto.value_info[:]


def _cast(source: str, result: str, to: int) -> onnx.NodeProto:
    node = onnx.NodeProto(op_type="Cast", input=[source], output=[result])
    node.attribute.add(name="to", type=onnx.AttributeProto.INT, i=to)
    return node
