"""Edit an ONNX model by its plan.

1. Values that the plan makes low get the low type. If a Cast or a ConstantOfShape makes the value, its attribute gets this type, too.
2. Planned casts of constants become stored low copies. Every other planned cast becomes one Cast node after the node that makes the value.
3. Casts of the model that no longer change anything are erased. A second cast of the same value to the same type is replaced by the first.
4. The colour and the reason of every node are written to its metadata_props.

This file has special code for ops that set the type of their result: `Cast`, `Constant`, `ConstantOfShape`. It writes
`QuantizeLinear` and `DequantizeLinear`.

The fp8 products of a plan are written in ONNX's form: both operands pass through QuantizeLinear and DequantizeLinear.

    before   y = MatMul(x, w)
    after    q = QuantizeLinear(x, scale); d = DequantizeLinear(q, scale); y = MatMul(d, DequantizeLinear(w8, scale of w))

A scale is a constant in the low format: the largest magnitude of x in sample runs, or of w, divided by the largest number of e4m3. Larger
values saturate. A weight is stored in e4m3. Compilers such as TensorRT turn the pattern into an fp8 product. Other runtimes run the nodes
one by one, and compute the same numbers.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from amprewrite.graphs.onnx.ops import (
    DTYPES,
    FLOATS,
    add_constant,
    constant_tensor,
    describe,
    describe_copy,
    drop_unread_constants,
    insert_behind,
)
from amprewrite.graphs.onnx.read.constants import NUMPY, fill_of, rounded
from amprewrite.graphs.onnx.read.load import FreshNames
from amprewrite.graphs.onnx.read.reader import OnnxReading
from amprewrite.ir.evidence.ranges import ValueRange
from amprewrite.ir.plans.plan import Cast, RegionPlan
from amprewrite.tables.errors import PassError, PolicyError
from amprewrite.tables.formats import E4M3, FORMATS, SMALLEST, Format, W
from amprewrite.tables.vocabulary import Colour

CAST = "amprewrite.cast"
"""Key in metadata_props of the Cast nodes that a rewrite inserted."""
COLOUR, REASON = "amprewrite.colour", "amprewrite.reason"
"""Keys in metadata_props that hold the colour of a node and its reason."""
CLIPS = 11
"""First opset in which the bounds of a Clip are operands. Before, they are attributes."""


def apply_plan(model: ir.Model, reading: OnnxReading, plan: RegionPlan, low: Format) -> None:
    """Insert the casts and type changes of `plan` into `model`, in place. Raises PassError if the inserted casts differ from the plan's."""
    colours = {node.name: node.colour for node in plan.nodes}
    for node in model.graph.all_nodes():  # remove marks of an earlier rewrite
        for key in (CAST, COLOUR, REASON):
            node.metadata_props.pop(key, None)
    _retype(reading, colours, low)
    names = FreshNames(model)
    made: list[ir.Node] = []
    for cast in plan.casts:
        if constant_tensor(reading.values[cast.value]) is not None:
            _store_low(reading, cast, names)
        else:
            made.append(_insert_cast(model, reading, cast, names))
    _tidy(model)
    _annotate(reading, plan)
    kept = [node for graph in model.graphs() for node in graph if CAST in node.metadata_props]
    if set(kept) != set(made):
        raise PassError(f"{plan.name}: the file has {len(kept)} casts and the plan {len(made)}; please report this model")


# -- 1. types -------------------------------------------------------------------------
def _retype(reading: OnnxReading, colours: dict[str, Colour], low: Format) -> None:
    """Set the type of each value whose planned colour is LOW to the format `low`. `colours` holds the colours by name of the op-graph node.

    A Cast or ConstantOfShape that makes such a value gets this type in its attribute.
    """
    for name, value in reading.values.items():
        if colours[name] is Colour.LOW:
            value.type = ir.TensorType(DTYPES[low.name])
    for name, node in reading.nodes.items():
        if colours[name] is not Colour.LOW:
            continue
        if node.op_type == "Cast":
            node.attributes["to"] = ir.AttrInt64("to", int(DTYPES[low.name]))
        elif node.op_type == "ConstantOfShape":
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(rounded(fill_of(node), low, name in reading.masks)))


# -- 2. casts -------------------------------------------------------------------------
def _put(reading: OnnxReading, cast: Cast, copy: ir.Value) -> None:
    """Make each op in `cast.users` read `copy`, which is `cast.value` in the other format, instead of `cast.value` itself."""
    for user in cast.users:
        for slot in reading.slots[user, cast.value]:
            slot.put(copy)


def _store_low(reading: OnnxReading, cast: Cast, names: FreshNames) -> None:
    """Store a low copy of a constant for the ops in `cast.users`. If nothing else reads the constant, the copy replaces it."""
    value, to = reading.values[cast.value], FORMATS[cast.to]
    users = {(slot.owner, slot.index) for user in cast.users for slot in reading.slots[user, cast.value]}
    tensor = constant_tensor(value)
    assert tensor is not None
    low = ir.tensor(rounded(tensor.numpy(), to, cast.value in reading.masks), name=value.name)
    describe(low, tensor)
    node, graph = value.producer(), value.graph
    if graph is None:  # not `if not graph`: a graph without nodes, such as a branch of an If, is falsy
        graph = (node or next(iter(value.uses())).node).graph
    assert isinstance(graph, ir.Graph)
    if {(use.node, use.idx) for use in value.uses()} <= users and not value.is_graph_output():
        value.type = ir.TensorType(DTYPES[to.name])
        if node is None:
            value.const_value = low
        else:
            for name in [name for name in node.attributes if name.startswith("value")]:
                del node.attributes[name]
            node.attributes["value"] = ir.AttrTensor("value", low)
        return
    low.name = names.new(f"{value.name}_{to.name}")
    copy = ir.Value(name=low.name, type=ir.TensorType(DTYPES[to.name]), shape=value.shape, const_value=low)
    graph.register_initializer(copy)
    _put(reading, cast, copy)


def _insert_cast(model: ir.Model, reading: OnnxReading, cast: Cast, names: FreshNames) -> ir.Node:
    """Insert a Cast node right after the node that makes `cast.value`, and return it. The ops in `cast.users` then read the Cast's result.

    If `cast.saturate` is set, a Clip to the range of the low format precedes the Cast. The names of the model's outputs do not change.
    """
    value, to = reading.values[cast.value], FORMATS[cast.to]
    graph = _graph_of(model, value)
    nodes: list[ir.Node] = []
    source = value
    if cast.saturate:
        name = f"{value.name}_bound"
        bounds: dict[str, float] = {"min": -to.max, "max": to.max}
        by_attribute = model.opset_imports[""] < CLIPS
        held = [] if by_attribute else [add_constant(graph, names.new(name), np.asarray(each, np.float32)) for each in bounds.values()]
        clip = ir.node("Clip", [value, *held], bounds if by_attribute else {}, name=names.new(f"clip_{value.name}"))
        source = clip.outputs[0]
        source.name = names.new(f"{value.name}_clipped")
        describe_copy(source, value, value.type)
        nodes.append(clip)
    name = names.new(f"cast_{value.name}")
    node = ir.node("Cast", [source], {"to": int(DTYPES[to.name])}, name=name, metadata_props={CAST: to.name})
    copy = node.outputs[0]
    describe_copy(copy, value, ir.TensorType(DTYPES[to.name]))
    outputs = [slot for user in cast.users for slot in reading.slots[user, cast.value] if slot.owner is model.graph]
    _put(reading, cast, copy)
    if outputs and not value.is_graph_output() and not value.is_graph_input():
        own = str(value.name)
        value.name = names.new(f"{own}_{FLOATS[value.type.dtype]}" if value.type is not None else own)
        copy.name = own
    else:
        copy.name = names.new(f"{value.name}_{to.name}")
    nodes.append(node)
    insert_behind(graph, value.producer(), nodes)
    return node


def _graph_of(model: ir.Model, value: ir.Value) -> ir.Graph:
    """Return the graph or subgraph in which `value` is made; the top graph if `value` belongs to none."""
    maker = value.producer()
    graph = maker.graph if maker is not None else value.graph
    return graph if isinstance(graph, ir.Graph) else model.graph


# -- 3. tidy --------------------------------------------------------------------------
def _tidy(model: ir.Model) -> None:
    """Erase casts of the original model that no longer change the type, or repeat another cast. Then erase constants that nothing reads."""
    for graph in model.graphs():
        first: dict[tuple[ir.Value | None, int, int], ir.Node] = {
            (node.inputs[0], *_target(node)): node for node in graph if CAST in node.metadata_props
        }
        for node in list(graph):
            if CAST in node.metadata_props or node.op_type != "Cast" or node.domain or node.inputs[0] is None:
                continue
            source, result = node.inputs[0], node.outputs[0]
            to, saturate = _target(node)
            same = source.type is not None and source.dtype is not None and int(source.dtype) == to and to in FLOATS
            earlier = first.get((source, to, saturate))
            if (same or earlier is not None) and not result.is_graph_output():
                result.replace_all_uses_with(source if earlier is None or same else earlier.outputs[0])
                graph.remove(node, safe=True)
            elif earlier is None:
                first[source, to, saturate] = node
    for graph in model.graphs():
        for node in list(graph):
            if node.op_type == "Constant" and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
                graph.remove(node, safe=True)
        drop_unread_constants(graph)


def _target(node: ir.Node) -> tuple[int, int]:
    """Return (target type of a Cast, its attribute `saturate`). Two casts of a value are equivalent if both items are equal."""
    return node.attributes["to"].as_int(), node.attributes.get_int("saturate", 1)


# -- 4. colours and reasons --------------------------------------------------------------
def _annotate(reading: OnnxReading, plan: RegionPlan) -> None:
    """Write the planned colour (low, high or plain) and the reason into the metadata of each ONNX node.

    If an ONNX node has several op-graph nodes, it gets the colour and reason of the first.
    """
    for planned in plan.nodes:
        node = reading.nodes.get(planned.name)
        if node is not None and COLOUR not in node.metadata_props:
            node.metadata_props[COLOUR] = planned.colour.value
            node.metadata_props[REASON] = planned.why()


OPSET = 21
"""First opset in which QuantizeLinear and DequantizeLinear support bf16 and e4m3 in the form that compilers read."""
NUMBER = np.dtype(getattr(ml_dtypes, E4M3.library_name))
STORED = ir.DataType[E4M3.onnx]


def insert_quantised(model: ir.Model, reading: OnnxReading, plan: RegionPlan, low: Format) -> None:
    """Edit `model` in place so that the fp8 products of `plan` read operands that were quantised to e4m3 and dequantised to `low`.

    Raises PolicyError if samples do not show the range of an operand, or if the opset is lower than OPSET.
    """
    opset, names = model.opset_imports.get("", 0), FreshNames(model)
    if opset < OPSET and plan.quantised.copies:
        raise PolicyError(f"fp8 products need opset {OPSET}, and this file has {opset}: export it with opset={OPSET}")
    for copy in plan.quantised.copies:
        nodes = [reading.nodes[reader.rpartition(".")[0]] for reader in copy.readers]
        place = int(copy.role == W)
        value = nodes[0].inputs[place]
        assert value is not None
        stored = constant_tensor(value) is not None
        if not stored and copy.value not in reading.ranges:
            raise PolicyError(
                f"no sample shows the range of {copy.value}, which {copy.readers[0]} reads in fp8: pass calibration= with batches on which "
                "the model runs, or leave products= out"
            )
        seen = reading.ranges.get(copy.value, ValueRange())
        made = _stored(model, names, value, low) if stored else _quantised(model, names, value, seen.amax, low)
        for node in nodes:
            node.replace_input_with(place, made)
    drop_unread_constants(model.graph)


def scale_for(amax: float, low: Format) -> np.ndarray:
    """Return the scale for values of magnitude up to `amax`: a number in `low`, by which values are divided before they become e4m3.

    It is rounded up, so that `amax` does not saturate, and limited, so that the largest e4m3 number times the scale fits in `low`.
    """
    number = NUMPY[low.name]

    def rounded(exact: float, up: bool) -> np.ndarray:
        near = np.asarray(exact, number)
        misses = float(near) < exact if up else float(near) > exact
        return np.nextafter(near, np.asarray(np.inf if up else 0, number)) if misses else near

    return min(rounded(max(amax, SMALLEST) / E4M3.max, up=True), rounded(low.max / E4M3.max, up=False))


def _stored(model: ir.Model, names: FreshNames, weight: ir.Value, low: Format) -> ir.Value:
    """Store a constant in e4m3, and insert a DequantizeLinear that reads it. Return the result of that node."""
    tensor = constant_tensor(weight)
    assert tensor is not None
    numbers = np.asarray(tensor.numpy(), np.float32)
    scale = scale_for(float(np.abs(numbers).max(initial=0)), low)
    scaled = np.clip(numbers / scale.astype(np.float32), -E4M3.max, E4M3.max).astype(NUMBER)
    stored = add_constant(model.graph, names.new(f"{weight.name}_{E4M3.name}"), scaled)
    return _read_back(model, names, stored, weight, add_constant(model.graph, names.new(f"{weight.name}_scale"), scale), low)


def _quantised(model: ir.Model, names: FreshNames, value: ir.Value, amax: float, low: Format) -> ir.Value:
    """Insert QuantizeLinear and DequantizeLinear after the node that makes `value`, and return their result, of type `low`.

    `amax` is the largest magnitude of `value`.
    """
    scale = add_constant(model.graph, names.new(f"{value.name}_scale"), scale_for(amax, low))
    node = ir.node("QuantizeLinear", [value, scale, _zero(model, names)], name=names.new(f"quantise_{value.name}"))
    made = node.outputs[0]
    made.name = names.new(f"{value.name}_{E4M3.name}")
    describe_copy(made, value, ir.TensorType(STORED))
    insert_behind(model.graph, value.producer(), [node])
    return _read_back(model, names, made, value, scale, low)


def _read_back(model: ir.Model, names: FreshNames, made: ir.Value, like: ir.Value, scale: ir.Value, low: Format) -> ir.Value:
    """Insert a DequantizeLinear that reads the e4m3 value `made`. Return its result, in `low` and with the shape of `like`."""
    node = ir.node("DequantizeLinear", [made, scale, _zero(model, names)], name=names.new(f"dequantise_{like.name}"))
    node.outputs[0].name = names.new(f"{made.name}_read")
    describe_copy(node.outputs[0], like, ir.TensorType(ir.DataType[low.onnx]))
    insert_behind(model.graph, made.producer(), [node])
    return node.outputs[0]


def _zero(model: ir.Model, names: FreshNames) -> ir.Value:
    """Return the zero point of all quantised values: a constant 0 in e4m3, which the first call adds to the model."""
    name = f"amprewrite_{E4M3.name}_zero"
    return model.graph.initializers.get(name) or add_constant(model.graph, names.new(name), np.zeros((), NUMBER))
