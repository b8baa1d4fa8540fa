"""Calls of ops that are alike, and what they give on fake tensors, asked once: the blocks of a network repeat the first one's.

Calls are alike if they have the same op, the same plain arguments, and tensors that are alike in dtype, device, sizes, strides and offset.
What the first gave is given again, the very object, without a call: an op with sizes that are not fixed takes milliseconds.
The nodes that are given one object do not share its memory, so where each lies is noted on it (`MEMORY` in its meta).

Nothing is given again that may be changed or differ: what is known by value, what is computed under the model's own autocast, or anything
in a graph with sizes that only data tell, or where an op in place may change the sizes of what it writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import (
    MEMORY,
    NO_TREE,
    comparable,
    example_value,
    is_opaque,
    memory_of,
    named_arguments,
    storages,
    written,
)
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.torch_internals.dispatch import FakeTensor

_PLAIN = NO_TREE | {complex, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}
"""Classes of arguments that are told apart by their value."""
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _NotAlike(Exception):
    """An argument of which nobody can say what it is like."""


@dataclass(frozen=True)
class _Given:
    """What a call gave, and which of the nodes it reads lie in the same memory, by place."""

    value: Any
    aliases: tuple[int, ...]
    own: bool
    """Some of it lies in memory that no operand lies in."""


class Alike:
    """Tells which calls of a graph are alike."""

    def __init__(self) -> None:
        self._forms: dict[Hashable, int] = {}
        self._form_of: dict[int, tuple[torch.Tensor, int]] = {}
        """The form of a tensor by its id, and the tensor, which must stay alive for that."""

    def key(self, node: torch.fx.Node, value_of: Callable[[torch.fx.Node], Any] = example_value) -> Hashable | None:
        """What calls that are alike have in common; None if that cannot be said. `value_of` gives the values of operands."""

        def like(argument: Any) -> Hashable:
            if isinstance(argument, torch.fx.Node):
                return like(value_of(argument))
            if isinstance(argument, torch.Tensor):
                return torch.Tensor, self._form(argument)
            if isinstance(argument, _SIZES):
                return type(argument), argument.node.expr
            if isinstance(argument, tuple | list):
                return type(argument), tuple(map(like, argument))
            if isinstance(argument, slice):
                return slice, like((argument.start, argument.stop, argument.step))
            if type(argument) not in _PLAIN:
                raise _NotAlike
            return type(argument), argument

        try:
            return node.target, like(node.args), tuple((name, like(value)) for name, value in node.kwargs.items())
        except _NotAlike:
            return None

    def _form(self, tensor: torch.Tensor) -> int:
        """A number that tensors have in common which no op tells apart."""
        known = self._form_of.get(id(tensor))
        if known is None:
            if type(tensor) is not FakeTensor or tensor.layout != torch.strided or tensor.is_nested:
                raise _NotAlike
            if tensor.constant is not None and tensor.numel():  # known by value
                raise _NotAlike
            sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
            plain = tuple(map(comparable, sizes))
            marks = (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad, tensor.is_inference())
            form = (tensor.dtype, tensor.device, tensor.dim(), plain, marks)
            known = self._form_of[id(tensor)] = tensor, self._forms.setdefault(form, len(self._forms))
        return known[1]


class RepeatedCalls:
    """The calls of one walk over a graph."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._off = any("unbacked_bindings" in node.meta or (written(node) and not _leaves_sizes(node)) for node in graph.nodes)
        self._given: dict[Hashable, _Given] = {}
        self._alike = Alike()
        self._shared: set[torch.fx.Node] = set()
        """Nodes whose value is that of others, too."""
        self._fresh = itertools.count(-1, -1)

    def give(self, node: torch.fx.Node, value_of: Callable[[torch.fx.Node], Any], run: Callable[[], Any]) -> Any:
        """What `run` gives for `node`, or what it gave for a call that was alike; `value_of` gives what the node reads."""
        operands: list[torch.fx.Node] = []
        torch.fx.map_arg((node.args, node.kwargs), operands.append)
        values = [value_of(operand) for operand in operands]
        writes = written(node)
        key = None if self._off or is_opaque(node) or writes else self._alike.key(node, value_of)
        given = None if key is None else self._given.get(key)
        if given is None:
            value = run()
            lies = storages(value)
            may_be = [place for place, operand in enumerate(operands) if not writes or operand in writes]  # others may have the same object
            aliases = tuple(place for place in may_be if lies & storages(values[place]))
            own = not lies <= {storage for place in aliases for storage in storages(values[place])}
            given = _Given(value, aliases, own)
            if key is not None and _may_be_given_again(value):
                self._given[key] = given
            if not any(operands[place] in self._shared for place in aliases):
                return value
        self._shared.add(node)
        memory = {storage for place in given.aliases for storage in memory_of(operands[place])}
        node.meta[MEMORY] = memory | ({next(self._fresh)} if given.own else set())
        return given.value


def _leaves_sizes(node: torch.fx.Node) -> bool:
    """Whether it is known that an op in place leaves the sizes and strides of what it writes, as those do not that transpose it."""
    if getattr(node.target, "__module__", "") in ("_operator", "operator") or "inplace" in named_arguments(node):
        return True
    packet = getattr(torch.ops.aten, op_name(node.target), None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())


def _may_be_given_again(value: Any) -> bool:
    """Whether a value is of plain tensors alone."""
    found = value if isinstance(value, tuple | list) else [value]
    return all(type(each) is FakeTensor and each.constant is None for each in found)


__all__ = ["Alike", "RepeatedCalls"]
