"""A captured fx graph with the problem that was read from it, and the copy of it that passes edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx

from amprewrite.graphs.fx.node_facts import kept_meta
from amprewrite.graphs.fx.weights.frozen_weight import FrozenWeight
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.ir.evidence.counts import Count
from amprewrite.ir.op_calls import Call
from amprewrite.ir.plans.pad_plan import Layout
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.ir.problem import Problem
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import OpLists
from amprewrite.tables.vocabulary import Reason
from amprewrite.torch_internals.graph_modules import LazyGraphModule

Hoisted = tuple[int, torch.dtype, Layout]
"""A low copy of a weight: position of the weight among the inputs, dtype of the copy, its padded layout."""
Widened = tuple[int, torch.dtype, int | None]
"""A result that is cast after the graph: its position, its dtype then, and the position of the scale for its gradient among the inputs."""


@dataclass
class Captured:
    """A captured graph. `module` is never edited; `problem` is replaced when more becomes known."""

    problem: Problem
    module: torch.fx.GraphModule
    nodes: dict[str, torch.fx.Node]
    """The fx node of each vertex of the problem's graph."""
    match_given: Callable[[Problem], RegionPlan] | None = None
    """Finds the plan to follow for a graph inside this one."""
    parts: dict[torch.fx.Node, Captured] = field(default_factory=dict)
    """The bodies of activation checkpoints, for a caller that runs them one by one."""
    given: dict[str, str] = field(default_factory=dict)
    """For a graph inside another: the outer value of each input, by vertex."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Root mean squares of learnt numbers that may scale a value, by vertex."""
    counts: Mapping[torch.fx.Node, Count] = field(default_factory=dict)
    """Kind of count of each value."""
    left_bodies: dict[str, tuple[Reason, str]] = field(default_factory=dict)
    """Inner graphs that are not rewritten, with the reason. The key "" stands for all of them."""
    by_autocast: Captured | None = None
    """The same graph read by torch.autocast's lists, for a comparison."""
    tried: bool = False
    """True if a plan of it has passed a run on fake tensors, so that deciding alone gives the plan."""

    def know(self, **facts: Any) -> None:
        """Replace the problem by one with these `facts`, which are fields of `Problem`."""
        self.problem = replace(self.problem, **facts)

    def note(self, text: str) -> None:
        """Add a line to the notes of every plan of this graph, once."""
        if text not in self.problem.notes:
            self.know(notes=(*self.problem.notes, text))

    def with_parts(self) -> Iterator[Captured]:
        """Yield this graph, the bodies of its checkpoints, and the bodies of checkpoints in them."""
        yield self
        for part in self.parts.values():
            yield from part.with_parts()

    @property
    def names(self) -> dict[torch.fx.Node, str]:
        """The vertex of each fx node."""
        return {node: name for name, node in self.nodes.items()}

    @property
    def results(self) -> dict[int, str]:
        """The vertices that the graph returns, by position among its results."""
        output, names = next(node for node in self.nodes.values() if node.op == "output"), self.names
        given = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
        given = given[0] if given and isinstance(given[0], tuple | list) else given  # an autograd Function returns its saved values, too
        return {place: names[each] for place, each in enumerate(given) if isinstance(each, torch.fx.Node) and each in names}


@dataclass(frozen=True)
class Reading:
    """Settings for reading a captured graph, used by the normalising passes."""

    lists: OpLists
    low: Format
    training: bool
    """Read as a graph with gradients."""
    grad: bool = True
    """True if gradients are on where a graph with gradients begins."""


@dataclass(frozen=True)
class Target:
    """Settings for making an edited graph callable, used by the lowering passes."""

    eager: bool
    """True if the graph runs without a compiler."""
    training: bool
    """True if the graph was captured with gradients."""
    weight_cache: WeightCache | None
    """Cache that makes its low copies of weights; None if the graph casts each weight where it reads it."""
    blocks: Sequence[Sequence[str]] = ()
    """Weights that share an autograd node in training, by their names in the plan."""
    frozen: Mapping[int, FrozenWeight] = field(default_factory=dict)
    """The frozen weights among its inputs, by position."""


@dataclass
class EditedGraph:
    """The copy of a captured graph that applying passes edit by a plan."""

    module: torch.fx.GraphModule
    nodes: dict[str, torch.fx.Node]
    """The fx node of each vertex."""
    calls: Mapping[str, Call] = field(default_factory=dict)
    """The calls of every op, read only if something may be padded."""
    hoisted: list[Hoisted] = field(default_factory=list)
    """The low copies of weights that the graph takes after its captured inputs."""
    stored: list[Hoisted] = field(default_factory=list)
    """The low copies of frozen weights that it takes as its last inputs."""
    widened: list[Widened] = field(default_factory=list)
    """The results that are returned low and cast after the graph."""
    cast_up: list[int] = field(default_factory=list)
    """Positions of frozen weights that it takes low and reads in fp32."""

    @property
    def names(self) -> dict[torch.fx.Node, str]:
        """The vertex of each fx node."""
        return {node: name for name, node in self.nodes.items()}

    @classmethod
    def of(cls, captured: Captured) -> EditedGraph:
        """A copy of the captured graph; tensors and sub-modules are shared."""
        module, copies = copy_graph(captured.module)
        return cls(module, {name: copies[node] for name, node in captured.nodes.items()}, captured.problem.calls)


def put_inputs_first(graph: torch.fx.Graph) -> None:
    """Move the inputs of a graph to its front, in their order. Dynamo of torch 2.11 adds symbols after ops that read them."""
    first = next(iter(graph.nodes))
    for node in graph.find_nodes(op="placeholder"):
        if node is first:
            first = first.next
        else:
            first.prepend(node)


def copy_graph(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, torch.fx.Node]]:
    """(copy of a graph, {node: its copy}). Tensors and sub-modules are shared.

    The copy generates its code when it is first asked for: passes edit it several times, and only read the graph.
    """
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph = torch.fx.Graph()
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = kept_meta(node.meta)
    graph._codegen = module.graph._codegen
    copied = LazyGraphModule(module, graph, type(module).__name__)
    copied.meta.update(module.meta)
    for attribute in ("_param_name_to_source", "compile_subgraph_reason"):
        if hasattr(module, attribute):  # mark a graph of Dynamo's, and static inputs, for AOTAutograd
            setattr(copied, attribute, getattr(module, attribute))
    return copied, copies


__all__ = ["Captured", "EditedGraph", "Hoisted", "Reading", "Target", "Widened", "copy_graph"]
