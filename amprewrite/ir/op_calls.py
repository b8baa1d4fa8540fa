"""Calls of ops with their arguments and shapes as plain data, for passes that need to know about dims. Tensors are given by name.

The op graph holds only the edges between fp32 values. Padding needs more, such as the dim of a softmax or the new shape of a view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Size = int | str
"""Extent of a dim: an int, or the name of a symbolic size."""
Shape = tuple[Size, ...]


@dataclass(frozen=True)
class Ref:
    """An argument of a call that is a tensor or another value made in the graph."""

    name: str


@dataclass(frozen=True)
class Call:
    """One call of an op, with its arguments and the shapes of its results."""

    name: str
    """Name of the call's node in the op graph."""
    op: str
    """ATen base name; for a node that is no op, its role (see `OpNode.role`)."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[Shape, ...] = ()
    """Shapes of the tensors that the call returns, in order; () if it returns no tensor."""
    several: bool = False
    """Whether the call returns a tuple or list of tensors instead of a single tensor."""
    floating: bool = True
    """Whether all results are floating point."""
    item: Any = None
    """The index that the call takes, if the call is a `getitem` of a tuple; otherwise None."""
    opaque: str = ""
    """The reason why this op must not read or return padded tensors, such as aliasing writes or tensor subclasses; "" if it may."""
    role: str = "op"

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """Return the positional argument at `place`, otherwise the keyword argument `name`, otherwise `default`."""
        if place < len(self.args):
            return self.args[place]
        return self.kwargs.get(name, default)

    def refs(self) -> tuple[str, ...]:
        """Return the names of the values that the call reads, each once, in the order of the arguments."""
        return self._refs

    @cached_property
    def _refs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(ref.name for ref in leaves((self.args, tuple(self.kwargs.values()))) if isinstance(ref, Ref)))


def leaves(value: Any) -> list[Any]:
    """Return the leaves of nested tuples, lists, dicts and slices. Anything else is a leaf."""
    found, waiting = list[Any](), [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, tuple | list):
            waiting += reversed(each)
        elif isinstance(each, dict):
            waiting += reversed(each.values())
        elif isinstance(each, slice):
            found += (each.start, each.stop, each.step)
        else:
            found.append(each)
    return found
