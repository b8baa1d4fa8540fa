"""Mark types and shapes that were inferred because the model does not declare them. They serve planning and are never written to a file.

onnx's shape inference is wrong about some ops, and runtimes believe the declarations of a file: ONNX Runtime refuses a model with values of
another shape. So inferred types and shapes are marked on the value, and left out of every protobuf.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import onnx
import onnx_ir as ir

KEY = "amprewrite.guessed"
"""Key in `meta` of a value whose type and shape the model does not declare."""


def guess(value: ir.Value, kind: ir.TypeProtocol | None, shape: ir.Shape | None = None) -> None:
    """Give a value a type, and perhaps a shape, that the model does not declare."""
    value.type = kind
    if shape is not None:
        value.shape = shape
    value.meta[KEY] = True


def is_guessed(value: ir.Value) -> bool:
    """True if the model does not declare the type and shape of a value."""
    return KEY in value.meta


def guessed(model: ir.Model) -> list[ir.Value]:
    """Return the values whose type or shape the model does not declare."""
    return [value for value in _values(model) if is_guessed(value)]


def describe_copy(copy: ir.Value, like: ir.Value, kind: ir.TypeProtocol | None) -> None:
    """Give `copy` the type `kind` and the shape of `like`. They are marked as guesses if the type and shape of `like` are guesses."""
    copy.type, copy.shape = kind, like.shape
    if is_guessed(like):
        copy.meta[KEY] = True


def declared(model: ir.Model) -> set[str]:
    """Return the names of the values whose type or shape the model declares."""
    return {str(value.name) for value in _values(model) if _is_known(value) and not is_guessed(value)}


def mark_guesses(model: ir.Model, told: set[str]) -> None:
    """Mark the types and shapes of all values as guesses, except for the values in `told`, whose types and shapes the model declares."""
    for value in _values(model):
        if _is_known(value) and value.name not in told:
            value.meta[KEY] = True


def forget_guesses(model: ir.Model, but: Collection[ir.Value] = ()) -> None:
    """Remove every type and shape that the model does not declare, except those of the values in `but`."""
    for value in guessed(model):
        if value in but:
            continue
        value.type = value.shape = None
        del value.meta[KEY]


@contextlib.contextmanager
def without_guesses(model: ir.Model) -> Iterator[None]:
    """Context manager that removes guessed types and shapes from the model, and restores them at its end."""
    hidden = [(value, value.type, value.shape) for value in guessed(model)]
    try:
        for value, _, _ in hidden:
            value.type = value.shape = None
        yield
    finally:
        for value, kind, shape in hidden:
            value.type, value.shape = kind, shape


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a protobuf without guesses."""
    with without_guesses(model):
        return ir.to_proto(model)


def _values(model: ir.Model) -> Iterator[ir.Value]:
    for graph in model.graphs():
        yield from graph.inputs
        for node in graph:
            yield from node.outputs


def _is_known(value: ir.Value) -> bool:
    return value.type is not None or value.shape is not None
