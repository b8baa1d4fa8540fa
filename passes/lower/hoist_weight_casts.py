"""Let a graph read low-precision weights that are kept between calls, if the user asks for that. By default each call casts weights.

1. Without gradients, kept copies are further inputs of the graph. An eager graph takes them in calls in a block that keeps copies, such as
   `frozen_weights()`. A compiled graph, which has one callable for all calls, always takes them if it was captured in such a block.
2. With gradients (`cache_weights="step"`), the graph reads the kept copy in place of each cast. An autograd node links copy and weight.

A kept copy was made before the call. So if the graph writes a weight, even through an alias, the weight is still cast where it is read.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Hoisted, Target, copy_graph
from amprewrite.graphs.fx.node_facts import bodies, example_value, is_checkpoint, memory_of, outside, transform_openings, written_memory
from amprewrite.graphs.fx.ops.many_weights import cross_together
from amprewrite.graphs.fx.ops.pad_ops import linked_copy, pad_cast
from amprewrite.graphs.fx.ops.scale_ops import cast_in, unscale_gradient
from amprewrite.graphs.fx.uncaptured import unselected
from amprewrite.graphs.fx.weights.weight_cache import WeightCache, kept_cast, marked
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.pad_plan import Layout
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.passes.lower.keep_quantised import keep_quantised, with_quantised_weights
from amprewrite.tables.formats import LOW_DTYPES, Format
from amprewrite.tables.ops.op_lists import op_name

CompiledFn = Callable[..., Any]
Copy = tuple[torch.dtype, Layout]
"""The dtype of a copy of a weight, and its padded layout."""
_STAYS = {"_dynamo_static_input_type": "unguarded"}
"""Metadata by which torch._dynamo.mark_static_address marks an input: CUDA graphs then read it at its address, without copying it."""
_CACHE = "amprewrite_weight_cache"
"""The attribute of a graph that holds the cache from which it reads kept copies."""
_FOLDS = ("linear", "matmul")
"""Products that fold batch dims into one if the other operand requires gradients (should_fold in ATen/native/LinearAlgebra.cpp)."""
_READ = ("torch", "amprewrite")
"""Packages without hidden writes: if one of their functions writes to a weight, the graph shows it. Other functions may write unseen."""


class HoistWeightCasts(Pass[Target, EditedGraph]):
    def __call__(self, target: Target, edited: EditedGraph) -> None:
        cache = target.weight_cache

        def chosen(place: int) -> bool:
            return place not in target.frozen

        if cache is None:
            if target.eager and not target.training:
                mark_copies(edited.module, chosen)
        elif target.training:
            edited.make_own()
            read_kept(edited.module, cache, chosen)
        else:
            edited.hoisted = hoist_weight_casts(edited.module, chosen=chosen)


def mark_copies(module: torch.fx.GraphModule, chosen: Callable[[int], bool] = lambda _: True) -> None:
    """Insert nodes that give low copies of weights the `requires_grad` flag of the weight, because a cast under no_grad drops this flag.

    A copy gets a node if a product that reads it may choose its kernel by this flag. `chosen(position)` is False for inputs to leave out.
    """
    found = [
        (node, cast)
        for node, cast in weight_casts(module, False, chosen)
        if any(op_name(user.target) in _FOLDS and user.args[1:2] == (node,) and _folds_perhaps(user.args[0]) for user in node.users)
    ]
    inputs = module.graph.find_nodes(op="placeholder")
    for node, (place, *_) in found:
        with module.graph.inserting_after(node):
            copy = module.graph.call_function(marked, (node, inputs[place]))
        copy.meta = {key: value for key, value in node.meta.items() if key in ("example_value", "val")}
        node.replace_all_uses_with(copy, functools.partial(operator.is_not, copy))


def _folds_perhaps(operand: Any) -> bool:
    """True if the kernel of a product with `operand` may depend on whether the other operand, a weight, requires gradients.

    If the weight requires gradients, PyTorch folds the leading dims of `operand` into one. For a weight without gradients it decides by the
    layout of `operand`, so the kernels may differ if `operand` is non-contiguous and has more than two dims.
    """
    value = example_value(operand) if isinstance(operand, torch.fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() > 2 and not value.is_contiguous()


def weight_casts(
    module: torch.fx.GraphModule, training: bool, chosen: Callable[[int], bool] = lambda _: True
) -> Iterator[tuple[torch.fx.Node, Hoisted]]:
    """Yield (cast of a weight, (position of the weight among the inputs, dtype, layout)) for each cast that a kept copy may replace.

    With `training`, nodes that unscale a weight's gradient count as casts, too. `chosen(position)` is False for inputs to leave out.
    """
    inputs = {node: place for place, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    changing = written_memory(module.graph)
    for node in list(module.graph.nodes):
        source = _cast_weight(node, training)
        if source is not None and chosen(inputs[source]) and changing.isdisjoint(memory_of(source)) and not _goes_elsewhere(source):
            yield node, (inputs[source], *_made(node, source))


def hoist_weight_casts(
    module: torch.fx.GraphModule, training: bool = False, chosen: Callable[[int], bool] = lambda _: True
) -> list[Hoisted]:
    """Edit the graph of `module` in place: replace the casts of parameters by new inputs, which follow all other inputs.

    Return (parameter's position among the inputs, dtype, padded layout) for each new input. `training` and `chosen`: see `weight_casts`.
    """
    graph = module.graph
    inputs = graph.find_nodes(op="placeholder")
    last = inputs[-1] if inputs else None
    made: dict[Hoisted, torch.fx.Node] = {}
    names = {node.target for node in inputs}
    for node, cast in weight_casts(module, training, chosen):
        if cast not in made:
            source = inputs[cast[0]]
            with graph.inserting_after(last):
                name = f"{source.name}_{node.meta.get(CAST, 'unscaled')}"
                # The name is taken if the graph also reads a copy of this weight with another padding. Then append a number.
                last = graph.placeholder(name if name not in names else f"{name}_{len(made)}")
            names.add(last.target)
            last.meta = {key: value for key, value in node.meta.items() if key in ("example_value", "val")} | {"tensor_dict": _STAYS}
            made[cast] = last
        node.replace_all_uses_with(made[cast])
        graph.erase_node(node)
    for group in graph.find_nodes(op="call_function", target=cross_together):
        if not group.users:
            graph.erase_node(group)
    if made:
        module.recompile()
    return list(made)


def read_kept(module: torch.fx.GraphModule, cache: WeightCache, chosen: Callable[[int], bool] = lambda _: True) -> None:
    """In a graph with gradients, replace casts of weights, in place, by reads of the copies that `cache` keeps.

    A read is inserted outside any torch.func transform around the cast, because the copy belongs to no transform. `chosen(position)` is
    False for inputs to leave out.
    """
    graph, openings = module.graph, transform_openings(module.graph)
    inputs = graph.find_nodes(op="placeholder")
    casts = [(node, cast) for node, cast in weight_casts(module, True, chosen) if node.target not in (unscale_gradient, linked_copy)]
    for node, (place, dtype, layout) in casts:
        inverse = node.args[2] if node.target is cast_in else node.args[3] if len(node.args) > 3 else None
        with graph.inserting_before(outside(openings, inputs[place], node)):
            made = graph.call_function(kept_cast, (graph.create_node("get_attr", _CACHE), inputs[place], dtype, layout, inverse))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    if casts:
        setattr(module, _CACHE, cache)
        module.recompile()


def _made(node: torch.fx.Node, source: torch.fx.Node) -> Copy:
    """Return (dtype, padded layout) of the copy that `node` makes of the weight `source`. The layout is () if the copy is not padded."""
    dtype: Any = example_value(source).dtype if node.target is unscale_gradient else node.args[1]
    if node.target is operator.getitem:  # the node is a result of `cross_together`: take the dtype from this call
        dtype = node.args[0].args[0]  # type: ignore[union-attr]
    layout: Any = node.args[2] if node.target in (pad_cast, linked_copy) else ()
    return dtype, layout


def read_low_alone(module: torch.fx.GraphModule, low: Format) -> frozenset[int]:
    """Return the positions of the inputs that an edited graph reads only by casts to `low`.

    The bodies (subgraphs) of checkpoints count as parts of the graph. Inputs that nothing reads are included.
    """
    return frozenset(place for place, source in enumerate(module.graph.find_nodes(op="placeholder")) if _reads_low(source, low.dtype))


def _reads_low(source: torch.fx.Node, low: torch.dtype) -> bool:
    """True if all readers of `source`, in the graph and in checkpoint bodies, are casts to `low`."""
    return all(_casts(user, source, low) or _casts_in_body(user, source, low) for user in source.users)


def _casts(user: torch.fx.Node, source: torch.fx.Node, low: torch.dtype) -> bool:
    """True if `user` is a cast of `source` to `low` that the rewrite inserted."""
    return CAST in user.meta and user.target in ("to", pad_cast, cast_in, linked_copy) and user.args[0] is source and user.args[1] == low


def _casts_in_body(user: torch.fx.Node, source: torch.fx.Node, low: torch.dtype) -> bool:
    """True if `user` is a checkpoint whose body graph reads `source` only through casts to `low`."""
    if not is_checkpoint(user):
        return False
    places = [place for place, operand in enumerate(user.args[1:]) if operand is source]
    inputs = [body.graph.find_nodes(op="placeholder") for body in bodies(user)]
    return bool(places and inputs) and all(place < len(each) and _reads_low(each[place], low) for each in inputs for place in places)


def copies_read(module: torch.fx.GraphModule, training: bool) -> dict[int, frozenset[Copy | None]]:
    """Return, for each position of an input, the low-precision copies (dtype, layout) of the input that an edited graph reads.

    The set includes None if the graph also reads the input in fp32: without a cast, or by a node that only pads it or unscales gradients.
    """
    changing = written_memory(module.graph)
    found: dict[int, frozenset[Copy | None]] = {}
    source: torch.fx.Node
    for place, source in enumerate(module.graph.find_nodes(op="placeholder")):
        moves = changing.isdisjoint(memory_of(source)) and not _goes_elsewhere(source)
        made = (_made(user, source) if moves and _cast_weight(user, training) is source else None for user in source.users)
        found[place] = frozenset(copy if copy is not None and copy[0] in LOW_DTYPES else None for copy in made)
    return found


def _cast_weight(node: torch.fx.Node, training: bool) -> torch.fx.Node | None:
    """Return the parameter that `node` casts, if a kept copy can replace the cast; otherwise None.

    With `training`, also return a parameter whose gradient `node` unscales.
    """
    crosses = training and node.target is unscale_gradient
    copies = CAST in node.meta and (node.target in ("to", pad_cast) or (training and node.target in (cast_in, linked_copy)))
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem and getattr(source, "target", None) is cross_together and source.args[0] is not None:
        copies, source = True, source.args[2 + node.args[1]]  # type: ignore[operator]
    if not node.meta.get("weight") or not (crosses or copies):
        return None
    return source if isinstance(source, torch.fx.Node) and source.op == "placeholder" else None


def _goes_elsewhere(source: torch.fx.Node) -> bool:
    """True if a weight is an argument of a Python function that Dynamo does not trace: the function may write it, unseen in the graph."""
    return any(isinstance(user.target, FunctionType) and user.target.__module__.partition(".")[0] not in _READ for user in source.users)


def with_cached_weights(run: CompiledFn, hoisted: list[Hoisted], cache: WeightCache) -> CompiledFn:
    """Return a callable that calls `run` with its inputs, followed by low copies of weights from `cache`. For calls without gradients.

    `hoisted` lists the copies: (position of the weight among the inputs, dtype, layout).
    """
    if not hoisted:
        return run

    def call(*inputs: Any) -> Any:
        with unselected():
            copies = cache.take([(inputs[place], dtype, layout) for place, dtype, layout in hoisted])
        return run(*inputs, *copies)

    return call


def with_kept_weights(
    module: torch.fx.GraphModule, cache: WeightCache, callable_of: Callable[[torch.fx.GraphModule], CompiledFn]
) -> CompiledFn:
    """Return a callable that casts weights where it reads them. While `cache` keeps copies, as in `frozen_weights()`, it reads the copies.

    `callable_of` returns the callable of an edited graph.
    """
    cast_where_read = callable_of(module)
    takes_kept: list[CompiledFn] = []

    def call(*inputs: Any) -> Any:
        if cache.block() is None:
            return cast_where_read(*inputs)
        if not takes_kept:
            other, _ = copy_graph(module)
            edited = EditedGraph(other, {}, hoisted=hoist_weight_casts(other))
            keep_quantised(edited, len(edited.hoisted))
            run = callable_of(other)
            run = with_quantised_weights(run, edited.quantised) if edited.quantised else run
            takes_kept.append(with_cached_weights(run, edited.hoisted, cache))
        return takes_kept[0](*inputs)

    return call
