"""Classes that passes use for one graph: `Captured`, with the planner's input, and `EditedGraph`, a copy that is edited as planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx

from amprewrite.graphs.fx.node_facts import kept_meta
from amprewrite.graphs.fx.weights.frozen_weight import FrozenWeight
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.ir.evidence.counts import Count
from amprewrite.ir.op_graph import Call, OpNode
from amprewrite.ir.pass_base import Problem
from amprewrite.ir.plans.pad_plan import Layout
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import OpLists
from amprewrite.tables.vocabulary import Reason
from amprewrite.torch_internals.dispatch import enter_autocast, exit_autocast
from amprewrite.torch_internals.graph_modules import LazyGraphModule

Hoisted = tuple[int, torch.dtype, Layout]
"""A low copy of a weight: (position of the weight among the inputs, dtype of the copy, padded layout of the copy)."""
QuantisedInput = tuple[int, tuple[Any, ...]]
"""An fp8 copy of a weight: (position of the weight's low copy among the inputs, further arguments of `quantise` after this copy)."""
Widened = tuple[int, torch.dtype, int | None]
"""A result that is cast after the graph has run: (position of the result, dtype of the cast, position of the gradient's scale).

The scale of the gradient is an input of the graph. Its position is None if the gradient of the result is not scaled.
"""


@dataclass
class Captured:
    """A captured graph and the planner's input for it, `problem`: the op graph, the user's policy, and further data on the graph.

    `module` is never edited. `know` replaces `problem` when more data is read from the graph, or an option changes.
    """

    problem: Problem
    module: torch.fx.GraphModule
    nodes: dict[str, torch.fx.Node]
    """{name of a node in the planner's op graph: its fx node}."""
    match_given: Callable[[Problem], RegionPlan] | None = None
    """Function that returns the user's plan for this graph, or for a body graph inside it. None if the user gives no plan."""
    parts: dict[torch.fx.Node, Captured] = field(default_factory=dict)
    """The captured body graph of each activation checkpoint, by the node that runs the checkpoint."""
    handed_on: dict[str, OpNode] = field(default_factory=dict)
    """{name of a checkpoint's result that is returned low: its original op-graph node, restored if a later plan returns it in fp32}."""
    given: dict[str, str] = field(default_factory=dict)
    """For a body graph (of a checkpoint, loop or condition): {name of its input: name of the outer value passed to it; "" if none}."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Signed root mean square of each parameter that may scale a value (LayerScale, ReZero), by its name in the op graph."""
    counts: Mapping[torch.fx.Node, Count] = field(default_factory=dict)
    """{node: `Count`}: whether the value counts something, such as positions, and how large it may be. Low formats round large counts."""
    left_bodies: dict[str, tuple[Reason, str]] = field(default_factory=dict)
    """(reason, detail) of each body graph that is not rewritten, by the attribute that holds it.

    The key "" gives the reason of all body graphs that have no key.
    """
    by_autocast: Captured | None = None
    """The same graph, read with the op lists of torch.autocast for a comparison; None if no comparison needs it."""
    tried: bool = False
    """True if a plan of this graph has passed a run on fake tensors and later plans need no such run. False if there are body graphs."""

    def know(self, **facts: Any) -> None:
        """Replace `problem` by a copy in which the fields of `Problem` named in `facts` have new values."""
        self.problem = replace(self.problem, **facts)

    def note(self, text: str) -> None:
        """Add the line `text` to the notes of every plan of this graph, unless they have it already."""
        if text not in self.problem.notes:
            self.know(notes=(*self.problem.notes, text))

    def with_parts(self) -> Iterator[Captured]:
        """Yield this graph and the body graphs of its activation checkpoints, at any depth."""
        yield self
        for part in self.parts.values():
            yield from part.with_parts()

    @property
    def names(self) -> dict[torch.fx.Node, str]:
        """{fx node: its name in the planner's op graph}."""
        return {node: name for name, node in self.nodes.items()}

    @property
    def results(self) -> dict[int, str]:
        """{position of a result of the graph: op-graph name of the node that computes it}. Results that no node computes are left out."""
        output, names = next(node for node in self.nodes.values() if node.op == "output"), self.names
        given = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
        # the forward graph of an autograd Function returns (results, saved values): take the results alone
        given = given[0] if given and isinstance(given[0], tuple | list) else given
        return {place: names[each] for place, each in enumerate(given) if isinstance(each, torch.fx.Node) and each in names}


@dataclass(frozen=True)
class Reading:
    """Settings of the normalising passes, which prepare a captured graph for the planner."""

    lists: OpLists
    low: Format
    training: bool
    """True if the graph records gradients, or is read as if it did because all graphs share one plan (`parity`)."""
    grad: bool = True
    """If `training` is True: whether gradients count as enabled at the start of the graph. The graph may switch them on or off later."""
    higher_order: bool = True
    """Whether the graph may call higher-order ops, which run body graphs or set hooks."""
    inputs: Sequence[Any] = ()
    """The real tensors that the graph takes; () if they are not available."""
    handed: Sequence[Count | None] = ()
    """For a body graph: the `Count` of each input, as known from the outer graph; None for an unknown one. () for other graphs."""


@dataclass(frozen=True)
class Target:
    """Settings of the lowering passes, which make an edited graph callable."""

    eager: bool
    """True if the graph runs without a compiler."""
    training: bool
    """True if the graph was captured with gradients."""
    weight_cache: WeightCache | None
    """Cache that keeps the low copies of weights that the graph reads; None if the graph casts each weight where it reads the weight."""
    frozen: Mapping[int, FrozenWeight] = field(default_factory=dict)
    """The frozen weights among the inputs of the graph, by position."""

    @property
    def compiled(self) -> bool:
        return not self.eager


@dataclass
class EditedGraph:
    """A copy of a captured graph. The passes that apply a plan edit this copy."""

    module: torch.fx.GraphModule
    nodes: dict[str, torch.fx.Node]
    """{name of a node in the planner's op graph: its fx node}."""
    calls: Mapping[str, Call] = field(default_factory=dict)
    """Arguments and shapes of every op as plain data, by the op's name in the plan; {} if no operand may be padded."""
    hoisted: list[Hoisted] = field(default_factory=list)
    """The low copies of weights that the graph takes as inputs after its captured inputs."""
    stored: list[Hoisted] = field(default_factory=list)
    """The low copies of frozen weights that the graph takes as inputs after `hoisted`."""
    quantised: list[QuantisedInput] = field(default_factory=list)
    """The fp8 copies of weights. The graph takes their values and their scales as its last inputs."""
    widened: list[Widened] = field(default_factory=list)
    """The results that the graph returns in the low format. They are cast after the graph has run."""
    cast_up: list[int] = field(default_factory=list)
    """Positions of frozen weights that keep only low values but are read in fp32. The graph takes these low values and casts them."""
    own: bool = False
    """True if passes may edit `module` in place, because no other code reads it, for instance after `make_own`."""

    @property
    def names(self) -> dict[torch.fx.Node, str]:
        """{fx node: its name in the planner's op graph}."""
        return {node: name for name, node in self.nodes.items()}

    def make_own(self) -> Callable[[torch.fx.Node], torch.fx.Node]:
        """Make sure that passes may edit `module` in place: copy it, unless `own` says that no other code reads it.

        Return a function that takes a node and returns its copy, or the node itself if nothing was copied.
        """
        if self.own:
            return lambda node: node
        (self.module, copies), self.own = copy_graph(self.module), True
        return copies.__getitem__

    @classmethod
    def of(cls, captured: Captured) -> EditedGraph:
        """Return a copy of `captured` that passes can edit. It shares tensors and sub-modules with the captured graph."""
        module, copies = copy_graph(captured.module)
        return cls(module, {name: copies[node] for name, node in captured.nodes.items()}, captured.problem.calls)


def put_inputs_first(graph: torch.fx.Graph) -> None:
    """Move the inputs of a graph before all ops, in their order. Dynamo of torch 2.11 adds inputs for symbolic sizes after their users."""
    first = next(iter(graph.nodes))
    for node in graph.find_nodes(op="placeholder"):
        if node is first:
            first = first.next
        else:
            first.prepend(node)


def put_in_region(graph: torch.fx.Graph, device: str) -> None:
    """Enclose all ops of a graph in `torch.autocast(device, enabled=False)`. Use it for code that the model calls inside such a region."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        entered = graph.call_function(enter_autocast, (device, None, False, None))
    with graph.inserting_before(graph.output_node()):
        graph.call_function(exit_autocast, (entered,))


def copy_graph(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, dict[torch.fx.Node, torch.fx.Node]]:
    """Return (copy of `module`, {node: its copy}). The copy shares tensors and sub-modules with `module`.

    The copy generates its Python code only when the code is needed, because passes edit the copy several times and read only its graph.
    """
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph = torch.fx.Graph()
    for node in module.graph.nodes:
        copy = copies[node] = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), copies.__getitem__)
        # set arguments after create_node, which would search them for symbolic numbers. To save time, set no empty arguments
        if args:
            copy.args = args
        if kwargs:
            copy.kwargs = kwargs
        copy.meta.update(kept_meta(node.meta))
    graph._codegen = module.graph._codegen
    copied = LazyGraphModule(module, graph, type(module).__name__)
    copied.meta.update(module.meta)
    for attribute in ("_param_name_to_source", "compile_subgraph_reason"):
        if hasattr(module, attribute):  # AOTAutograd finds static inputs by the first attribute; the second tells of a graph break
            setattr(copied, attribute, getattr(module, attribute))
    return copied, copies
