"""Run captured graphs in fp32, op by op, and record the range of every value.

`dangers` finds the values that would leave the low format's range under a plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import is_checkpoint, storages, tensors, written
from amprewrite.graphs.fx.ops.on_device import local_part
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.graphs.fx.weights.frozen_weight import thawed
from amprewrite.ir.evidence.counts import UNSET
from amprewrite.ir.evidence.range_rules import POLES, hands_on_small
from amprewrite.ir.evidence.ranges import RegionRanges, ValueRange, fingerprint
from amprewrite.ir.op_graph import OpGraph, OpNode, reached
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import Colour, Reason


class Observer:
    """Callable that runs captured graphs op by op in fp32, and records the ranges of all their values in `regions`.

    If `gradients` is True, it also records the ranges of gradients. If `weights` is False, it skips parameters, because capture knows their
    ranges. But a parameter whose zeros reach an op with a pole at zero (`log`, `reciprocal`) is recorded. If `brief` is True, it saves
    time: it records no histograms, and smallest magnitudes only for values whose zeros reach such an op (`before_pole`).
    """

    def __init__(self, gradients: bool = False, weights: bool = True, brief: bool = False) -> None:
        self.gradients, self.weights, self.brief = gradients, weights, brief
        self.regions: dict[str, RegionRanges] = {}
        self.meshes: dict[Any, None] = {}
        """Device meshes of the DTensors among the values. Each rank observes only its part of a DTensor, so the ranks exchange ranges."""
        self._fingerprints: dict[int, tuple[Captured, str]] = {}

    def __call__(self, captured: Captured, inputs: tuple[Any, ...]) -> Any:
        if id(captured) not in self._fingerprints:
            self._fingerprints[id(captured)] = (captured, fingerprint(captured.problem.graph))
        graph = self._fingerprints[id(captured)][1]
        region = self.regions.setdefault(graph, RegionRanges(graph, captured.problem.name))
        return _ObservingInterpreter(captured, region, self).run(*inputs)


def inside_transform(vertex: OpNode) -> bool:
    """True if the op `vertex` is inside a torch.func transform. Code outside cannot read its value, and the op is not rewritten."""
    return vertex.pinned is not None and vertex.pinned[1] is Reason.TRANSFORMED


class _ObservingInterpreter(torch.fx.Interpreter):
    """Runs a captured graph unchanged, and adds the ranges of its values to `region`."""

    def __init__(self, captured: Captured, region: RegionRanges, watch: Observer) -> None:
        super().__init__(captured.module, garbage_collect_values=True)
        self.captured, self.region, self.watch = captured, region, watch
        self.vertices = {node: captured.problem.graph[name] for name, node in captured.nodes.items()}
        graph = captured.problem.graph
        self.poles = set(chain.from_iterable(before_pole(graph, vertex) for vertex in graph))

    def run_node(self, n: torch.fx.Node) -> Any:
        result = self._run_body(n) if is_checkpoint(n) else super().run_node(n)
        vertex = self.vertices.get(n)
        if vertex is None or not vertex.carries_fp32 or vertex.role == "output" or inside_transform(vertex):
            return result
        if vertex.role == "parameter" and not self.watch.weights and vertex.name not in self.poles:
            return result
        if vertex.op in UNSET:
            with torch.no_grad():
                result.fill_(1)  # overwrite the numbers in uninitialised memory: they are no values of the model
        shown = tensors(thawed(result))
        if not shown and n.args and isinstance(n.args[0], torch.fx.Node):
            shown = tensors(self.env.get(n.args[0]))  # setitem and similar ops return nothing, so observe the tensor that they wrote
        self.watch.meshes |= {tensor.device_mesh: None for tensor in shown if hasattr(tensor, "device_mesh")}
        for tensor in map(local_part, shown):
            if tensor.dtype == torch.float32 and tensor.layout == torch.strided:
                self._see(vertex.name, tensor, still=vertex.role == "parameter")
        # A write changes earlier values in the same memory, so observe these values again. A mask that is written into attention scores
        # (`may_saturate`) is an exception: its numbers may be clamped to the low format's range, so they must not count as an overflow of
        # the scores.
        if written(n) and not vertex.may_saturate:
            self._see_again(n, tensors(result) or shown)
        return result

    def fetch_args_kwargs_from_env(self, n: torch.fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of an op, with frozen weights cast to fp32. Each op makes its own cast, so fp32 copies are freed early."""
        found: tuple[tuple[Any, ...], dict[str, Any]] = map_aggregate(super().fetch_args_kwargs_from_env(n), thawed)  # type: ignore[assignment]
        return found

    def _see_again(self, n: torch.fx.Node, changed: list[torch.Tensor]) -> None:
        """Record again the ranges of earlier values that share memory with `changed`, the tensors that `n` wrote."""
        memory = storages(list(map(local_part, changed)))
        for other, value in self.env.items():
            vertex = self.vertices.get(other)
            if other is n or vertex is None or vertex.role != "op" or not vertex.carries_fp32 or inside_transform(vertex):
                continue
            for tensor in map(local_part, tensors(value)):
                if tensor.dtype == torch.float32 and tensor.layout == torch.strided and not memory.isdisjoint(storages(tensor)):
                    self._see(vertex.name, tensor, still=False)

    def _see(self, name: str, tensor: torch.Tensor, still: bool) -> None:
        values, gradients = self.region.values, self.region.gradients
        assert isinstance(values, dict) and isinstance(gradients, dict)
        if not (still and name in values):
            found = ValueRange.limits(tensor, name in self.poles) if self.watch.brief else ValueRange.of(tensor)
            values[name] = values.get(name, ValueRange()) | found
        if self.watch.gradients and tensor.requires_grad and torch.is_grad_enabled():

            @uncaptured
            def look(gradient: torch.Tensor | None) -> None:
                if gradient is not None:  # the gradient is None if an `autograd.Function` that reads the value returns None for it
                    gradients[name] = gradients.get(name, ValueRange()) | ValueRange.of(gradient)

            tensor.register_hook(look)

    def _run_body(self, n: torch.fx.Node) -> Any:
        """Run the body of an activation checkpoint under the observer. Its values stay in memory, so no backward recomputes them."""
        args = self.fetch_args_kwargs_from_env(n)[0]
        return self.watch(self.captured.parts[n], args[1:])


ROOM = 2
"""Safety factor: low ops are assumed to return values up to this many times larger or smaller than fp32 ops."""
_EXCHANGES, _DIVIDES = ops_with(Trait.EXCHANGES_INFINITIES), ops_with(Trait.DIVIDES)


def exchanges_infinities(captured: Captured) -> bool:
    """True if an op of the graph may hide an infinity: it returns a finite value for an infinity, or tests for infinities."""
    return any(vertex.op in _EXCHANGES for vertex in captured.problem.graph)


def dangers(captured: Captured, plan: RegionPlan, seen: Mapping[str, RegionRanges]) -> Iterator[str]:
    """Yield a description of each value that would cause an infinity if computed in, or cast to, the low format as `plan` does.

    Either the value is too large for the format. Or it becomes zero, and an op that returns an infinity for zero (`log`, `reciprocal`)
    reads it. `seen` holds the ranges of an fp32 run, by fingerprint of the graph.
    """
    yield from too_large(captured, plan, seen)
    smallest = ROOM * captured.problem.policy.low.smallest_subnormal
    for each, planned in _planned(captured, plan):
        ranges, made = seen.get(fingerprint(each.problem.graph)), _made_low(planned)
        found = {} if ranges is None else {name: value for name, value in ranges.values.items() if value.smallest < smallest}
        read_low = made | _copied_low(each, planned)
        for vertex in each.problem.graph if found else ():
            low = read_low if vertex.name in made else made  # an fp32 op reads no low copies: only results of low ops reach it rounded
            for name in before_pole(each.problem.graph, vertex):
                if name in low and name in found:
                    yield f"{name} comes down to {found[name].smallest:.3g} before {vertex.name}"


def too_large(captured: Captured, plan: RegionPlan, seen: Mapping[str, RegionRanges], room: float = ROOM) -> Iterator[str]:
    """Yield a description of each value that may exceed the low format's range where `plan` computes it in, or casts it to, this format.

    The largest magnitude of an op's result is multiplied by `room`, because other inputs may give larger values. Other values, such as
    weights, have no such margin. Values that may be clamped to ±max, such as masks, are left out. `seen` holds the ranges of an fp32 run,
    by fingerprint of the graph.
    """
    end = captured.problem.policy.low.max
    for each, planned in _planned(captured, plan):
        graph, ranges = each.problem.graph, seen.get(fingerprint(each.problem.graph))
        low = {name for name in _made_low(planned) if not graph[name].may_saturate} | _copied_low(each, planned)
        for name, value in ranges.values.items() if ranges is not None else ():
            if name in low and value.amax * (room if graph[name].role == "op" else 1) > end:
                yield f"{name} reaches {value.amax:.3g}"


def _made_low(plan: RegionPlan) -> set[str]:
    """Return the names of the ops that `plan` runs in the low format."""
    return {node.name for node in plan.nodes if node.colour is Colour.LOW and node.role == "op"}


def _copied_low(captured: Captured, plan: RegionPlan) -> set[str]:
    """Return the names of the values that `plan` casts to the low format without clamping."""
    return {cast.value for cast in plan.casts if cast.to == captured.problem.policy.low.name and not cast.saturate}


def unobserved(captured: Captured, plan: RegionPlan) -> bool:
    """True if `plan` runs ops low in the body graph of a loop or a condition. No run observes the values of such a graph."""
    bodies = {each.name: each for each in plan.bodies}
    parts = {part.problem.name: part for part in captured.parts.values()}
    hidden = (body for name, body in bodies.items() if name not in parts)
    if any(map(_made_low, hidden)):
        return True
    return any(unobserved(part, bodies[name]) for name, part in parts.items() if name in bodies)


def before_pole(graph: OpGraph, vertex: OpNode) -> Iterator[str]:
    """Yield the names of the values whose zeros the op `vertex` turns into infinities, such as the divisor of a division.

    If such a value is made by an op whose result is small for a small operand, such as `square`, the op's operands are yielded, too.
    """
    operands = vertex.operands if vertex.op in POLES else vertex.operands[1:2] if vertex.op in _DIVIDES else ()
    return reached([each.value for each in operands], lambda name: _handed_on(graph[name]))


def _handed_on(vertex: OpNode) -> list[str]:
    return [each.value for each in vertex.operands] if vertex.role == "op" and hands_on_small(vertex.op) else []


def _planned(captured: Captured, plan: RegionPlan) -> list[tuple[Captured, RegionPlan]]:
    """Return pairs (graph, its plan): for `captured`, and for the bodies of its activation checkpoints, nested bodies included."""
    plans = {each.name: each for each in plan.bodies}
    found = [(captured, plan)]
    for part in captured.parts.values():
        if part.problem.name in plans:
            found += _planned(part, plans[part.problem.name])
    return found
