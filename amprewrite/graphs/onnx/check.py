"""Check an ONNX model before any of it is run: it must be whole, valid and of bounded size, and read only its own files.

1. External data lies in the model's folder: its path is relative, has no "..", and follows no symbolic link out of the folder. The file
   has no second hard link, because the link could be a file of another folder.
2. Every constant holds as many bytes as its shape says.
3. Functions do not call each other in a circle, and inlining them does not give more nodes than can be processed.
4. No node leaves out an operand of a variadic list. onnx.checker does not test that, and ONNX Runtime crashes on it.
5. onnx.checker's full check passes. ONNX Runtime may abort the process on a model that fails it, so `run/trial.py` tries such a model in a
   separate process.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from amprewrite.graphs.onnx.ops import signature
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.errors import CaptureError, one_line

MOST_NODES = 20_000
"""Inlining functions may always give up to this many nodes, even if it multiplies their number by more than GROWTH."""
GROWTH = 20
"""Inlining functions may multiply the number of nodes by this factor, even if the result exceeds MOST_NODES."""


# -- validity --------------------------------------------------------------------------
def invalid(model: onnx.ModelProto | Path | str, full: bool = True) -> str:
    """Return the error of onnx.checker on a model; "" if it passes. `full` adds shape inference. Pass a model above 2 GB by its path."""
    try:
        onnx.checker.check_model(str(model) if isinstance(model, Path) else model, full_check=full)
    except Exception as error:  # the checker, protobuf and shape inference raise errors of different classes
        return one_line(error).rstrip(".")
    return ""


def same_complaint(one: str, other: str) -> bool:
    """True if two error texts of onnx.checker are equal except for numbers. The texts show types as numbers, which a rewrite changes."""
    return re.sub(r"\d+", "", one) == re.sub(r"\d+", "", other)


def all_graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """Yield the graph of a model and those of its functions, each followed by the subgraphs of its nodes, at any depth."""
    yield from model.graphs()
    for function in model.functions.values():
        yield function.graph
        yield from function.subgraphs()


# -- constants -----------------------------------------------------------------------------
def check_constants(model: ir.Model, name: str) -> None:
    """Raise CaptureError if a constant has an invalid shape, or data that is missing, outside the model's folder, or of a wrong size."""
    for where, tensor in _constants(model, name):
        dims = [dim for dim in tensor.shape if isinstance(dim, int)]
        if len(dims) != len(tensor.shape) or min(dims, default=0) < 0:
            raise CaptureError(f"{where} has the shape {list(tensor.shape)}, which is none; export the model again")
        if isinstance(tensor, ir.ExternalTensor):
            _check_external(tensor, where)
        elif isinstance(tensor, ir.TensorProtoTensor | ir.StringTensor):
            try:
                held = tensor.numpy().size
            except Exception as error:
                said = f"does not hold what its shape {dims} says: {one_line(error)}"
                raise CaptureError(f"{where} {said}; export the model again") from error
            if held != math.prod(dims):
                raise CaptureError(f"{where} holds {held} values instead of {math.prod(dims)}; export the model again")


def _constants(model: ir.Model, name: str) -> Iterator[tuple[str, ir.TensorProtocol]]:
    """Yield (text that names the tensor, tensor) for all tensors of a model. Raises CaptureError if an initialiser has no data."""
    for graph in all_graphs(model):
        for value in graph.initializers.values():
            if value.const_value is None:
                raise CaptureError(f"{name}: initialiser {printable(value.name)} holds no data; export it again")
            yield f"{name}: the data of {printable(value.name)}", value.const_value
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.is_ref():
                    continue
                where = f"{name}: the data of {printable(node.name or node.op_type)}.{printable(attribute.name)}"
                if attribute.type == ir.AttributeType.TENSOR:
                    yield where, attribute.as_tensor()
                elif attribute.type == ir.AttributeType.TENSORS:
                    yield from ((where, tensor) for tensor in attribute.as_tensors())


def _check_external(tensor: ir.ExternalTensor, where: str) -> None:
    """Raise CaptureError if the file of an external tensor is missing, too short, outside the model's folder, or has other hard links."""
    base = Path(tensor.base_dir).resolve()
    location = os.fspath(tensor.location)
    path = Path(tensor.path)
    outside = f"{where} is refused: {printable(location)}"
    if not location or "\0" in location or Path(location).is_absolute() or ".." in Path(location).parts:
        raise CaptureError(f"{outside} is no path inside the model's folder; keep weights in the folder of their model")
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(base):
        raise CaptureError(f"{outside} is a link that leads out of the model's folder; keep weights in the folder of their model")
    try:
        found = real.stat()
    except OSError:
        found = None
    if found is None or not stat.S_ISREG(found.st_mode):
        raise CaptureError(f"{where} is missing: there is no {printable(path)}; put it beside the model")
    if found.st_nlink > 1:
        raise CaptureError(f"{outside} has a second name elsewhere (a hard link); copy the file")
    offset = tensor.offset or 0
    length = tensor.nbytes if tensor.length is None else tensor.length
    if offset < 0 or length < tensor.nbytes:
        raise CaptureError(f"{where} does not hold what its shape says: {length} bytes from {offset}; export the model again")
    if offset + length > found.st_size:
        raise CaptureError(f"{where} is cut off: {printable(path)} ends before it; copy the file again")


# -- functions -------------------------------------------------------------------------------
def check_functions(model: ir.Model, name: str) -> None:
    """Raise CaptureError if functions call each other in a circle, or if inlining them gives more nodes than can be processed."""
    own = sum(1 for graph in model.graphs() for _ in graph) + sum(1 for f in model.functions.values() for _ in f.all_nodes())
    sizes: dict[object, int] = {}
    for key in model.functions:
        _size(model, key, sizes, ())
    total = sum(sizes.get(node.op_identifier(), 1) for graph in model.graphs() for node in graph)
    if total > max(MOST_NODES, GROWTH * own):
        raise CaptureError(f"{name}: its functions make {total} nodes of {own}; inline them with onnx.inliner, or export without functions")


def _size(model: ir.Model, key: ir.OperatorIdentifier, sizes: dict[object, int], trail: tuple[object, ...]) -> int:
    """Return the number of nodes that inlining puts in place of a call of the function `key`. Raises CaptureError if it calls itself.

    `sizes` caches the results by function. `trail` holds the functions that are being inlined around this call.
    """
    if key in trail or len(trail) > len(model.functions):
        raise CaptureError(f"function {printable(key[1])} calls itself; export the model again")
    if key not in sizes:
        calls = (node.op_identifier() for node in model.functions[key].all_nodes())
        sizes[key] = sum(_size(model, call, sizes, (*trail, key)) if call in model.functions else 1 for call in calls)
    return sizes[key]


# -- operands --------------------------------------------------------------------------------
def check_operands(model: ir.Model, name: str) -> None:
    """Raise CaptureError if a node leaves out an operand of a variadic list. Only an optional operand may be left out, by an empty name."""
    for graph in all_graphs(model):
        for node in graph:
            takes = signature(node.domain, node.op_type, model.opset_imports.get(node.domain, 1)) if None in node.inputs else None
            if takes is not None and takes.variadic and None in node.inputs[len(takes.inputs) - 1 :]:
                which = f"{node.op_type} {printable(node.name or node.outputs[0].name)}"
                raise CaptureError(f"{name}: {which} has an operand without a name, which may not be left out; export it again")


# -- memory ----------------------------------------------------------------------------------
def memory() -> int:
    """Return the bytes of free memory on this machine; 16 GiB if they are unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 2**34
    return 2**34


def _least_bytes(dtype: ir.DataType | None) -> float:
    """Return the number of bytes of an element of type `dtype`; 1, a lower limit, for strings and unknown types."""
    return 1 if dtype is None or dtype == ir.DataType.STRING else dtype.itemsize


def too_large(model: ir.Model) -> str:
    """Return a text that names a value whose declared size is negative or exceeds the free memory; "" if there is no such value."""
    most = memory()
    for graph in model.graphs():
        for value in (*graph.inputs, *(result for node in graph for result in node.outputs)):
            dims = [dim for dim in (value.shape or ()) if isinstance(dim, int)]
            size = math.prod(dims) * _least_bytes(value.dtype)
            if min(dims, default=0) < 0:
                return f"{printable(value.name)} is declared with the shape {dims}"
            if size > most:
                return f"{printable(value.name)} is declared with {size:.3g} bytes, and {most:.3g} are free"
    return ""
