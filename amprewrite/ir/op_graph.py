"""The neutral op graph: what every deciding pass reads, whatever the model came from.

A vertex is one op with its facts; an edge carries an fp32 tensor from the op that makes it to the op that reads it.
Integers, booleans and other dtypes travel on no edge: they are never cast.
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
    """Which dtype an op wants of one of its operands."""

    COLOUR = "colour"
    """The dtype of the op's own colour."""
    PROMOTE = "promote"
    """As COLOUR, but the kernel promotes mixed operands itself, so a low one may stand beside a high one."""
    HIGH = "high"
    """What it was before the rewrite, whatever the op's colour."""
    ANY = "any"
    """Either: the op reads both (comparisons, shapes, fp32 parameters beside low data)."""


@dataclass(frozen=True)
class Operand:
    """One fp32 tensor read by an op."""

    value: str
    """Name of the node that makes it."""
    demand: Demand
    scalar: bool = False
    """A 0-dim tensor: it takes no part in promotion beside tensors with dims."""
    write_version: int = 0
    """How many in-place writes its memory had seen when it was read: copies are shared within a write version only."""
    summand: bool = False
    """The op only adds it to a product of its other operands."""
    twice: bool = False
    """It is read in two places or more, as in `y * y`."""


@dataclass(frozen=True)
class OpNode:
    """One op and its facts. Frozen: passes decide about it, they never change it."""

    name: str
    op: str
    """ATen base name, or the role for what is no op: input, parameter, buffer, constant, output."""
    kind: OpKind | None = None
    """What the lists say; None: on no list."""
    operands: tuple[Operand, ...] = ()
    dtype: str = ""
    """Of the result: fp32, int64, …; several different ones joined by a plus; empty for none."""
    shape: tuple[int | str, ...] = ()
    numel: int = 0
    """Elements of the result; symbolic sizes count by their hint."""
    flops: int = 0
    device: str = "cpu"
    module: str = ""
    """Path of the module it was called in, "" for the root."""
    source: str = ""
    """file:line of the model's code."""
    role: str = "op"
    pinned: tuple[Colour, Reason, str] | None = None
    """Colour that facts force, with reason and detail; None if lists and passes decide."""
    precision_group: str = ""
    """Nodes with the same non-empty tie share memory or come out of one kernel: one colour for all."""
    relative: bool = False
    """A cast to a dtype that the model computes from another tensor: it may go low even behind a denied op."""
    may_saturate: bool = False
    """Holds finite constants beyond the low format's range, such as a finite-minimum mask."""
    counted: str = ""
    """The value that counts something and would be rounded, if the op is a product of such (`ir/evidence/counts.py`)."""

    @property
    def carries_fp32(self) -> bool:
        return self.dtype == "fp32"

    @cached_property
    def promoted(self) -> tuple[Operand, ...]:
        """Operands with dims that the op's kernel promotes itself if their formats differ."""
        return tuple([o for o in self.operands if o.demand is Demand.PROMOTE and not o.scalar])


def _empty() -> nx.DiGraph:
    import networkx as nx  # takes a tenth of what torch takes, and reading a plan needs no graph

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
        """The vertex that `name` is a view or a plain function of: behind harmless ops that read one value."""
        node = self[name]
        while node.role == "op" and node.kind is OpKind.CLEAR and len(node.operands) == 1:
            node = self[node.operands[0].value]
        return node

    def exchanged(self, nodes: Mapping[str, OpNode]) -> OpGraph:
        """The graph with other facts about some of its vertices; edges stay."""
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
        """Groups of nodes that must share a colour, by tie name."""
        groups: dict[str, list[str]] = {}
        for node in self:
            if node.precision_group:
                groups.setdefault(node.precision_group, []).append(node.name)
        return groups


def wanted(node: OpNode, colour: Colour) -> Iterator[tuple[Operand, Colour]]:
    """For each operand that has to fit a node run in `colour`: the colour that its kernel computes in.

    0-dim operands of a promoting op fit as they are, unless all of them are 0-dim.
    """
    free_scalars = any(not o.scalar and o.demand in (Demand.PROMOTE, Demand.COLOUR) for o in node.operands)
    for operand in node.operands:
        if operand.demand is Demand.ANY or (operand.demand is Demand.PROMOTE and operand.scalar and free_scalars):
            continue
        high = operand.demand is Demand.HIGH or colour is not Colour.LOW
        yield operand, Colour.HIGH if high else Colour.LOW


def anchor(node: OpNode, nodes: Mapping[str, OpNode]) -> Operand | None:
    """The operand of a promoting op that is cast if it runs high and all arrive low: the smallest, the first on a tie."""
    return min(node.promoted, key=lambda o: nodes[o.value].numel, default=None)


def resolved(
    node: OpNode, colour: Colour, colours: Mapping[str, Colour], nodes: Mapping[str, OpNode]
) -> Iterator[tuple[Operand, Colour]]:
    """For each operand of `node` run in `colour`: the colour it must arrive in, if that differs from what it is.

    A promoting op that runs high keeps low operands as they are beside a high one with dims; where all are low its anchor is
    cast, and promotion does the rest.
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
