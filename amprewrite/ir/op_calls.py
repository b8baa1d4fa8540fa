"""How each op was called, for the passes that look at dims: arguments and shapes as plain data, tensors by name.

The op graph carries who reads whom in fp32. Padding must know more: which dim a softmax runs over, how a view splits a dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Size = int | str
"""Extent of a dim; a string where it is symbolic."""
Shape = tuple[Size, ...]


@dataclass(frozen=True)
class Ref:
    """A tensor, or another value made in the graph, among the arguments of a call."""

    name: str


@dataclass(frozen=True)
class Call:
    """One op as it was called."""

    name: str
    """Name of its vertex."""
    op: str
    """ATen base name, or the role of what is no op."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[Shape, ...] = ()
    """Shapes of the tensors it gives, in order."""
    several: bool = False
    """Gives a tuple or list of tensors."""
    floating: bool = True
    """All it gives is floating point."""
    item: Any = None
    """For `getitem` of a tuple: which one."""
    opaque: str = ""
    """Why nothing may be padded through it, where facts forbid it: aliasing writes, tensor subclasses."""
    role: str = "op"

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """The argument at `place`, or by its name."""
        if place < len(self.args):
            return self.args[place]
        return self.kwargs.get(name, default)

    def refs(self) -> tuple[str, ...]:
        """Names of the values it reads, each once, in order."""
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
