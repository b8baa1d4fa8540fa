"""The op graph that deciding passes read, the same for PyTorch graphs and ONNX files.

A vertex is one op with its facts. An edge is an fp32 tensor, from the op that makes it to the op that reads it.
Integers, booleans and other dtypes have no edge, since they are never cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from amprewrite.tables.vocabulary import Colour, OpKind, Reason

if TYPE_CHECKING:
    import networkx as nx


class Demand(Enum):
    """The dtype that an op needs for one of its operands."""

    COLOUR = "colour"
    """The dtype of the op's own colour."""
    PROMOTE = "promote"
    """Like COLOUR, but the kernel promotes mixed operands itself: a low operand may stay low next to a high one."""
    HIGH = "high"
    """The dtype before the rewrite, whatever the op's colour."""
    ANY = "any"
    """Either dtype: comparisons, shapes, fp32 parameters of an op with low data."""


@dataclass(frozen=True)
class Operand:
    """One fp32 tensor read by an op."""

    value: str
    """Name of the node that makes it."""
    demand: Demand
    scalar: bool = False
    """Whether it is a 0-dim tensor, which tensors with dims outrank in type promotion."""
    write_version: int = 0
    """Number of in-place writes to its memory before this read. Readers share a copy only within one write version."""
    summand: bool = False
    """Whether the op only adds it to a product of its other operands."""
    twice: bool = False
    """Whether the op takes it as two or more arguments, as in `y * y`."""


@dataclass(frozen=True)
class OpNode:
    """One op and its facts. Frozen: passes decide on it and never change it."""

    name: str
    op: str
    """ATen base name; for a vertex that is no op, its role: input, parameter, buffer, constant, output."""
    kind: OpKind | None = None
    """The list that the op is on; None if it is on none."""
    operands: tuple[Operand, ...] = ()
    dtype: str = ""
    """Dtype of the result: fp32, int64, …; several dtypes are joined by a plus; "" without a tensor."""
    shape: tuple[int | str, ...] = ()
    numel: int = 0
    """Elements of the result. Symbolic sizes count by their hint."""
    flops: int = 0
    device: str = "cpu"
    module: str = ""
    """Path of the module that calls it, "" for the root."""
    source: str = ""
    """file:line of the model's code."""
    role: str = "op"
    pinned: tuple[Colour, Reason, str] | None = None
    """Colour that facts force, with reason and detail; None if lists and passes decide."""
    precision_group: str = ""
    """Name of its precision group; "" for none. Nodes of a group share memory or a kernel, and so have one colour."""
    relative: bool = False
    """Whether it is a cast to a dtype that the model takes from another tensor. Such a cast may be low even after a denied op."""
    may_saturate: bool = False
    """Whether it holds finite constants beyond the low format's range, such as a mask of finite minimums."""
    counted: str = ""
    """For a product of counts: the count that a low format would round (`ir/evidence/counts.py`)."""

    @property
    def carries_fp32(self) -> bool:
        return self.dtype == "fp32"

    @cached_property
    def promoted(self) -> tuple[Operand, ...]:
        """The operands with dims that the op's kernel promotes itself if their formats differ."""
        return tuple([o for o in self.operands if o.demand is Demand.PROMOTE and not o.scalar])


def _empty() -> nx.DiGraph:
    import networkx as nx  # the import takes a tenth of torch's, and reading a plan needs no graph

    return nx.DiGraph()


@dataclass
class OpGraph:
    """Op vertices in a canonical order, and the networkx graph over their names."""

    nodes: dict[str, OpNode] = field(default_factory=dict)
    digraph: nx.DiGraph = field(default_factory=_empty)
    rank: dict[str, int] = field(default_factory=dict)
    """Place of each vertex in the canonical order."""

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
        """The first vertex, from `name` upstream, that is not a clear op with one operand: the source of its values."""
        node = self[name]
        while node.role == "op" and node.kind is OpKind.CLEAR and len(node.operands) == 1:
            node = self[node.operands[0].value]
        return node

    def exchanged(self, nodes: Mapping[str, OpNode]) -> OpGraph:
        """The graph with these vertices replaced. The edges stay the same."""
        return OpGraph(nodes={**self.nodes, **nodes}, digraph=self.digraph, rank=self.rank)

    def __iter__(self) -> Iterator[OpNode]:
        return iter(self.nodes.values())

    def __getitem__(self, name: str) -> OpNode:
        return self.nodes[name]

    def readers(self, name: str) -> Iterator[OpNode]:
        """Ops that read the result of `name`."""
        return (self.nodes[reader] for reader in self.digraph.successors(name))

    def feeders(self, name: str) -> Iterator[OpNode]:
        """Ops whose results `name` reads."""
        return (self.nodes[feeder] for feeder in self.digraph.predecessors(name))

    def precision_groups(self) -> dict[str, list[str]]:
        """Names of the nodes of each precision group, which share one colour."""
        groups: dict[str, list[str]] = {}
        for node in self:
            if node.precision_group:
                groups.setdefault(node.precision_group, []).append(node.name)
        return groups


def wanted(node: OpNode, colour: Colour) -> Iterator[tuple[Operand, Colour]]:
    """For each operand whose format matters to a node run in `colour`: the colour in which the kernel computes with it.

    A promoting op takes 0-dim operands in any format, unless all of its operands are 0-dim.
    """
    free_scalars = any(not o.scalar and o.demand in (Demand.PROMOTE, Demand.COLOUR) for o in node.operands)
    for operand in node.operands:
        if operand.demand is Demand.ANY or (operand.demand is Demand.PROMOTE and operand.scalar and free_scalars):
            continue
        high = operand.demand is Demand.HIGH or colour is not Colour.LOW
        yield operand, Colour.HIGH if high else Colour.LOW


def anchor(node: OpNode, nodes: Mapping[str, OpNode]) -> Operand | None:
    """The operand that is cast if a promoting op runs high and all its operands are low: the smallest, the first on a tie."""
    return min(node.promoted, key=lambda o: nodes[o.value].numel, default=None)


def resolved(
    node: OpNode, colour: Colour, colours: Mapping[str, Colour], nodes: Mapping[str, OpNode]
) -> Iterator[tuple[Operand, Colour]]:
    """The operands of `node` that must be cast if it runs in `colour`, each with the colour that it is cast to.

    A promoting op that runs high reads low operands without a cast if another operand with dims is high. If all are low, its anchor
    alone is cast, and type promotion does the rest.
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
