"""Weight casts leave the graph: their copies come from the weight cache, and the graph takes them as further inputs.

Without gradients that is all. With them each copy is linked to its weight outside the graph, a block of them by one autograd node
(`graphs/fx/weights/linked_copies.py`): gradients come back in fp32 and unscaled, in a few launches. So do those of weights that a
graph with a loss scale reads in fp32.

Copies are made before the graph runs. So the casts of a parameter that the graph itself writes, through whatever alias, stay.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Hoisted, Target, copy_graph
from amprewrite.graphs.fx.node_facts import (
    NODE,
    bodies,
    example_value,
    hint,
    is_checkpoint,
    memory_of,
    outside,
    transform_openings,
    written,
    written_unsaid,
)  # fmt: skip
from amprewrite.graphs.fx.ops.pad_ops import pad_cast
from amprewrite.graphs.fx.ops.scale_ops import cast_in, unscale_gradient
from amprewrite.graphs.fx.uncaptured import unselected
from amprewrite.graphs.fx.weights.linked_copies import LinkedCopies, link_block, ranks_train
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.pad_plan import Layout
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.passes.apply.scale_loss import INVERSE
from amprewrite.tables.formats import Format

CompiledFn = Callable[..., Any]
Copy = tuple[torch.dtype, Layout]
"""The dtype of a copy of a weight, and its padded layout."""
_STAYS = {"_dynamo_static_input_type": "unguarded"}
"""What torch._dynamo.mark_static_address leaves on an input: CUDA graphs read a copy where it lies and do not copy it once more."""
_READ = ("torch", "amprewrite")
"""Packages whose functions in a graph write no weight but those that they are seen to write."""


class HoistWeightCasts(Pass[Target, EditedGraph]):
    name = "hoist-weight-casts"

    def call(self, target: Target, edited: EditedGraph) -> bool:
        if target.weight_cache:
            if target.training:
                edited.module, _ = copy_graph(edited.module)  # the graph that users look into keeps its casts
            edited.hoisted = hoist_weight_casts(edited.module, target.training, lambda place: place not in target.frozen)
        return bool(edited.hoisted)


def hoist_weight_casts(
    module: torch.fx.GraphModule, training: bool = False, chosen: Callable[[int], bool] = lambda _: True
) -> list[Hoisted]:
    """Turn casts of parameters into trailing inputs; in training what unscales the gradient of one goes with them.

    `chosen` says whether to do so with the input at a place.
    """
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    hoisted: list[Hoisted] = []
    last = inputs[-1] if inputs else None
    changing = written_storages(module)
    made: dict[Hoisted, torch.fx.Node] = {}
    names = {node.target for node in inputs}
    for node in list(graph.nodes):
        source = _cast_weight(node, training)
        if source is None or not chosen(inputs.index(source)) or not changing.isdisjoint(memory_of(source)) or _goes_elsewhere(source):
            continue
        assert last is not None
        cast = (inputs.index(source), *_made(node, source))
        if cast in made:
            node.replace_all_uses_with(made[cast])
            graph.erase_node(node)
            continue
        with graph.inserting_after(last):
            name = f"{source.name}_{node.meta.get(CAST, 'unscaled')}"
            last = graph.placeholder(name if name not in names else f"{name}_{len(hoisted)}")  # a weight padded in two ways has two copies
        names.add(last.target)
        last.meta = {key: value for key, value in node.meta.items() if key in ("example_value", "val")} | {"tensor_dict": _STAYS}
        hoisted.append(cast)
        made[cast] = last
        node.replace_all_uses_with(last)
        graph.erase_node(node)
    if hoisted:
        module.recompile()
    return hoisted


def _made(node: torch.fx.Node, source: torch.fx.Node) -> Copy:
    """The dtype and the padded layout that `node` gives the weight `source`."""
    dtype: Any = example_value(source).dtype if node.target is unscale_gradient else node.args[1]
    layout: Any = node.args[2] if node.target is pad_cast else ()
    return dtype, layout


def read_low_alone(module: torch.fx.GraphModule, low: Format) -> frozenset[int]:
    """Places of the inputs that an edited graph casts to `low` and reads in no other way.

    So it is in the body of a checkpoint. What a view, an op or a function does with an input is not looked into: it counts as another way.
    """
    return frozenset(place for place, source in enumerate(module.graph.find_nodes(op="placeholder")) if _reads_low(source, low.dtype))


def _reads_low(source: torch.fx.Node, low: torch.dtype) -> bool:
    """Whether all that is done with `source` is to cast it to `low`."""
    return all(_casts(user, source, low) or _casts_in_body(user, source, low) for user in source.users)


def _casts(user: torch.fx.Node, source: torch.fx.Node, low: torch.dtype) -> bool:
    return CAST in user.meta and user.target in ("to", pad_cast, cast_in) and user.args[0] is source and user.args[1] == low


def _casts_in_body(user: torch.fx.Node, source: torch.fx.Node, low: torch.dtype) -> bool:
    """Whether `user` is a checkpoint whose body reads `source` low alone."""
    if not is_checkpoint(user):
        return False
    places = [place for place, operand in enumerate(user.args[1:]) if operand is source]
    inputs = [body.graph.find_nodes(op="placeholder") for body in bodies(user)]
    return bool(places and inputs) and all(place < len(each) and _reads_low(each[place], low) for each in inputs for place in places)


def copies_read(module: torch.fx.GraphModule, training: bool) -> dict[int, frozenset[Copy | None]]:
    """How an edited graph reads each input that it casts as a weight, or may: the copies of it, and None if it is read as it is."""
    changing = written_storages(module)
    found: dict[int, frozenset[Copy | None]] = {}
    source: torch.fx.Node
    for place, source in enumerate(module.graph.find_nodes(op="placeholder")):
        moves = changing.isdisjoint(memory_of(source)) and not _goes_elsewhere(source)
        found[place] = frozenset(_made(user, source) if moves and _cast_weight(user, training) is source else None for user in source.users)
    return found


def _cast_weight(node: torch.fx.Node, training: bool) -> torch.fx.Node | None:
    """The parameter that `node` casts, if it can be hoisted."""
    crosses = training and node.target is unscale_gradient
    copies = CAST in node.meta and (node.target in ("to", pad_cast) or (training and node.target is cast_in))
    if not node.meta.get("weight") or not (crosses or copies):
        return None
    source: Any = node.args[0]
    return source if isinstance(source, torch.fx.Node) and source.op == "placeholder" else None


def written_storages(module: torch.fx.GraphModule) -> set[int]:
    """The storages that a graph writes in place, in the bodies of its higher-order ops too."""
    found: set[int] = set()
    for node in module.graph.nodes:
        for target in (*written(node), *written_unsaid(node)):
            found |= memory_of(target)
        if any(map(_writes, bodies(node))):
            for source in node.all_input_nodes:
                found |= memory_of(source)
    return found


def _writes(body: torch.fx.GraphModule) -> bool:
    """Whether a body writes anything in place, or calls one that does."""
    return any(written(node) or any(map(_writes, bodies(node))) for node in body.graph.nodes)


def _goes_elsewhere(source: torch.fx.Node) -> bool:
    """Whether a weight is handed to a Python function that Dynamo was told not to read: it may write it unseen."""
    return any(isinstance(user.target, FunctionType) and user.target.__module__.partition(".")[0] not in _READ for user in source.users)


class _Graph:
    """Stands for a graph in the weight cache, for as long as the graph lives."""


def with_cached_weights(run: CompiledFn, hoisted: list[Hoisted], cache: WeightCache) -> CompiledFn:
    """`run` with the copies that it takes beside its inputs, for calls without gradients."""
    places, dtypes, layouts = zip(*hoisted, strict=True)
    chosen = operator.itemgetter(*places, places[0])  # one more, so that it gives a tuple
    graph = _Graph()

    def call(*inputs: Any) -> Any:
        with unselected():
            copies = cache.take(chosen(inputs)[:-1], dtypes, layouts, graph)
        return run(*inputs, *copies)

    return call


@dataclass(frozen=True)
class Linking:
    """How the copies of a training graph are linked to their weights."""

    hoisted: Sequence[Hoisted]
    blocks: Sequence[Sequence[int]]
    """The places of the copies that share an autograd node."""
    inverse: int | None
    """The place of the input that gradients are multiplied by."""
    saved: int
    """Bytes that forward keeps for backward at least, beside copies."""
    saved_at_capture: int
    """The same with the sizes of capture, where they may vary."""
    inside: bool
    """Whether the graph links them itself: then it takes what links them as one more input."""
    lets_go: bool
    """Whether low gradients may be let go as they are cast: a compiler may keep their memory."""


def link_copies(module: torch.fx.GraphModule, hoisted: Sequence[Hoisted], blocks: Sequence[Sequence[str]], eager: bool) -> Linking:
    """Say how the copies of a training graph are linked, and have the graph do it, if it is `eager` and ranks train.

    `blocks` are the weights that share an autograd node, by their names in the plan; any other weight has one of its own, and so has
    each device: autograd runs a node on one. What a compiler makes has one autograd node for all of the graph, and needs no links inside
    it.
    """
    inside = eager and ranks_train()
    inputs = module.graph.find_nodes(op="placeholder")
    names = [node.target for node in inputs]
    of = {name: number for number, block in enumerate(blocks) for name in block}
    shared: dict[Any, list[int]] = defaultdict(list)
    for at, (place, _, _) in enumerate(hoisted):
        weight = inputs[place]
        shared[of.get(weight.meta.get(NODE), (at,)), example_value(weight).device].append(at)
    inverse = names.index(INVERSE) if INVERSE in names else None
    least, likely = _saved(inputs, lambda size: size if type(size) is int else 0), _saved(inputs, hint)
    found = Linking(hoisted, tuple(shared.values()), inverse, least, likely, inside, lets_go=eager)
    if inside:
        copies = [node for node in inputs if node.meta.get("tensor_dict") is _STAYS]  # those of frozen weights come last
        _link_where_read(module, copies[: len(hoisted)], found.blocks)
    return found


def _link_where_read(module: torch.fx.GraphModule, copies: Sequence[torch.fx.Node], blocks: Sequence[Sequence[int]]) -> None:
    """Link each block of copies in front of the op that first reads one of them, and of the transform that this is in."""
    graph, openings = module.graph, transform_openings(module.graph)
    order = {node: at for at, node in enumerate(graph.nodes)}
    with graph.inserting_after(copies[-1]):
        links = graph.placeholder("amprewrite_links")
    for number, block in enumerate(blocks):
        chosen = [copies[at] for at in block]
        first = min((user for copy in chosen for user in copy.users), key=order.__getitem__)
        with graph.inserting_before(outside(openings, chosen[0], first)):
            linked = graph.call_function(link_block, (links, number, *chosen))
            for at, copy in enumerate(chosen):
                item = graph.call_function(operator.getitem, (linked, at))
                item.meta = dict(copy.meta)
                for user in [user for user in copy.users if user is not linked]:
                    user.replace_input_with(copy, item)
    module.recompile()


def with_linked_weights(run: CompiledFn, cache: WeightCache, linking: Linking) -> CompiledFn:
    """`run` with the copies that it takes beside its inputs, each linked to its weight if that takes a gradient."""
    places, dtypes, layouts = zip(*linking.hoisted, strict=True)
    linked = LinkedCopies(dtypes, layouts, cache, linking.blocks)

    def operands(inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        return [inputs[place] for place in places], None if linking.inverse is None else inputs[linking.inverse]

    def linked_inside(*inputs: Any) -> Any:
        if linked.rooms is None:
            linked.rooms = [sum(inputs[places[at]].nbytes for at in block) for block in linking.blocks]  # one launch: blocks are small
        with unselected():
            copies, links = linked.begin(*operands(inputs))
        return run(*inputs, *copies, links)

    def linked_before(*inputs: Any) -> Any:
        if linking.lets_go and linked.rooms is None:
            linked.early, linked.rooms = _schedule(inputs, linking)
        with unselected():
            copies = linked.take(*operands(inputs))
        return run(*inputs, *copies)

    return linked_inside if linking.inside else linked_before


def _saved(inputs: Sequence[torch.fx.Node], known: Callable[[Any], int]) -> int:
    """Bytes that forward keeps for backward at least: what ops read beside low copies of weights. `known` gives each size."""
    beside: dict[torch.fx.Node, int] = {}
    for copy in inputs:
        if copy.meta.get("tensor_dict") is _STAYS:
            for operand in (operand for user in copy.users for operand in user.all_input_nodes if operand.op != "placeholder"):
                value = example_value(operand)
                beside[operand] = math.prod(map(known, value.shape)) * value.itemsize if isinstance(value, torch.Tensor) else 0
    return sum(beside.values())


def _schedule(inputs: Sequence[Any], linking: Linking) -> tuple[bool, list[int]]:
    """Whether gradients are cast as soon as all are there, and the bytes that a backward adds after each block at least.

    A gradient takes four bytes an element, and a low copy that is not needed any more gives two back. If forward ends with more than
    backward does, for all that is saved, a block waits for the end of the backward and the difference may be had as well; so may what
    blocks before it add, which come after it. Else gradients make the peak: a single block is cast before the backward goes on to
    the weights that forward reads in front of it, such as embeddings.
    """
    low = {place for place, dtype, _ in linking.hoisted if dtype.itemsize == 2}
    adds: dict[int, int] = {}
    for place, each in enumerate(inputs):
        if isinstance(each, torch.nn.Parameter):
            adds[place] = ((4 if each.requires_grad else 0) - (2 if place in low else 0)) * each.numel()
    spare = max(0, linking.saved - sum(adds.values()))
    early = len(linking.blocks) == 1 and linking.saved_at_capture <= sum(adds.values())
    adding = adds if early else {place: adds[place] for place, _, _ in linking.hoisted if place in adds}
    firsts = [min(linking.hoisted[at][0] for at in block) for block in linking.blocks]
    return early, [spare + max(0, sum(size for place, size in adding.items() if place < first)) for first in firsts]


__all__ = [
    "Copy", "HoistWeightCasts", "Linking", "copies_read", "hoist_weight_casts", "link_copies", "read_low_alone",
    "with_cached_weights", "with_linked_weights",
]  # fmt: skip
