"""Give ONNX ops amprewrite's names. Read from their schemas which types operands may have, and which operands share the result's type.

The names are in `tables/ops/onnx_names.py`. Types of operands and results are read from onnx.defs, at the opset of the model. This file has
special code for `Pow`, whose exponent may make it another op, and for `Cast` and `Constant`, whose attributes give their result's type.

`infer_types` infers types and shapes that a model does not declare, by onnx's inference and by the schemas. They are called guesses here,
and their values are marked. Planning uses guesses, but they are never written to a file: onnx's inference is wrong about some ops, and
ONNX Runtime refuses a model in which a value has another shape than the declared one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir

from amprewrite.tables.errors import one_line
from amprewrite.tables.formats import FORMATS, Format
from amprewrite.tables.ops.onnx_names import BROADCASTS, BY_ATTRIBUTE, CONTRIB, DOMAIN, FLOW, NEUTRAL, POWERS, SIDE_FOLLOWS, VOCABULARY

KEY = "amprewrite.guessed"
"""Key in `meta` of a value whose type and shape the model does not declare."""


def guess(value: ir.Value, kind: ir.TypeProtocol | None, shape: ir.Shape | None = None) -> None:
    """Set the type of a value to `kind`, and its shape to `shape` if given. Mark both as guesses: the model does not declare them."""
    value.type = kind
    if shape is not None:
        value.shape = shape
    value.meta[KEY] = True


def is_guessed(value: ir.Value) -> bool:
    """True if the type and shape of a value were inferred by us, not declared by the model."""
    return KEY in value.meta


def guessed(model: ir.Model) -> list[ir.Value]:
    """Return the values whose type and shape were inferred by us, not declared by the model."""
    return [value for value in _values(model) if is_guessed(value)]


def describe_copy(copy: ir.Value, like: ir.Value, kind: ir.TypeProtocol | None) -> None:
    """Give `copy` the type `kind` and the shape of `like`. If the type and shape of `like` are marked as inferred, mark `copy`, too."""
    copy.type, copy.shape = kind, like.shape
    if is_guessed(like):
        copy.meta[KEY] = True


def declared(model: ir.Model) -> set[str]:
    """Return the names of the values whose type or shape the model declares."""
    return {str(value.name) for value in _values(model) if _is_known(value) and not is_guessed(value)}


def mark_guesses(model: ir.Model, told: set[str]) -> None:
    """Mark all known types and shapes as inferred by us, except those of the values named in `told`: the model declares them."""
    for value in _values(model):
        if _is_known(value) and value.name not in told:
            value.meta[KEY] = True


def forget_guesses(model: ir.Model, but: Collection[ir.Value] = ()) -> None:
    """Remove every inferred type and shape from the model, but leave the values in `but` unchanged."""
    for value in guessed(model):
        if value in but:
            continue
        value.type = value.shape = None
        del value.meta[KEY]


@contextlib.contextmanager
def without_guesses(model: ir.Model) -> Iterator[None]:
    """Context manager that removes inferred types and shapes from the model, and restores them on exit."""
    hidden = [(value, value.type, value.shape) for value in guessed(model)]
    try:
        for value, _, _ in hidden:
            value.type = value.shape = None
        yield
    finally:
        for value, kind, shape in hidden:
            value.type, value.shape = kind, shape


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a protobuf, without types and shapes that were inferred by us."""
    with without_guesses(model):
        return ir.to_proto(model)


def _values(model: ir.Model) -> Iterator[ir.Value]:
    for graph in model.graphs():
        yield from graph.inputs
        for node in graph:
            yield from node.outputs


def _is_known(value: ir.Value) -> bool:
    return value.type is not None or value.shape is not None


DTYPES = {row.name: ir.DataType[row.onnx] for row in FORMATS.values()}
FLOATS = {dtype: name for name, dtype in DTYPES.items()}
_TYPE_STRINGS = {row.name: row.onnx_type for row in FORMATS.values()}
_SPELLED = {f"tensor({dtype.name.lower()})": dtype for dtype in ir.DataType}
"""Element types of tensors, by the name of the tensor type in schemas and in ONNX Runtime, such as "tensor(float)"."""
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
OLDEST = 7
"""Models of an older opset are raised to this opset, because in older opsets an attribute, not the shapes, decides about broadcasting."""
NEWEST = 24
"""Highest opset to which a model is raised: current runtimes load no newer one. Ops that take low types only at newer opsets stay fp32."""

def op_of(node: ir.Node) -> str:
    """Return amprewrite's name of an op, such as "matmul" for MatMul.

    For an op without such a name, return its op type, or `domain::type` if it is not of onnx's own domain.
    """
    if node.domain == DOMAIN and node.op_type in CONTRIB:
        return CONTRIB[node.op_type].name
    if node.domain not in ("", "ai.onnx"):
        return f"{node.domain}::{node.op_type}"
    if node.op_type == "Pow" and len(node.inputs) == 2 and node.inputs[1] is not None:
        exponent = scalar(node.inputs[1])
        return "pow" if exponent is None else POWERS.get(exponent, "pow")
    reduction = node.attributes.get("reduction")
    if reduction is not None and node.op_type.startswith("Scatter") and reduction.as_string() != "none":
        return "scatter_reduce"
    return VOCABULARY.get(node.op_type, node.op_type)


def names_of(op_type: str) -> set[str]:
    """Return each of amprewrite's names that `op_of` may give to an op type. For Pow these are "pow" and the names in POWERS."""
    own = VOCABULARY.get(op_type)
    names = {own, *(POWERS.values() if own == "pow" else ()), *(["scatter_reduce"] if own in ("scatter", "index_put") else ())}
    names.add(CONTRIB[op_type].name if op_type in CONTRIB else None)
    return {name for name in names if name is not None}


def scalar(value: ir.Value) -> float | None:
    """Return the number that a constant of one element holds; None for any other value."""
    tensor = constant_tensor(value)
    single = tensor is not None and tensor.size == 1 and not tensor.dtype.is_string()
    return float(tensor.numpy().reshape(-1)[0]) if single else None  # type: ignore[union-attr]


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the tensor of an initialiser that is no input, or of a Constant node with a tensor or numbers; None for any other value."""
    if value.is_initializer() and not value.is_graph_input():
        return value.const_value
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    for name, attribute in node.attributes.items():
        if name == "value":
            return attribute.as_tensor()
        if name.startswith(("value_float", "value_int")):
            return ir.tensor(np.asarray(attribute.value, np.float32 if "float" in name else np.int64))
    return None


def add_constant(graph: ir.Graph, name: str, numbers: np.ndarray) -> ir.Value:
    """Add an initialiser that holds `numbers` to a graph, and return its value."""
    tensor = ir.tensor(numbers, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(numbers.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


def drop_unread_constants(graph: ir.Graph) -> None:
    """Remove each initialiser of `graph` that is not read, unless it is also an input."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            del graph.initializers[name]


def insert_behind(graph: ir.Graph, maker: ir.Node | None, nodes: Sequence[ir.Node]) -> None:
    """Insert `nodes` right after `maker`, the node that makes their input.

    If `maker` is None (the input of `nodes` is a constant or an input of `graph`), insert them at the beginning of `graph`.
    """
    if maker is not None:
        assert isinstance(maker.graph, ir.Graph)
        maker.graph.insert_after(maker, nodes)
    elif (first := next(iter(graph), None)) is not None:
        graph.insert_before(first, nodes)
    else:
        graph.extend(nodes)


def describe(tensor: ir.TensorProtocol, like: ir.TensorProtocol) -> None:
    """Copy the doc string and metadata of `like` to `tensor`, which replaces `like`."""
    tensor.doc_string = like.doc_string
    tensor.metadata_props.update(like.metadata_props)


@dataclass(frozen=True)
class Signature:
    """The types that the schema of an ONNX op allows for its inputs and outputs. A type variable such as "T" stands for several types."""

    inputs: tuple[str, ...]
    """Type variable or type of each input in the schema. If the op is variadic, the last entry holds for all further operands."""
    outputs: tuple[str, ...]
    """Type variable or type of each output in the schema."""
    takes: tuple[tuple[str, frozenset[str]], ...]
    """Pairs of a type variable and the types that it may stand for."""
    variadic: bool
    """True if the op takes any number of operands in the place of its last input."""

    def input(self, index: int) -> str:
        """Return the type variable or type of operand `index` in the schema; "" if the schema has no inputs."""
        return self.inputs[min(index, len(self.inputs) - 1)] if self.inputs else ""

    def output(self, index: int) -> str:
        """Return the type variable or type of result `index` in the schema; "" if the schema has no outputs."""
        return self.outputs[min(index, len(self.outputs) - 1)] if self.outputs else ""

    def allows(self, variable: str, fmt: Format) -> bool:
        """True if a type variable may stand for the type of `fmt`."""
        return any(name == variable and _TYPE_STRINGS[fmt.name] in types for name, types in self.takes)

    def follows(self, op_type: str, index: int, group: str, fmt: Format) -> bool:
        """True if operand `index` of an op gets the type `fmt` when the type variable `group` of the op, such as "T", is set to `fmt`.

        This holds if `group` is the operand's type variable. In an op of SIDE_FOLLOWS, such as Pow, other operands that may have the type
        `fmt` get it, too, since kernels for mixed types are rare.
        """
        return self._goes_along(self.input(index), op_type, group, fmt)

    def result_follows(self, op_type: str, index: int, group: str, fmt: Format) -> bool:
        """Same as `follows`, for a result: True if result `index` gets the type `fmt` when the type variable `group` is set to `fmt`."""
        return self._goes_along(self.output(index), op_type, group, fmt)

    def _goes_along(self, own: str, op_type: str, group: str, fmt: Format) -> bool:
        return own == group or (op_type in SIDE_FOLLOWS and self.allows(own, fmt))


@cache
def signature(domain: str, op_type: str, opset: int) -> Signature | None:
    """Return the `Signature` of an op at an opset; None if it is neither in onnx nor in CONTRIB, our table of ONNX Runtime's ops."""
    if domain == DOMAIN:
        return _contrib_signature(op_type)
    try:
        schema = onnx.defs.get_schema(op_type, opset, "" if domain == "ai.onnx" else domain)
    except onnx.defs.SchemaError:
        return None
    takes = tuple((c.type_param_str, frozenset(c.allowed_type_strs)) for c in schema.type_constraints)
    many = onnx.defs.OpSchema.FormalParameterOption.Variadic
    variadic = bool(schema.inputs) and schema.inputs[-1].option == many
    return Signature(tuple(i.type_str for i in schema.inputs), tuple(o.type_str for o in schema.outputs), takes, variadic)


def _contrib_signature(op_type: str) -> Signature | None:
    """Return the `Signature` of an op of ONNX Runtime's own domain; None for an op that is not in our table CONTRIB."""
    row = CONTRIB.get(op_type)
    if row is None:
        return None
    words = {"U": _TYPE_STRINGS["fp32"], "I": "tensor(int32)"}
    own = frozenset(each.onnx_type for each in FORMATS.values() if each.ort_cpu or row.newer)
    inputs, outputs = (tuple(words.get(letter, letter) for letter in letters) for letters in (row.inputs, row.outputs))
    return Signature(inputs, outputs, (("T", own), ("M", own)), False)


def fill_types(node: ir.Node, opset: int) -> None:
    """Infer the missing types of the results of `node`. A result stays without a type if its type does not follow from the node.

    An attribute gives the type of a Cast or a Constant. For other ops the schema may give it: a fixed type, or a type variable that an
    operand of known type shares.
    """
    if all(value.type is not None for value in node.outputs):
        return
    if node.op_type == "Cast" and not node.domain:
        guess(node.outputs[0], ir.TensorType(ir.DataType(node.attributes["to"].as_int())))
    if node.op_type == "Constant" and not node.domain:
        _fill_constant(node)
    sig = signature(node.domain, node.op_type, opset)
    if sig is None:
        return
    _share_types(sig, node, [(value, sig.output(index)) for index, value in enumerate(node.outputs)])


def fill_operand_types(node: ir.Node, opset: int) -> None:
    """Infer the missing types of the operands of `node` from its schema.

    Only results of other nodes get types. Results of If, Loop and Scan get theirs from subgraphs. If `node` has subgraphs, nothing is done.
    """
    sig = signature(node.domain, node.op_type, opset)
    if sig is None or any(each.type in _GRAPHS for each in node.attributes.values()):
        return
    read = [(value, sig.input(index)) for index, value in enumerate(node.inputs) if value is not None]
    _share_types(sig, node, [each for each in read if (maker := each[0].producer()) is not None and maker.op_type not in FLOW])


def _share_types(sig: Signature, node: ir.Node, wanted: Iterable[tuple[ir.Value, str]]) -> None:
    """Infer missing types of operands or results of `node`: `wanted` lists them, each with its type or type variable in `sig`.

    A value gets the type of another operand or result with the same type variable, or the type that `sig` fixes.
    """
    read = [(value, sig.input(index)) for index, value in enumerate(node.inputs) if value is not None]
    made = [(value, sig.output(index)) for index, value in enumerate(node.outputs)]
    known = {spelled: value.type for value, spelled in (*made, *read) if value.type is not None}
    for value, spelled in wanted:
        kind = known.get(spelled) or spelled_type(spelled)
        if value.type is None and isinstance(kind, ir.TensorType):
            guess(value, kind)


def spelled_type(text: str) -> ir.TensorType | None:
    """Return the tensor type that schemas and ONNX Runtime write as `text`, such as "tensor(float)"; None if `text` is no tensor type."""
    return ir.TensorType(_SPELLED[text]) if text in _SPELLED else None


_CONSTANTS = {
    "value_float": ir.DataType.FLOAT, "value_floats": ir.DataType.FLOAT, "value_int": ir.DataType.INT64, "value_ints": ir.DataType.INT64,
}  # fmt: skip


def _fill_constant(node: ir.Node) -> None:
    """Set the type of a Constant's result from the tensor or numbers in its attribute."""
    held = node.attributes.get("value")
    kinds = [_CONSTANTS[name] for name in node.attributes if name in _CONSTANTS]
    if held is not None and held.type == ir.AttributeType.TENSOR:
        kinds.append(held.as_tensor().dtype)
    if kinds:
        guess(node.outputs[0], ir.TensorType(kinds[0]))


def opset_taking(op_type: str, opset: int, fmt: Format) -> int:
    """Return the lowest opset from `opset` to NEWEST at which the op's first result may have the type `fmt`; `opset` if there is none."""
    for version in range(opset, NEWEST + 1):
        found = signature("", op_type, version)
        if found is not None and found.allows(found.output(0), fmt):
            return version
    return opset


def changed_ops(model: ir.Model, opset: int, in_bodies: bool = False) -> list[str]:
    """Return the op types in a model that, by their schemas, may compute something else at `opset`. With `in_bodies`: only in subgraphs."""
    own = model.opset_imports.get("", 1)
    graphs = [graph for graph in model.graphs() if not (in_bodies and graph is model.graph)]
    used = sorted({node.op_type for graph in graphs for node in graph if node.domain in ("", "ai.onnx")})
    return [op_type for op_type in used if not means_the_same(op_type, own, opset)]


@cache
def means_the_same(op_type: str, opset: int, raised: int) -> bool:
    """True if the schemas show that an op computes the same at the opsets `opset` and `raised`.

    The newer schema may add types, optional operands, and attributes with neutral defaults. It may drop attributes for broadcasting.
    """
    try:
        old, new = (onnx.defs.get_schema(op_type, version, "") for version in (opset, raised))
    except onnx.defs.SchemaError:
        return False
    if old.since_version == new.since_version:
        return not old.deprecated
    if old.deprecated or new.deprecated:
        return False
    before, after = dict(old.attributes), dict(new.attributes)
    gone = {name for name in before if name in BY_ATTRIBUTE} if BROADCASTS in before else set()
    kept = [name in gone or (name in after and _is_kept(before[name], after[name])) for name in before]
    added = [_is_neutral(op_type, after[name]) for name in after if name not in before]
    return all((*kept, *added)) and _goes_on(old.inputs, new.inputs) and _goes_on(old.outputs, new.outputs)


def _is_kept(old: onnx.defs.OpSchema.Attribute, new: onnx.defs.OpSchema.Attribute) -> bool:
    """True if an attribute has the same type and default in both schemas, and the new schema requires it only if the old one did."""
    defaults = (each.default_value.SerializeToString() for each in (old, new))
    return old.type == new.type and old.required >= new.required and len(set(defaults)) == 1


def _is_neutral(op_type: str, added: onnx.defs.OpSchema.Attribute) -> bool:
    """True if `added`, an attribute that only the new schema has, is optional and its default leaves the op unchanged."""
    default = added.default_value
    nothing = not (default.i or default.f or default.s.strip(b"none") or default.ints or default.floats or default.strings)
    return not added.required and (nothing or (op_type, added.name) in NEUTRAL)


def _goes_on(old: Sequence[onnx.defs.OpSchema.FormalParameter], new: Sequence[onnx.defs.OpSchema.FormalParameter]) -> bool:
    """True if the new schema keeps each old operand (or result), required as before or optional now, and all new ones are optional."""
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    same = all(a.option == b.option or b.option == optional for a, b in zip(old, new, strict=False))
    return len(old) <= len(new) and same and all(each.option == optional for each in new[len(old) :])


def bodies(node: ir.Node) -> list[ir.Graph]:
    """Return the subgraphs of a node (also called bodies): the branches of an If, the body of a Loop or Scan."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found += attribute.as_graphs()
    return found


def tensors_of(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    """Yield all tensors of a graph or function in a protobuf, and of the subgraphs inside its nodes."""
    if isinstance(graph, onnx.GraphProto):
        yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for body in (attribute.g, *attribute.graphs):
                yield from tensors_of(body)


def is_float(value: ir.Value) -> bool:
    """True if a value has a floating-point type or an unknown type, so that it may hold fractions."""
    return value.dtype is None or value.dtype.is_floating_point()


def format_of(value: ir.Value | None) -> str:
    """Return the short name of a value's dtype, such as "fp32" or "int64"; "" if it is unknown or no tensor."""
    if value is None or not isinstance(value.type, ir.TensorType):
        return ""
    return FLOATS.get(value.type.dtype, value.type.dtype.name.lower())


HOLLOW = 1024
"""Type inference gets no values of initialisers with at least this many elements. Smaller ones may be shapes or axes, which it needs."""


def infer_types(model: ir.Model) -> list[str]:
    """Infer missing types and shapes of the top graph, and mark them as inferred. Return [note] if onnx's inference fails, otherwise [].

    onnx's inference stops at ops that it does not know. After such an op, schemas give types: of results from operands, and of operands
    from results. `read/reader.py` infers the types in subgraphs.
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
    """Context manager that infers the types of all values where possible, also in subgraphs. It removes the inferred types on exit."""
    known = set(guessed(model))
    try:
        with contextlib.suppress(Exception):  # ignore a failure of onnx's inference: the schemas below may still give the types
            _take_all(model.graph, _inferred(model))
        for graph in model.graphs():
            for node in graph:
                fill_types(node, model.opset_imports[""])
        yield
    finally:
        forget_guesses(model, but=known)


def _take_all(graph: ir.Graph, inferred: onnx.GraphProto) -> None:
    """Copy missing types of a graph and its subgraphs from `inferred`, a protobuf with the same nodes in the same order."""
    _take(graph, inferred)
    for node, written in zip(graph, inferred.node, strict=True):
        for attribute in written.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _take_all(node.attributes[attribute.name].as_graph(), attribute.g)


def _take(nodes: Iterable[ir.Node], inferred: onnx.GraphProto) -> None:
    """Give each untyped result of `nodes` the type and shape that `inferred` holds under its name. Mark the result as inferred."""
    missing = {value.name: value for node in nodes for value in node.outputs if value.name and value.type is None}
    for info in inferred.value_info:
        if info.name in missing and info.type.tensor_type.elem_type:
            told = ir.from_proto(info)
            guess(missing[info.name], told.type, told.shape)


def _inferred(model: ir.Model) -> onnx.GraphProto:
    """Return the graph as a protobuf with the types that onnx infers. Large weights become inputs in it, since onnx would copy them."""
    proto = ir.to_proto(model)
    held = proto.graph.initializer
    for place in reversed(range(len(held))):
        if math.prod(held[place].dims) >= HOLLOW:
            tensor = held.pop(place)
            proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return onnx.shape_inference.infer_shapes(proto).graph
