"""Read ONNX models from any source, and prepare them for the passes.

1. Read a path, a protobuf or an onnx_ir model; refuse a broken or incomplete one. Make sparse constants dense (`densify`):
   onnx_ir cannot read sparse constants, and low kernels take only dense operands.
2. Inline local functions; rename values until no two have the same name; turn initialisers that are also inputs into constants.
3. Fill in missing types; raise the opset (`opsets`).

This file has special code for `Constant`, which may hold a sparse constant in an attribute.

ONNX identifies values by name, and values of two graphs, such as the branches of an If, may have the same name. Types and ranges could then
be stored for the wrong value, and an inserted op could read the wrong one. So each value of a loaded model gets a unique name.
"""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as ir_passes

from amprewrite.graphs.onnx.check import all_graphs, check_constants, check_functions, check_operands, memory
from amprewrite.graphs.onnx.ops import OLDEST, bodies, declared, describe, format_of, infer_types, mark_guesses, tensors_of
from amprewrite.graphs.onnx.read.opsets import name_opset, raise_for_format, raise_old, unite_opsets
from amprewrite.graphs.onnx.run.onnx_runtime import is_large
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.errors import CaptureError, PolicyError, one_line
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import OpLists

Source = str | Path | onnx.ModelProto | ir.Model
TRIES = 20
"""Largest number of tries to read a model that another process keeps replacing."""
NOTES = "amprewrite.read"
"""Key in `meta` of a loaded model. Its value is a list of notes on changes made to the model."""


def load(source: Source) -> ir.Model:
    """Return a copy of the model to work on. Raises CaptureError if `source` is no ONNX model, or if its external data is missing.

    Another process may replace the file, and remove its external data, during reading. The new file is then read, in at most TRIES tries.
    """
    for _ in range(TRIES - 1):
        before = _version(source)
        try:
            return _load(source)
        except CaptureError:
            if before == _version(source):
                raise
    return _load(source)


def _version(source: Source) -> tuple[int, ...]:
    """Return a key that changes whenever a file is replaced; () for models in memory and for missing files."""
    if not isinstance(source, str | Path):
        return ()
    try:
        found = Path(source).stat()
    except (OSError, ValueError):
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _load(source: Source) -> ir.Model:
    """Read and check the model in `source`. Raises PolicyError if `source` is of a wrong type, CaptureError if it is no full ONNX model."""
    if not isinstance(source, ir.Model | onnx.ModelProto | str | Path):
        raise PolicyError(f"rewrite_onnx takes a path, a ModelProto or an onnx_ir.Model, not {type(source).__name__}")
    name = name_of(source)
    if _version(source) and not Path(source).is_file():  # type: ignore[arg-type]
        raise CaptureError(f"{name} cannot be read: it is no regular file; name an ONNX file")
    try:
        model = source.clone() if isinstance(source, ir.Model) else _parsed(source)
    except CaptureError:
        raise
    except FileNotFoundError as error:
        raise CaptureError(f"there is no file {name}; check the path") from error
    except OSError as error:
        raise CaptureError(f"{name} cannot be read: {one_line(error)}") from error
    except Exception as error:
        missing = _not_implemented(error)
        if missing is not None:
            raise CaptureError(f"{name} holds what onnx_ir does not read: {one_line(missing)}; export it with tensors instead") from error
        said = f"{type(error).__name__}: {one_line(error)}"
        raise CaptureError(f"{name} is no ONNX model, or a truncated one ({said}); export it again") from error
    if model.graph is None or not len(model.graph.outputs):
        raise CaptureError(f"{name} holds no ONNX graph with outputs; export it again")
    check_constants(model, name)
    check_functions(model, name)
    check_operands(model, name)
    try:
        _load_attributes(model)
        if not is_large(model):
            _load_initialisers(model)
    except (OSError, ValueError) as error:
        raise CaptureError(f"{name}: its external data cannot be read: {one_line(error)}; put it beside the model") from error
    return model


def _load_initialisers(model: ir.Model) -> None:
    """Load all weights into memory, with their doc strings and metadata."""
    values = [value for graph in model.graphs() for value in graph.initializers.values()]
    outside = [(value, value.const_value) for value in values if isinstance(value.const_value, ir.ExternalTensor)]
    ir.external_data.load_to_model(model)
    for value, tensor in outside:
        if value.const_value is not None:
            describe(value.const_value, tensor)


def _load_attributes(model: ir.Model) -> None:
    """Load into memory the external tensors that are attributes (as in a Constant), and the weights inside functions.

    Only initialisers of the model's own graphs are later written to external files. So all other tensors must be in memory.
    """
    own = set(model.graphs())
    for graph in all_graphs(model):
        for value in graph.initializers.values() if graph not in own else ():
            value.const_value = _in_memory(value.const_value) if value.const_value is not None else None
        for node in graph:
            for attribute in list(node.attributes.values()):
                if attribute.is_ref():
                    continue
                if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                    node.attributes.add(ir.AttrTensor(attribute.name, _in_memory(attribute.value)))
                elif attribute.type == ir.AttributeType.TENSORS:
                    node.attributes.add(ir.AttrTensors(attribute.name, [_in_memory(each) for each in attribute.as_tensors()]))


def _in_memory(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.external_data.convert_tensors_from_external([tensor])[0] if isinstance(tensor, ir.ExternalTensor) else tensor


def _parsed(source: onnx.ModelProto | str | Path) -> ir.Model:
    """Return the model in a protobuf or a file, without loading external data.

    A value that is both an input and an output gets the input's type, because the output's type in the file may be wrong. onnx_ir refuses
    or silently drops some parts of a file. These are first converted (sparse to dense), refused with a message, or noted in `model.meta`.
    """
    proto = copy.deepcopy(source) if isinstance(source, onnx.ModelProto) else onnx.load(source, load_external_data=False)
    name = name_of(source)
    _refuse_maps(proto.graph, name)
    inputs = {each.name: each.type for each in proto.graph.input}
    for output in proto.graph.output:
        if output.name in inputs:
            output.type.CopyFrom(inputs[output.name])
    folder = Path() if isinstance(source, onnx.ModelProto) else _folder_of_data(proto, Path(source))
    notes = []
    dense = densify(proto, name)
    if dense:
        notes.append(f"{dense} sparse constants are dense now")
    _refuse_twice(proto, name)
    if proto.training_info:
        notes.append("training_info was left out: it trains fp32 weights by their names, and the file is one for inference")
    model = ir.from_proto(proto)
    model.meta[NOTES] = notes
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        ir.external_data.set_base_dir(graph, folder)
    return model


def _folder_of_data(proto: onnx.ModelProto, path: Path) -> Path:
    """Return the folder that holds the external data of the model file `path`. It is usually the folder of `path`.

    In the cache of the Hugging Face hub, `path` and its data files are links to files in another folder. In this case return the other
    folder, and replace the names of the links in `proto` by the names of the files there, in place.
    """
    home = Path(os.path.realpath(path)).parent
    tensors = (tensor for graph in (proto.graph, *proto.functions) for tensor in tensors_of(graph))
    places = [entry for tensor in tensors for entry in tensor.external_data if entry.key == "location"]
    real = [Path(os.path.realpath(path.parent / place.value)) for place in places] if path.is_symlink() else []
    if not real or not all(each.is_relative_to(home) for each in real):
        return path.parent
    for place, each in zip(places, real, strict=True):
        place.value = str(each.relative_to(home))
    return home


def _refuse_maps(graph: onnx.GraphProto, name: str) -> None:
    """Raise CaptureError if an input or output holds a map. Erase declared map types of inner values, because onnx_ir cannot read them."""
    for kind, values in (("input", graph.input), ("output", graph.output)):
        for value in values:
            if _holds_map(value.type):
                maker = next((node.op_type for node in graph.node if value.name in node.output), "")
                raise CaptureError(
                    f"{name}: its {kind} {printable(value.name)} is a map{f' that {maker} makes' if maker else ''}, which cannot be "
                    "rewritten; export it with tensors instead (skl2onnx: options={'zipmap': False}), or cut it off with "
                    "onnx.utils.extract_model"
                )
    kept = [info for info in graph.value_info if not _holds_map(info.type)]
    if len(kept) < len(graph.value_info):
        held = onnx.GraphProto(value_info=kept)
        del graph.value_info[:]
        graph.value_info.extend(held.value_info)


def _refuse_twice(proto: onnx.ModelProto, name: str) -> None:
    """Raise CaptureError if two initialisers of a graph have the same name: onnx.checker accepts them, and onnx_ir silently drops one."""
    for graph in (proto.graph, *(body for root in (proto.graph, *proto.functions) for body in _bodies(root.node))):
        held = Counter(tensor.name for tensor in graph.initializer)
        twice = next((each for each, count in held.items() if count > 1), None)
        if twice is not None:
            raise CaptureError(f"{name} has two initialisers named {printable(twice)}, of which only one can be meant; export it again")


def _holds_map(kind: onnx.TypeProto) -> bool:
    found = kind.WhichOneof("value")
    if found in ("sequence_type", "optional_type"):
        return _holds_map(getattr(kind, found).elem_type)
    return found == "map_type"


def _not_implemented(error: BaseException | None) -> NotImplementedError | None:
    """Return `error` or the first of its causes that is a NotImplementedError; None if none is."""
    while error is not None and not isinstance(error, NotImplementedError):
        error = error.__cause__
    return error


def name_of(source: Source) -> str:
    """Return the name by which messages call a model: its path, or "the model" if it is in memory."""
    return printable(source) if isinstance(source, str | Path) else "the model"


def make_ready(model: ir.Model, low: Format, lists: OpLists, least: int = 0) -> tuple[ir.Model, list[str], list[ir.Model]]:
    """Prepare a model for the passes, at opset `least` or later if possible. Raises CaptureError if its opset stays below OLDEST.

    Return (model, notes for the user on the changes, earlier versions). Earlier versions are copies of the model at each earlier opset,
    oldest first, whose results can be compared with those of the returned model.
    """
    notes: list[str] = model.meta.pop(NOTES, [])
    opset = name_opset(model)
    sort_nodes(model)
    if model.functions:
        notes.append(f"{len(model.functions)} local functions were inlined")
        unite_opsets(model)
        ir_passes.InlinePass()(model)
    name_apart(model)
    if any(value.is_graph_input() for value in model.graph.initializers.values()):
        ir_passes.RemoveInitializersFromInputsPass()(model)
        model.ir_version = max(model.ir_version, 4)
        notes.append("initialisers that were inputs, too, are constants now")
    notes += infer_types(model)
    before, told = [model], declared(model)
    if opset < OLDEST:
        model = raise_old(model)
        mark_guesses(model, told)
        notes += [f"opset raised from {opset} to {OLDEST}: ops of older ones broadcast by attribute", *infer_types(model)]
        before.append(model)
    model, more = raise_for_format(model, low, lists, least)
    mark_guesses(model, told)
    notes += more
    if not any(format_of(v) == "fp32" for g in model.graphs() for n in g for v in n.outputs):
        notes.append("no value of the model is fp32: there is nothing to rewrite")
    return model, notes, [each for each in before if each is not model]


def sort_nodes(model: ir.Model) -> None:
    """Sort nodes so that each follows the nodes whose results it reads. Raises CaptureError if that is impossible."""
    if _is_sorted(model.graph, set()):
        return
    try:
        model.graph.sort()
    except ValueError as error:
        raise CaptureError("the model's nodes read each other's results in a circle; export it again") from error
    if not _is_sorted(model.graph, set()):
        raise CaptureError("a node of the model reads a value that no node before it makes; export it again")


def _is_sorted(graph: ir.Graph, made: set[ir.Node]) -> bool:
    """True if every node follows the nodes whose results it reads. `made` holds all earlier nodes; the nodes of `graph` are added to it."""
    for node in graph:
        makers = (value.producer() for value in node.inputs if value is not None)
        if any(maker is not None and maker not in made for maker in makers):
            return False
        if not all(_is_sorted(body, made) for body in bodies(node)):
            return False
        made.add(node)
    return True


SPARSE = (onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.SPARSE_TENSORS)


def densify(model: onnx.ModelProto, name: str) -> int:
    """Make sparse initialisers and Constant nodes dense, in place. Return the number of converted tensors.

    `name` is the model's name in messages. Raises CaptureError if a sparse tensor is broken, is too large for memory, or is an attribute of
    an op other than Constant.
    """
    count, left = 0, memory() // 2
    for graph in (model.graph, *_bodies(model.graph.node), *(body for function in model.functions for body in _bodies(function.node))):
        for sparse in graph.sparse_initializer:
            dense = _dense(sparse, f"{name}: the sparse constant {printable(sparse.values.name)}", left)
            left -= len(dense.raw_data)
            graph.initializer.append(dense)
            count += 1
        del graph.sparse_initializer[:]
    for node in _nodes(model):
        for attribute in node.attribute:
            if attribute.type not in SPARSE:
                continue
            where = f"{name}: {node.op_type} {printable(node.name or next(iter(node.output), ''))}"
            if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or attribute.type != SPARSE[0]:
                raise CaptureError(f"{where} has sparse tensors as {attribute.name}, which cannot be rewritten; export it with dense ones")
            dense = _dense(attribute.sparse_tensor, f"{where}, a sparse constant,", left)
            left -= len(dense.raw_data)
            attribute.Clear()
            attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
            attribute.t.CopyFrom(dense)
            count += 1
    return count


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a model and of its functions, with the nodes of their subgraphs."""
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        yield from nodes
        for body in _bodies(nodes):
            yield from body.node


def _bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    """Yield the subgraphs of nodes, at any depth."""
    for node in nodes:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs) if attribute.HasField("g") or attribute.graphs else ():
                yield body
                yield from _bodies(body.node)


def _dense(sparse: onnx.SparseTensorProto, where: str, most: int) -> onnx.TensorProto:
    """Return a sparse tensor as a dense tensor of the same name. Raises CaptureError if it is broken, or takes more than `most` bytes."""
    if onnx.TensorProto.EXTERNAL in (sparse.values.data_location, sparse.indices.data_location):
        raise CaptureError(f"{where} lies in a file of its own; save the model with its sparse constants inside")
    try:
        held, dims = ir.serde.deserialize_tensor(sparse.values), list(sparse.dims)
        indices = ir.serde.deserialize_tensor(sparse.indices).numpy()
        values = held.numpy()
        size = math.prod(dims) * values.dtype.itemsize
        places = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), dims)
        if min(dims, default=0) <= 0 or values.shape != places.shape or ((places < 0) | (places >= math.prod(dims))).any():
            raise ValueError(f"{values.size} values at {list(indices.shape)} indices of {dims}")
    except Exception as error:  # numpy and onnx raise various errors for truncated data and for indices out of bounds
        raise CaptureError(f"{where} does not hold what its shape says: {one_line(error)}; export the model again") from error
    if size > most:
        raise CaptureError(f"{where} takes {size:.3g} bytes when it is dense, and {most:.3g} are free; use a machine with more memory")
    strings = held.dtype == ir.DataType.STRING
    made = np.full(dims, b"" if strings else 0, values.dtype)
    made.reshape(-1)[places] = values
    dense = ir.StringTensor(made, shape=ir.Shape(dims), name=held.name) if strings else ir.tensor(made, held.dtype, held.name)
    describe(dense, held)
    return ir.to_proto(dense)


class FreshNames:
    """Makes new names that no value and no node of the model has."""

    def __init__(self, model: ir.Model) -> None:
        self.taken: set[str | None] = set()
        for graph in model.graphs():
            self.taken |= {value.name for value in _values(graph)} | {node.name for node in graph}

    def new(self, base: str) -> str:
        """Return `base`. If a value, a node or an earlier result of `new` has this name, return `base` with a number at its end."""
        name, count = base, 1
        while name in self.taken:
            name, count = f"{base}_{count}", count + 1
        self.taken.add(name)
        return name


def name_apart(model: ir.Model) -> None:
    """Rename values so that no two values of the model have the same name, and nodes so that no two nodes of a graph have the same name.

    The first value or node keeps its name. ONNX Runtime loads no model in which two nodes of a graph have the same name.
    """
    names, of_values = FreshNames(model), set[str]()
    for graph in model.graphs():
        of_nodes = set[str]()
        for things, used in ((_values(graph), of_values), (list(graph), of_nodes)):
            for thing in things:
                if thing.name in used:
                    thing.name = names.new(str(thing.name))
                if thing.name:
                    used.add(thing.name)


def _values(graph: ir.Graph) -> list[ir.Value]:
    """Return the values of a graph, each once, without the values of its subgraphs."""
    held = (*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs))
    return list(dict.fromkeys(held))
