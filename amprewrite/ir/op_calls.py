"""Recorded calls of ops, for passes that look at dims: arguments and shapes as plain data, tensors by name.

The op graph holds the edges between fp32 values. Padding needs more: the dim of a softmax, how a view splits a dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Size = int | str
"""Extent of a dim; a string if it is symbolic."""
Shape = tuple[Size, ...]


@dataclass(frozen=True)
class Ref:
    """An argument of a call that is a tensor or another value made in the graph."""

    name: str


@dataclass(frozen=True)
class Call:
    """One call of an op."""

    name: str
    """Name of its vertex."""
    op: str
    """ATen base name; for a vertex that is no op, its role."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[Shape, ...] = ()
    """Shapes of the tensors it returns, in order."""
    several: bool = False
    """Whether it returns a tuple or list of tensors."""
    floating: bool = True
    """Whether all results are floating point."""
    item: Any = None
    """The index, for `getitem` of a tuple."""
    opaque: str = ""
    """Why padding must not pass this op, such as aliasing writes or tensor subclasses; "" if it may."""
    role: str = "op"

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """The argument at `place`, or by its name."""
        if place < len(self.args):
            return self.args[place]
        return self.kwargs.get(name, default)

    def refs(self) -> tuple[str, ...]:
        """Names of the values that the call reads, each once, in order."""
        return tuple(dict.fromkeys(ref.name for ref in leaves((self.args, tuple(self.kwargs.values()))) if isinstance(ref, Ref)))


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists, dicts and slices."""
    if isinstance(value, tuple | list):
        for inner in value:
            yield from leaves(inner)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value
