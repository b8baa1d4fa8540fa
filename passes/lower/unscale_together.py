"""Without a compiler, unscale the gradients of many weights by one autograd node, so that a step runs no Python code for each weight.

1. The weights are divided into blocks. Each block gets one `unscale_together` node, before the first op that reads a weight of the block.
   Casts that unscaled gradients become plain casts, whose backward runs no Python code.
2. A block has at most ELEMENTS elements, because each gradient waits for the other gradients of its block. All weights of a block are on
   one device, since autograd runs a node on one device. Either casts alone read all of them, or other ops read each of them.
3. A weight that the graph writes keeps a node of its own. So do all weights of a graph that switches gradients on or off.

    before   low = cast_in(w, float16, inverse)                    after   weights = unscale_together(inverse, True, w, v)
             other = cast_in(v, float16, inverse)                          low = to(weights[0], float16)
                                                                           other = to(weights[1], float16)
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor

from amprewrite.graphs.fx.captured import EditedGraph, Target
from amprewrite.graphs.fx.node_facts import GRAD_SWITCHES, example_value, memory_of, outside, transform_openings, written_memory
from amprewrite.graphs.fx.ops.on_device import on_device
from amprewrite.graphs.fx.ops.scale_ops import cast_in, leaving, unscale_gradient
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.ir.pass_base import Pass
from amprewrite.passes.apply.scale_loss import INVERSE
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.torch_internals.autograd import in_forward_mode
from amprewrite.torch_internals.dispatch import is_legacy_batched, is_wrapped_by_transform

ELEMENTS, ELEMENTS_APART = 1 << 24, 1 << 22
"""Largest number of weight elements in a block: 64 MB of gradients, or 16 MB if several ranks train.

16 MB are less than a bucket of DDP (25 MB), whose reduction waits for the whole block.
"""
Node = torch.fx.Node


class UnscaleTogether(Pass[Target, EditedGraph]):
    def __call__(self, target: Target, edited: EditedGraph) -> None:
        graph = edited.module.graph
        scaled = any(node.target == INVERSE for node in graph.find_nodes(op="placeholder"))
        if target.eager and target.training and scaled and not any(op_name(node.target) in GRAD_SWITCHES for node in graph.nodes):
            edited.make_own()
            unscale_in_blocks(edited.module)


def unscale_in_blocks(module: torch.fx.GraphModule) -> None:
    """Divide the weights of a graph into groups (blocks), and let one node for each group unscale all its gradients. Edit in place.

    A weight that the graph writes, and a weight alone in its group, keep the nodes that they have.
    """
    graph, openings = module.graph, transform_openings(module.graph)
    order = {node: at for at, node in enumerate(graph.nodes)}
    inverse = next(node for node in graph.find_nodes(op="placeholder") if node.target == INVERSE)
    crossings = _crossings(module)
    first = {weight: min(map(order.__getitem__, _readers(nodes))) for weight, nodes in crossings.items()}
    at = list(graph.nodes)
    for own, block in _blocks({weight: crossings[weight] for weight in sorted(first, key=first.__getitem__)}):
        with graph.inserting_before(outside(openings, block[0], at[first[block[0]]])):
            made = graph.call_function(unscale_together, (inverse, own, *block))
            items = [graph.call_function(operator.getitem, (made, place)) for place in range(len(block))]
        for weight, item in zip(block, items, strict=True):
            item.meta = {key: value for key, value in weight.meta.items() if key in ("example_value", "val")}
            for node in crossings[weight]:
                if node.target is cast_in:
                    node.op, node.target, node.args = "call_method", "to", (item, node.args[1])
                else:
                    node.replace_all_uses_with(item)
                    graph.erase_node(node)
    module.recompile()


def _crossings(module: torch.fx.GraphModule) -> dict[Node, list[Node]]:
    """Return, for each fp32 weight that the graph does not write, the nodes that unscale its gradient, if they have readers."""
    changing, found = written_memory(module.graph), defaultdict[Node, list[Node]](list)
    for node in module.graph.nodes:
        source = node.args[0] if node.target in (cast_in, unscale_gradient) and node.meta.get("weight") and node.users else None
        if not isinstance(source, Node) or source.op != "placeholder":
            continue
        if example_value(source).dtype == torch.float32 and changing.isdisjoint(memory_of(source)):
            found[source].append(node)
    return found


def _readers(crossings: Sequence[Node]) -> Iterator[Node]:
    """Yield the nodes that will read a weight from the node that unscales its gradient together with other gradients.

    `crossings` are the nodes that unscale its gradient so far. A node that also casts the weight stays, and is a reader. A node that only
    unscales is removed, so that its users become readers.
    """
    for node in crossings:
        yield from [node] if node.target is cast_in else node.users


def _blocks(crossings: dict[Node, list[Node]]) -> Iterator[tuple[bool, list[Node]]]:
    """Yield (True if only casts read the weights, weights) for each block of two or more weights. `crossings` has them in order of use."""
    apart = torch.distributed.is_available() and torch.distributed.is_initialized()
    most = ELEMENTS_APART if apart else ELEMENTS
    rooms, blocks = dict[Any, int](), defaultdict[Any, list[list[Node]]](list)
    for weight, nodes in crossings.items():
        value = example_value(weight)
        kind = all(node.target is cast_in for node in nodes), value.device
        if rooms.get(kind, -1) < value.numel():
            blocks[kind].append([])
            rooms[kind] = most
        rooms[kind] -= value.numel()
        blocks[kind][-1].append(weight)
    yield from ((own, block) for (own, _), made in blocks.items() for block in made if len(block) > 1)


_PLAIN, _STRIDED = {Tensor, torch.nn.Parameter}, {torch.strided}
_layout, _learns, _hooks = map(operator.attrgetter, ("layout", "requires_grad", "_backward_hooks"))


def unscale_together(inverse: Tensor, own: bool, *weights: Tensor) -> Sequence[Tensor]:
    """Return `weights`, which are fp32, unchanged. Their gradients are multiplied by `inverse`, a 0-dim fp32 tensor, in one launch.

    The weights share their memory with the results. In a backward the node waits for the last gradient. A weight with a hook on its
    gradient has a node of its own, because autograd calls the hook whenever the node runs. In a shared node the hook would get None if only
    other weights have gradients in a backward. Weights that are not plain dense memory (DTensor and other subclasses) have nodes of their
    own, and so have all weights while forward-mode derivatives are computed.

    `own`: only casts read the weights. Each gradient is then made by the backward of a cast and may be overwritten.
    """
    if not torch.is_grad_enabled() or in_forward_mode() or not _are_dense(weights):
        return [unscale_gradient(weight, inverse) for weight in weights]
    if all(map(_learns, weights)) and not any(map(_hooks, weights)):
        shared: Sequence[Tensor] = _Together.apply(inverse, own, *weights)
        return shared
    together = [weight for weight in weights if weight.requires_grad and not weight._backward_hooks]
    linked = dict(zip(map(id, together), _Together.apply(inverse, own, *together) if together else (), strict=True))
    return [linked[id(weight)] if id(weight) in linked else unscale_gradient(weight, inverse) for weight in weights]


def _are_dense(tensors: Sequence[Tensor | None]) -> bool:
    """True if all `tensors` are ordinary strided memory; False if one is None."""
    return _PLAIN.issuperset(map(type, tensors)) and _STRIDED.issuperset(map(_layout, tensors))


class _Together(torch.autograd.Function):
    """Autograd node of `unscale_together`. If a weight gets no gradient in a backward, the result for it is None, not zeros."""

    @staticmethod
    def forward(ctx: Any, inverse: Tensor, own: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inverse, ctx.own = inverse, own
        return tuple(map(Tensor.detach, weights))

    @staticmethod
    @uncaptured
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dense = _are_dense(gradients)  # False, too, if a gradient is missing
        present: Any = gradients if dense else [gradient for gradient in gradients if gradient is not None]
        batched = any(map(is_legacy_batched, present)) or any(map(is_wrapped_by_transform, present))
        if torch.is_grad_enabled() or batched or not (dense or _are_dense(present)):
            return None, None, *[each if each is None else leaving(each, ctx.inverse, each.dtype) for each in gradients]
        if not present:  # happens if the forward itself computes gradients, but only of other weights
            return None, None, *gradients
        factor, where = ctx.inverse, present[0].device
        if factor.device != where:
            factor = on_device(factor, where)
        if ctx.own:
            torch._foreach_mul_(present, factor)
            return None, None, *gradients
        products = torch._foreach_mul(present, factor)
        if dense:
            return None, None, *products
        rest = iter(products)
        return None, None, *[each if each is None else next(rest) for each in gradients]
