"""Make sparse constants of an ONNX protobuf dense: onnx_ir cannot read sparse constants, and low kernels take only dense operands.

This file has special code for `Constant`, which may hold a sparse constant in an attribute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import onnx
import onnx_ir as ir

from amprewrite.graphs.onnx.check import memory
from amprewrite.graphs.onnx.ops import describe
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.errors import CaptureError, one_line

SPARSE = (onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.SPARSE_TENSORS)


def densify(model: onnx.ModelProto, name: str) -> int:
    """Make sparse initialisers and Constant nodes dense in place; returns their number.

    `name` is the model's name in messages. Raises CaptureError if a sparse tensor is broken, too large for memory, or an attribute of an op
    other than Constant.
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
    except Exception as error:  # errors of numpy and onnx for truncated data, or indices out of bounds
        raise CaptureError(f"{where} does not hold what its shape says: {one_line(error)}; export the model again") from error
    if size > most:
        raise CaptureError(f"{where} takes {size:.3g} bytes when it is dense, and {most:.3g} are free; use a machine with more memory")
    strings = held.dtype == ir.DataType.STRING
    made = np.full(dims, b"" if strings else 0, values.dtype)
    made.reshape(-1)[places] = values
    dense = ir.StringTensor(made, shape=ir.Shape(dims), name=held.name) if strings else ir.tensor(made, held.dtype, held.name)
    describe(dense, held)
    return ir.to_proto(dense)
