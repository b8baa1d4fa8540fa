"""The op graph, which passes read to decide what runs low. It has the same form for PyTorch graphs and ONNX files.

A node is one op with its kind, dtype, shape and other properties. An edge stands for an fp32 tensor. It leads from the op that makes the
tensor to an op that reads it. Tensors of other dtypes have no edge, since they are never cast.

To plan padding, passes also need arguments of ops, such as the dim of a softmax or the new shape of a view. A `Call` holds the arguments
and shapes of an op as plain data, in which tensors are given by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from amprewrite.tables.vocabulary import Colour, OpKind, Reason

if TYPE_CHECKING:
    import networkx as nx

Vertex = TypeVar("Vertex", bound=Hashable)


class Demand(Enum):
    """The dtype in which an op needs one of its operands."""

    COLOUR = "colour"
    """The dtype in which the op runs: the low format if its colour is low, fp32 if its colour is high."""
    PROMOTE = "promote"
    """Like COLOUR, but the kernel promotes mixed operands itself: a low operand may stay low next to a high operand."""
    HIGH = "high"
    """fp32, the dtype that the operand had before the rewrite, whatever the op's colour."""
    ANY = "any"
    """Either dtype. Examples: operands that are compared, or read for their shape, and fp32 parameters of an op with low data."""


@dataclass(frozen=True)
class Operand:
    """An fp32 tensor that an op reads, and the way in which the op reads it."""

    value: str
    """Name of the node that makes the tensor."""
    demand: Demand
    scalar: bool = False
    """Whether the operand is a 0-dim tensor, which tensors with dims outrank in type promotion."""
    write_version: int = 0
    """Version of the tensor: each write to its memory makes a new version, and so does a change of the grad mode. Readers share a cast only
    within one version."""
    summand: bool = False
    """Whether the op only adds this operand to a product of its other operands, as `addmm` does with its first."""
    twice: bool = False
    """Whether the op takes this tensor as two or more arguments, as in `y * y`."""


@dataclass(frozen=True)
class OpNode:
    """A node of the op graph: an op, or an input, weight or output. Passes decide about a node and never change it."""

    name: str
    op: str
    """ATen base name; for a node that is no op, its role: input, parameter, buffer, constant, output."""
    kind: OpKind | None = None
    """Kind of the op in the op lists (allow, deny, ...); None if the op is on no list."""
    operands: tuple[Operand, ...] = ()
    dtype: str = ""
    """Dtype of the result: fp32, int64, …; the dtypes of several results are joined by a plus; "" if the result is no tensor."""
    shape: tuple[int | str, ...] = ()
    numel: int = 0
    """Number of elements of the result. Symbolic sizes count with their value at capture."""
    flops: int = 0
    """FLOPs of one forward if the op is a product of tensors; otherwise 0."""
    device: str = "cpu"
    module: str = ""
    """Path of the module that calls the op, "" for the root."""
    source: str = ""
    """Line of the model's code that calls the op, as "file.py:12"; "" if unknown."""
    role: str = "op"
    """"op", or "input", "parameter", "buffer", "constant" or "output" for a node that is no op."""
    pinned: tuple[Colour, Reason, str] | None = None
    """(colour, reason, detail) if the node's colour is fixed in advance, as by an explicit dtype; None if op lists and passes decide."""
    precision_group: str = ""
    """Name of the precision group of the node; "" for none. Nodes of a group share memory or a kernel, so they must have one colour."""
    relative: bool = False
    """Whether the op is a cast to the dtype of another tensor, as `x.to(y.dtype)` is. Ops on the deny list upstream do not make it fp32."""
    may_saturate: bool = False
    """Whether the result may hold finite constants beyond the low format's range, such as a mask filled with `finfo.min`."""
    counted: str = ""
    """Set if the node must be fp32 because the low format would round whole numbers, such as positions. For a matrix product: the name of
    an operand with such numbers. For an op that fills a tensor with one: the name of an op that reads the tensor. "" for other nodes."""

    @property
    def carries_fp32(self) -> bool:
        return self.dtype == "fp32"

    @cached_property
    def promoted(self) -> tuple[Operand, ...]:
        """The operands that the op's kernel promotes to one dtype, so that some may be low and others fp32. 0-dim tensors are left out."""
        return tuple([o for o in self.operands if o.demand is Demand.PROMOTE and not o.scalar])


def _empty() -> nx.DiGraph:
    import networkx as nx  # import networkx late: it is slow to import, and users who only read a plan need no graph

    return nx.DiGraph()


@dataclass
class OpGraph:
    """The nodes of one graph in canonical order (makers before readers), and a networkx graph of the edges between their names."""

    nodes: dict[str, OpNode] = field(default_factory=dict)
    digraph: nx.DiGraph = field(default_factory=_empty)
    rank: dict[str, int] = field(default_factory=dict)
    """Position of each node in the canonical order."""

    @classmethod
    def of(cls, nodes: Iterable[OpNode]) -> OpGraph:
        graph = cls()
        for node in nodes:
            graph.add(node)
        return graph

    def add(self, node: OpNode) -> None:
        self.nodes[node.name] = node
        self.rank[node.name] = len(self.rank)
        self.digraph.add_node(node.name)
        for operand in node.operands:
            self.digraph.add_edge(operand.value, node.name)

    def seen(self, name: str) -> OpNode:
        """Return the node that computed the elements of the value `name`, before views and similar ops passed them on.

        The search goes upstream from `name`. It skips ops of kind CLEAR (harmless in any precision, such as views) with one operand.
        """
        node = self[name]
        while node.role == "op" and node.kind is OpKind.CLEAR and len(node.operands) == 1:
            node = self[node.operands[0].value]
        return node

    def exchanged(self, nodes: Mapping[str, OpNode]) -> OpGraph:
        """Return a copy of the graph in which `nodes` replace the nodes of the same names. The edges stay the same."""
        return OpGraph(nodes={**self.nodes, **nodes}, digraph=self.digraph, rank=self.rank)

    def __iter__(self) -> Iterator[OpNode]:
        return iter(self.nodes.values())

    def __getitem__(self, name: str) -> OpNode:
        return self.nodes[name]

    def readers(self, name: str) -> Iterator[OpNode]:
        """Yield the nodes that read the result of the node `name`."""
        return map(self.nodes.__getitem__, self.digraph.successors(name))

    def feeders(self, name: str) -> Iterator[OpNode]:
        """Yield the nodes whose results the node `name` reads."""
        return map(self.nodes.__getitem__, self.digraph.predecessors(name))

    def precision_groups(self) -> dict[str, list[str]]:
        """Return {name of a precision group: names of its nodes}. Nodes of a group share memory or a kernel, so they run in one format."""
        groups: dict[str, list[str]] = {}
        for node in self:
            if node.precision_group:
                groups.setdefault(node.precision_group, []).append(node.name)
        return groups


def wanted(node: OpNode, colour: Colour) -> list[tuple[Operand, Colour]]:
    """Return (operand, the colour that it must have) for each operand of `node`, if `node` runs in `colour` (low or high).

    Operands that may have either format are left out, such as a 0-dim tensor if the op promotes mixed dtypes and another operand has dims.
    """
    found = []
    for operand in node.operands:
        if operand.demand is Demand.ANY or (operand.demand is Demand.PROMOTE and operand.scalar and _has_dims(node)):
            continue
        high = operand.demand is Demand.HIGH or colour is not Colour.LOW
        found.append((operand, Colour.HIGH if high else Colour.LOW))
    return found


def _has_dims(node: OpNode) -> bool:
    return any(not o.scalar and o.demand in (Demand.PROMOTE, Demand.COLOUR) for o in node.operands)


def anchor(node: OpNode, nodes: Mapping[str, OpNode]) -> Operand | None:
    """Return the one operand to cast if `node` runs in fp32 and all operands that it promotes are low; None if it promotes no operands.

    One fp32 operand is enough, because type promotion in the kernel then makes the whole computation fp32. The anchor is the smallest
    promoted operand, and the first of several that are equally small. `nodes` holds the nodes of the graph by name.
    """
    return min(node.promoted, key=lambda o: nodes[o.value].numel, default=None)


def resolved(node: OpNode, colour: Colour, colours: Mapping[str, Colour], nodes: Mapping[str, OpNode]) -> Iterator[tuple[Operand, Colour]]:
    """Yield (operand, colour to cast it to) for each operand of `node` that must be cast if `node` runs in `colour`.

    `colours` has the colour (low, high or plain) of each node. A kernel that promotes mixed dtypes computes in fp32 if one operand with
    dims is fp32. So if `node` runs in fp32, at most one operand that it promotes is cast: the `anchor`, and only if all are low.
    """
    mixing = node.promoted
    promotes = not mixing or any(colours[o.value] is not Colour.LOW for o in mixing)
    cast = None if promotes else anchor(node, nodes)
    for operand, want in wanted(node, colour):
        have = colours[operand.value]
        if want is have or have is Colour.PLAIN:
            continue
        if want is Colour.HIGH and operand in mixing and operand is not cast:
            continue
        yield operand, want


def reached(starts: Iterable[Vertex], step: Callable[[Vertex], Iterable[Vertex]]) -> Iterator[Vertex]:
    """Yield `starts` and all nodes that can be reached from them, each once, the nearest first (a breadth-first search).

    `step` returns the neighbours of a node of any kind of graph. It is called for a node after the node has been yielded.
    """
    known = dict.fromkeys(starts)
    waiting = deque(known)
    while waiting:
        node = waiting.popleft()
        yield node
        for near in step(node):
            if near not in known:
                known[near] = None
                waiting.append(near)


class Reaches(Generic[Vertex]):
    """A callable that takes a node of a graph and returns True if the node is a goal, or a goal can be reached from it.

    `step` returns the neighbours of a node, and `is_goal` tells if a node is a goal. Answers are cached, so that `step` is called at most
    once for each node. The graph must not change between calls.
    """

    def __init__(self, step: Callable[[Vertex], Iterable[Vertex]], is_goal: Callable[[Vertex], bool]) -> None:
        self.step, self.is_goal = step, is_goal
        self._known: dict[Vertex, bool] = {}

    def __call__(self, start: Vertex) -> bool:
        if start not in self._known:
            before: dict[Vertex, list[Vertex]] = {}

            def step(node: Vertex) -> Iterator[Vertex]:
                for near in () if node in self._known else self.step(node):
                    before.setdefault(near, []).append(node)
                    yield near

            found = list(reached([start], step))
            goals = [node for node in found if (self._known[node] if node in self._known else self.is_goal(node))]
            good = set(reached(goals, lambda node: before.get(node, ())))
            self._known |= {node: node in good for node in found}
        return self._known[start]


class DisjointSets(Generic[Vertex]):
    """Disjoint sets (union-find) of the nodes of any kind of graph: `join` merges two sets, `find` returns the representative of a set."""

    def __init__(self) -> None:
        self.parent: dict[Vertex, Vertex] = {}

    def find(self, node: Vertex) -> Vertex:
        self.parent.setdefault(node, node)
        while self.parent[node] != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def join(self, one: Vertex, other: Vertex) -> None:
        self.parent[self.find(one)] = self.find(other)


Size = int | str
"""Extent of a dim: an int, or the name of a symbolic size."""
Shape = tuple[Size, ...]


@dataclass(frozen=True)
class Ref:
    """An argument of a `Call` that is a value of the graph, such as a tensor. `name` is the name of the node that makes the value."""

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
    """Return the leaves of nested tuples, lists, dicts and slices, in order. A value of any other type is a leaf."""
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
