"""Reuse the result of an op call on fake tensors for later calls that are alike, because the blocks of a network repeat the same calls.

Calls are alike if they have the same op, the same plain arguments, and tensors of the same dtype, device, sizes, strides and offset. A
later call returns the fake tensor object of the first call. Its op does not run, which saves milliseconds for an op with symbolic sizes.
In a real run the results of such calls have separate memory, so each node records its own memory (`MEMORY` in its meta).

Unless the graph is padded, the rewrite changes only dtypes. Sizes and strides of a result are known from capture, and the op runs only to
find its dtype. So an op with symbolic sizes runs on plain ints (the sizes at capture), which is faster. If its result is new memory, later
calls that differ only in sizes reuse this dtype and do not run.

Some values are not reused, because they may change, or may differ between calls that are alike: values known at capture, values computed
under the model's own autocast, and all values of a graph that has data-dependent sizes, or an in-place op that may resize a tensor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import (
    FRESH,
    MEMORY,
    NO_TREE,
    comparable,
    example_value,
    hint,
    hints,
    is_opaque,
    memory_of,
    named_arguments,
    sized,
    storages,
    written,
)
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.torch_internals.dispatch import FakeTensor

_PLAIN = NO_TREE | {complex, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}
"""Classes of arguments that are compared by value."""
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _NotAlike(Exception):
    """Raised for an argument of a call that cannot be compared with arguments of other calls."""


@dataclass(frozen=True)
class _Given:
    """The result of a call, kept for later calls that are alike. `aliases` are the positions of the operands that share its memory."""

    value: Any
    aliases: tuple[int, ...]
    own: bool
    """True if a part of the result is in memory that belongs to no operand."""


def _sizes(tensor: torch.Tensor) -> Hashable:
    return tuple(map(comparable, (*tensor.shape, *tensor.stride(), tensor.storage_offset())))


def _order(tensor: torch.Tensor) -> Hashable:
    """Return a key of the memory layout of `tensor`: the order of its dims, innermost first, or sizes and strides if it has gaps."""
    sizes, strides = hints(tensor), tuple(map(hint, tensor.stride()))
    dense = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) == math.prod(sizes)
    return tuple(sorted(range(len(sizes)), key=strides.__getitem__)) if dense else _sizes(tensor)


class Alike:
    """Compares op calls of a graph: `key` is equal for calls with the same op, plain arguments, and dtypes and layouts of tensors."""

    def __init__(self, layout: Callable[[torch.Tensor], Hashable] = _sizes) -> None:
        """`layout` returns the part of the sizes and strides of a tensor that must be equal in calls that are alike."""
        self._layout = layout
        self._forms: dict[Hashable, int] = {}
        self._form_of: dict[int, tuple[torch.Tensor, int]] = {}
        """(tensor, number of its form), by the id of the tensor. Holding the tensor keeps its id from being reused."""

    def key(self, node: torch.fx.Node, value_of: Callable[[torch.fx.Node], Any] = example_value) -> Hashable | None:
        """Return a key that is equal for calls that are alike; None if the call cannot be compared. `value_of` gives operands' values."""

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
        """Return a number for the form of `tensor`: dtype, device, flags and memory layout. Equal forms have equal numbers.

        Raises _NotAlike if `tensor` is not a strided fake tensor, or if its value is known: then its form does not describe it fully.
        """
        known = self._form_of.get(id(tensor))
        if known is None:
            if not _is_plain(tensor):
                raise _NotAlike
            marks = (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad, tensor.is_inference())
            form = (tensor.dtype, tensor.device, tensor.dim(), self._layout(tensor), marks)
            known = self._form_of[id(tensor)] = tensor, self._forms.setdefault(form, len(self._forms))
        return known[1]


def _is_plain(value: Any) -> bool:
    """True if `value` is a strided fake tensor whose numbers capture does not know, so that no result can depend on them."""
    strided = type(value) is FakeTensor and value.layout == torch.strided and not value.is_nested
    return strided and (value.constant is None or not value.numel())


def _differ_in_dtype(made: Any, captured: Any) -> bool:
    """True if `made` and `captured` can differ in dtype only: sizes are equal, and so are strides, except in dims of size one."""
    alike = _is_plain(made) and _is_plain(captured) and hints(made) == hints(captured)
    strides = zip(hints(made), made.stride(), captured.stride(), strict=True) if alike else ()
    return alike and all(size == 1 or hint(own) == hint(other) for size, own, other in strides)


class Answers:
    """Caches a function of the op calls of one graph. Calls that are alike (`Alike`), as in repeated layers of a model, share a result."""

    def __init__(self, ask: Callable[[torch.fx.Node], Any], value_of: Callable[[torch.fx.Node], Any] = example_value) -> None:
        """`ask(node)` is the cached function. It may read only the op, plain arguments, and `value_of(operand)` of each operand node."""
        self._ask, self._value_of = ask, value_of
        self._alike, self._known = Alike(), dict[Hashable, Any]()

    def __call__(self, node: torch.fx.Node) -> Any:
        key = self._alike.key(node, self._value_of) or node
        if key not in self._known:
            self._known[key] = self._ask(node)
        return self._known[key]


class RepeatedCalls:
    """Reuses results of op calls on fake tensors for later calls in one graph with the same op, arguments, and dtypes and sizes."""

    def __init__(self, graph: torch.fx.Graph, padded: bool = False) -> None:
        """`padded` is True if padding may give values of the graph other sizes than at capture."""
        self._off = any("unbacked_bindings" in node.meta or (written(node) and not _leaves_sizes(node)) for node in graph.nodes)
        self._given: dict[Hashable, _Given] = {}
        self._alike, self._alike_but_for_sizes = Alike(), Alike(_order)
        self._dtype_of_kind: dict[Hashable, torch.dtype] = {}
        self._sized = not padded and not self._off
        self._symbolic = self._sized and any(isinstance(example_value(node), torch.SymInt) for node in graph.nodes)
        self._shared = {node for node in graph.nodes if MEMORY in node.meta}
        """Nodes whose fake value does not show which memory the result has in a real run. Their meta records it (MEMORY)."""

    def give(self, node: torch.fx.Node, value_of: Callable[[torch.fx.Node], Any], run: Callable[[Any], Any]) -> Any:
        """Return the fake value of `node`: the value of an earlier call that is alike, if there is one, otherwise a newly computed value.

        `value_of(operand)` returns the value of an operand node. `run({operand: value})` runs the op. If the returned value does not show
        which memory the result has in a real run (a reused value does not), `node.meta[MEMORY]` records this memory.
        """
        operands: list[torch.fx.Node] = []
        torch.fx.map_arg((node.args, node.kwargs), operands.append)
        writes = written(node)
        key = None if self._off or is_opaque(node) or writes else self._alike.key(node, value_of)
        given, captured = None if key is None else self._given.get(key), example_value(node)
        by_kind = self._sized and key is not None and given is None and _is_plain(captured)
        kind = (self._alike_but_for_sizes.key(node, value_of), _order(captured)) if by_kind else None
        if kind in self._dtype_of_kind:
            value = captured.new_empty_strided(captured.shape, captured.stride(), dtype=self._dtype_of_kind[kind])
            given = self._given[key] = _Given(value, (), True)
        if given is None:
            values = read = {operand: value_of(operand) for operand in operands}
            made: Any = None
            if self._symbolic and _is_plain(captured) and not writes and not is_opaque(node):
                read = {operand: sized(operand) for operand in operands}
                with contextlib.suppress(Exception):  # ignore an error: the op then runs on symbolic sizes below, and may raise it there
                    made = run(read)
            if _differ_in_dtype(made, captured):
                value = captured.new_empty_strided(captured.shape, captured.stride(), dtype=made.dtype)
            else:
                read, value = values, (made := run(values))
            lies = storages(made)
            # The result of an in-place op shares memory only with the operands that the op writes. An operand that the op only reads may
            # have the same fake tensor as a written operand, because `give` reuses fake tensors, but in a real run it has other memory.
            may_be = [place for place, operand in enumerate(operands) if not writes or operand in writes]
            aliases = tuple(place for place in may_be if lies & storages(read[operands[place]]))
            own = not lies <= {storage for place in aliases for storage in storages(read[operands[place]])}
            given = _Given(value, aliases, own)
            if key is not None and all(map(_is_plain, value if isinstance(value, tuple | list) else [value])):
                self._given[key] = given
            if by_kind and own and not aliases and _differ_in_dtype(made, captured):
                self._dtype_of_kind[kind] = made.dtype
            if read is values and self._shared.isdisjoint((node, *(operands[place] for place in aliases))):
                return value
        self._shared.add(node)
        memory = {storage for place in given.aliases for storage in memory_of(operands[place])}
        node.meta[MEMORY] = memory | ({next(FRESH)} if given.own else set())
        return given.value


def _leaves_sizes(node: torch.fx.Node) -> bool:
    """True if the in-place op of `node` is known to keep the sizes and strides of its target. In-place transposes do not keep them."""
    if getattr(node.target, "__module__", "") in ("_operator", "operator") or "inplace" in named_arguments(node):
        return True
    packet = getattr(torch.ops.aten, op_name(node.target), None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())
