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
"""A low copy of a weight: the place of the weight among the inputs, the dtype of the copy, its padded layout."""
Widened = tuple[int, torch.dtype, int | None]
"""A result that is cast behind the graph: its place, its dtype then, and the place of the scale for its gradient among the inputs."""


@dataclass
class Captured:
    """A graph as it was captured. `module` is never edited; `problem` is exchanged for another when more becomes known."""

    problem: Problem
    module: torch.fx.GraphModule
    nodes: dict[str, torch.fx.Node]
    """The fx node of each vertex of the problem's graph."""
    match_given: Callable[[Problem], RegionPlan] | None = None
    """Finds the plan to follow for a graph inside this one."""
    parts: dict[torch.fx.Node, Captured] = field(default_factory=dict)
    """The bodies of activation checkpoints, for a caller that runs them one by one."""
    given: dict[str, str] = field(default_factory=dict)
    """Of a graph inside another, the value around it that each input is, by vertex."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """The sizes of learnt numbers that may scale something, by vertex."""
    counts: Mapping[torch.fx.Node, Count] = field(default_factory=dict)
    """Which values count something."""
    left_bodies: dict[str, tuple[Reason, str]] = field(default_factory=dict)
    """Graphs inside this one that stay as they are, and why; "": all of them."""
    by_autocast: Captured | None = None
    """The same graph read by torch.autocast's lists, for a comparison."""
    tried: bool = False
    """Whether a plan of it was tried on fake tensors already, so that deciding alone gives the plan."""

    def know(self, **facts: Any) -> None:
        """Exchange the problem for one that knows more: `facts` are fields of `Problem`."""
        self.problem = replace(self.problem, **facts)

    def note(self, text: str) -> None:
        """Add a line to the notes of every plan that is made of this graph, once."""
        if text not in self.problem.notes:
            self.know(notes=(*self.problem.notes, text))

    def with_parts(self) -> Iterator[Captured]:
        """Yield this graph, the bodies of its checkpoints, and those of the checkpoints in them."""
        yield self
        for part in self.parts.values():
            yield from part.with_parts()

    @property
    def names(self) -> dict[torch.fx.Node, str]:
        """The vertex of each fx node."""
        return {node: name for name, node in self.nodes.items()}

    @property
    def results(self) -> dict[int, str]:
        """The vertices that the graph gives, by place among its results."""
        output, names = next(node for node in self.nodes.values() if node.op == "output"), self.names
        given = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
        given = given[0] if given and isinstance(given[0], tuple | list) else given  # an autograd Function gives what it saves, too
        return {place: names[each] for place, each in enumerate(given) if isinstance(each, torch.fx.Node) and each in names}


@dataclass(frozen=True)
class Reading:
    """How a captured graph is to be read: what the normalising passes look at."""

    lists: OpLists
    low: Format
    training: bool
    """Read as a graph with gradients."""
    grad: bool = True
    """Whether gradients are on where a graph with gradients begins."""


@dataclass(frozen=True)
class Target:
    """What an edited graph is to become: what the lowering passes look at."""

    eager: bool
    """Runs as it is, not through a compiler."""
    training: bool
    """Was captured with gradients."""
    weight_cache: WeightCache | None
    """What makes its low copies of weights; None: the graph casts each weight where it reads it."""
    blocks: Sequence[Sequence[str]] = ()
    """Which weights share an autograd node in training, by their names in the plan."""
    frozen: Mapping[int, FrozenWeight] = field(default_factory=dict)
    """The frozen weights among its inputs, by place."""


@dataclass
class EditedGraph:
    """The copy of a captured graph that applying passes edit as a plan says."""

    module: torch.fx.GraphModule
    nodes: dict[str, torch.fx.Node]
    """The fx node of each vertex."""
    calls: Mapping[str, Call] = field(default_factory=dict)
    """How every op was called; read only if something may be padded."""
    hoisted: list[Hoisted] = field(default_factory=list)
    """The low copies of weights that the graph takes after the inputs it was captured with."""
    stored: list[Hoisted] = field(default_factory=list)
    """The low copies of frozen weights that it takes as its last inputs."""
    widened: list[Widened] = field(default_factory=list)
    """The results that leave low and are cast behind the graph."""
    cast_up: list[int] = field(default_factory=list)
    """Places of frozen weights that it takes low and reads in fp32."""

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
    """Move the inputs of a graph to its front, in their order. Dynamo of torch 2.11 adds symbols behind ops that read them."""
    first = next(iter(graph.nodes))
    for node in graph.find_nodes(op="placeholder"):
        if node is first:
            first = first.next
        else:
            first.prepend(node)


def copy_graph(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, torch.fx.Node]]:
    """The graph once more, and the copy of each node; tensors and sub-modules are shared.

    The copy generates its code when it is first asked for: passes edit it several times, and read the graph alone.
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
        if hasattr(module, attribute):  # by the first AOTAutograd knows a graph of Dynamo's, and which inputs stay where they are
            setattr(copied, attribute, getattr(module, attribute))
    return copied, copies


__all__ = ["Captured", "EditedGraph", "Hoisted", "Reading", "Target", "Widened", "copy_graph"]
