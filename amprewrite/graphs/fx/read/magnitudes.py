"""How large the weights and the constants of a captured graph are: known without any data.

A constant beyond the low range becomes its end if that says the same: if it blocks a position or bounds a value. Any other is a number
to compute with, and keeps its op high: a value that became the end of the range would be wrong, and finite, so that nothing shows it.

By name it knows `mul`, which makes a large constant larger, `clamp_max`, whose only bound is an upper one, and what makes attention of
scores: `add`, `softmax`, `scaled_dot_product_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import Fact, arguments, example_value, held_value, tensors
from amprewrite.graphs.fx.uncaptured import unselected
from amprewrite.ir.evidence.range_rules import (
    ADDS_UP,
    MAKES_SCORES,
    PASSES_MASK,
    bound_fits,
    has_offset,
    means_mask,
    rows_have_offset,
    summands,
    tables,
)
from amprewrite.ir.op_graph import OpGraph
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import Trait, find_op, op_name, ops_with
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

_ORDINARY = 64
"""Activations of this size are nothing out of the ordinary."""
_FLUSHES = ops_with(Trait.ZERO_MATTERS)
_NORMS = ops_with(Trait.TAKES_MEAN_AWAY) | {"rms_norm"}
_FILLS, _BOUNDS, _MAKE_MASKS = ops_with(Trait.FILLS), ops_with(Trait.BOUNDS), ops_with(Trait.MAKES_MASK)


def magnitudes(captured: Captured, inputs: Sequence[Any]) -> dict[str, float]:
    """Largest magnitude of each fp32 parameter and buffer of the graph, by node; {} for a wide low format."""
    found = weights_among(captured, inputs)
    return dict(zip(found, largest(list(found.values())), strict=True))


def weights_among(captured: Captured, inputs: Sequence[Any]) -> dict[str, Tensor]:
    """The fp32 parameters and buffers that the graph takes among its `inputs` or reads from its module, by node.

    {} for a wide low format. Tensors of other classes (distributed, fake) are left out: looking at them is not free.
    """
    return _plain_weights(captured, inputs) if captured.problem.policy.low.narrow else {}


def _plain_weights(captured: Captured, inputs: Sequence[Any]) -> dict[str, Tensor]:
    names, graph = captured.names, captured.module.graph
    placeholders = zip(graph.find_nodes(op="placeholder"), inputs, strict=False)
    held = ((node, held_value(node)) for node in graph.find_nodes(op="get_attr"))
    found: dict[str, Tensor] = {}
    for node, value in (*placeholders, *held):
        vertex = captured.problem.graph.nodes.get(names.get(node, ""))
        plain = type(value) in (Tensor, nn.Parameter) and value.dtype == torch.float32 and value.layout == torch.strided
        if plain and vertex is not None and vertex.role in ("parameter", "buffer") and value.device.type != "meta" and value.numel():
            found[vertex.name] = value
    return found


def offsets(captured: Captured, inputs: Sequence[Any]) -> frozenset[str]:
    """The parameters and buffers that are added to something, and tables of rows, that have an offset (`has_offset`), by node.

    The rows of a table may have something in common, too. The host reads once a device.

    Training moves none to an offset in front of a norm: the norm takes it away, and its gradient with it.
    """
    found, looked_up = summands(captured.problem.graph), tables(captured.problem.graph)
    weights = _plain_weights(captured, inputs).items()
    added = {name: weight.detach() for name, weight in weights if name in found and weight.numel() > 1}
    rows = {name: weight.detach() for name, weight in weights if name in looked_up and weight.dim() > 1}
    with torch.no_grad(), unselected():
        flags = [has_offset(weight, found[name]) for name, weight in added.items()]
        flags += [rows_have_offset(weight) for weight in rows.values()]
        flags = _read(flags)
    return frozenset(name for name, offset in zip((*added, *rows), flags, strict=True) if offset)


def factors(captured: Captured, inputs: Sequence[Any]) -> dict[str, float]:
    """Root mean squares, with the signs of the means, of the learnt numbers that may scale something, by node; one read a device.

    They are those of one dim at most, as a factor a channel has, that other ops than products, norms and sums of several read.
    """
    graph = captured.problem.graph
    found = {name: weight.detach() for name, weight in _plain_weights(captured, inputs).items() if _may_scale(graph, name, weight)}
    if not found:
        return {}
    with torch.no_grad(), unselected():
        squares = _read(torch._foreach_norm(list(found.values())))
        signs = _read([weight.mean() for weight in found.values()])
    return {
        name: math.copysign(square / math.sqrt(weight.numel()), sign)
        for (name, weight), square, sign in zip(found.items(), squares, signs, strict=True)
    }


def _may_scale(graph: OpGraph, name: str, weight: Tensor) -> bool:
    """Whether a weight of one dim at most is read by something else than products, norms and sums of several."""
    if graph[name].role != "parameter" or sum(size > 1 for size in weight.shape) > 1:
        return False
    readers = list(graph.readers(name))
    other = (each for each in readers if each.kind is not OpKind.ALLOW and each.op not in _NORMS)
    return any(each.op not in ADDS_UP or len(each.operands) == 1 for each in other)


def largest(tensors: Sequence[Tensor]) -> list[float]:
    """Largest magnitude of each; one read by the host for each device."""
    if not tensors:
        return []
    with torch.no_grad(), unselected():
        return _read(torch._foreach_norm([tensor.detach() for tensor in tensors], ord=float("inf")))


def _read(numbers: Sequence[Tensor]) -> list[Any]:
    """0-dim tensors as numbers; one read by the host for each device."""
    found: list[Any] = [None] * len(numbers)
    for device in {number.device for number in numbers}:
        places = [place for place, number in enumerate(numbers) if number.device == device]
        for place, number in zip(places, torch.stack([numbers[place] for place in places]).tolist(), strict=True):
            found[place] = number
    return found


def _constants(node: torch.fx.Node) -> list[float]:
    return [float(leaf) for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, float) and math.isfinite(leaf)]


def pin_constant(fact: Fact, low: Format) -> tuple[Colour, Reason, str] | None:
    """A constant that the low format flushes to zero, or one beyond its range that may not become its end, keeps its op high."""
    for constant in _constants(fact.node):
        size = abs(constant)
        if 0 < size < low.smallest_subnormal and fact.op in _FLUSHES:
            return Colour.HIGH, Reason.CONSTANT, f"{constant:g} vanishes in {low.name}"
        if size > low.max and not _becomes_end(fact, constant, low):
            return Colour.HIGH, Reason.CONSTANT, f"{constant:g} exceeds {low.name}"
        if size * _ORDINARY > low.max and fact.op == "mul":
            return Colour.HIGH, Reason.CONSTANT, f"{constant:g} times an ordinary activation exceeds {low.name}"
    return None


def _becomes_end(fact: Fact, constant: float, low: Format) -> bool:
    """Whether an op that runs low may take the end of the range for a constant beyond it."""
    if fact.op in _FILLS:
        return _blocks(fact.node, constant)
    if fact.op not in _BOUNDS:
        return False
    return all(bound_fits(bound, lower, low) for bound, lower in _bounds(fact) if isinstance(bound, float))


def _bounds(fact: Fact) -> Iterator[tuple[Any, bool]]:
    """The bounds that an op of `_BOUNDS` is given, each with whether it is a lower one."""
    args, named = fact.node.args, fact.node.kwargs
    yield from zip(args[1:3], (False,) if fact.op == "clamp_max" else (True, False), strict=False)
    yield from ((named.get(name), name.startswith("min")) for name in ("min", "min_val", "max", "max_val"))


def _blocks(node: torch.fx.Node, constant: float) -> bool:
    """Whether a constant that is filled in blocks a position: it is too large for anything else, or a negative score."""
    return means_mask(constant) or (constant < 0 and _reaches_softmax(node))


def may_saturate(fact: Fact, facts: Mapping[torch.fx.Node, Fact], low: Format) -> bool:
    """Whether values beyond the range may become its end in a low copy: those of a mask, and of what is made of one.

    What holds data beside a mask, as scores do in which positions are blocked, may if it is moved alone or if a softmax reads it.
    Data that is computed with may not: what became the end of the range would be wrong, and finite.
    """
    if fact.role in ("input", "buffer", "constant") and fact.dtype == "fp32" and not any(t.requires_grad for t in tensors(fact.value)):
        return _may_be_mask(fact.node)
    if fact.role != "op" or fact.dtype != "fp32" or fact.row is None:
        return False
    if fact.row.kind in (OpKind.ALLOW, OpKind.INTERNAL, OpKind.DENY):
        return False
    given = [facts[node] for _, node in arguments(fact.node)]
    far = [constant for constant in _constants(fact.node) if abs(constant) > low.max]
    if fact.op in _FILLS and any(_blocks(fact.node, constant) for constant in far):
        return _is_mask(fact) or _reaches_softmax(fact.node) or not any(map(_is_product, fact.node.users))
    if not any(map(means_mask, far)) and not any(each.may_saturate for each in given):
        return False
    return _is_mask(fact) or (not far and fact.row.kind is OpKind.CLEAR) or _reaches_softmax(fact.node)


def _is_product(node: torch.fx.Node) -> bool:
    """Whether an op is a matrix product or a convolution, by its row."""
    row = find_op(op_name(node.target)) if node.op in ("call_function", "call_method") else None
    return row is not None and row.kind is OpKind.ALLOW


def _is_mask(fact: Fact) -> bool:
    """Whether a value is made of numbers and masks alone, without data."""
    waiting, seen = [fact.node], {fact.node}
    while waiting:
        node = waiting.pop()
        if node.op not in ("call_function", "call_method") or (node is not fact.node and op_name(node.target) not in _MAKE_MASKS):
            return False
        floating = [each for each in node.all_input_nodes if any(t.is_floating_point() for t in tensors(example_value(each)))]
        waiting += [each for each in floating if each not in seen]
        seen.update(floating)
    return True


def _may_be_mask(node: torch.fx.Node) -> bool:
    """Whether a value from outside is added to attention scores: fp32's lowest would become -inf in any low format.

    Rows that block all positions, as left padding makes them, are NaN then, and stay so in all that reads them.
    """
    for reader in _followers(node, PASSES_MASK):
        if any(_takes_as_mask(user, reader) or (op_name(user.target) == "add" and _reaches_softmax(user)) for user in reader.users):
            return True
    return False


def _reaches_softmax(node: torch.fx.Node) -> bool:
    """Whether scores are made of a value, and a softmax of those, or attention adds it to its scores."""
    made = ((each, user) for each in _followers(node, MAKES_SCORES) for user in each.users)
    return any(op_name(user.target) == "softmax" or _takes_as_mask(user, each) for each, user in made)


def _takes_as_mask(node: torch.fx.Node, value: torch.fx.Node) -> bool:
    """Whether attention adds a value to its scores."""
    mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    return op_name(node.target) == "scaled_dot_product_attention" and mask is value


def _followers(node: torch.fx.Node, ops: Set[str]) -> Iterator[torch.fx.Node]:
    """`node`, and what `ops` alone make of it."""
    seen, waiting = {node}, [node]
    while waiting:
        found = waiting.pop()
        yield found
        for user in found.users:
            if user not in seen and user.op in ("call_function", "call_method") and op_name(user.target) in ops:
                seen.add(user)
                waiting.append(user)


__all__ = ["factors", "largest", "magnitudes", "may_saturate", "offsets", "pin_constant", "weights_among"]
