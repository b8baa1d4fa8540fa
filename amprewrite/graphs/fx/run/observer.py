"""Run captured graphs in fp32, op by op, and record the range of every value."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import is_checkpoint, storages, tensors, written
from amprewrite.graphs.fx.ops.on_device import local_part
from amprewrite.graphs.fx.run.range_dangers import poles
from amprewrite.graphs.fx.weights.frozen_weight import thawed
from amprewrite.ir.evidence.ranges import RegionRanges, ValueRange, fingerprint
from amprewrite.ir.op_graph import OpNode
from amprewrite.tables.vocabulary import Reason


class Observer:
    """Callable that runs captured graphs op by op in fp32, and records the ranges of all their values in `regions`.

    If `gradients` is True, it also records the ranges of gradients. If `weights` is False, it skips weights, whose ranges capture has
    measured, unless an op with a pole at zero (`log`, `reciprocal`) reads them. If `brief` is True, it records no histograms, and it
    records the smallest magnitude only of values that such ops read.
    """

    def __init__(self, gradients: bool = False, weights: bool = True, brief: bool = False) -> None:
        self.gradients, self.weights, self.brief = gradients, weights, brief
        self.regions: dict[str, RegionRanges] = {}
        self.meshes: dict[Any, None] = {}
        """Device meshes of the DTensors among the values. Of a DTensor only the part on this rank is observed."""
        self._fingerprints: dict[int, tuple[Captured, str]] = {}

    def __call__(self, captured: Captured, inputs: tuple[Any, ...]) -> Any:
        if id(captured) not in self._fingerprints:
            self._fingerprints[id(captured)] = (captured, fingerprint(captured.problem.graph))
        graph = self._fingerprints[id(captured)][1]
        region = self.regions.setdefault(graph, RegionRanges(graph, captured.problem.name))
        return _ObservingInterpreter(captured, region, self).run(*inputs)


def inside_transform(vertex: OpNode) -> bool:
    """True if `vertex` is inside a torch.func transform. Code outside cannot read such a value, and its op is not rewritten."""
    return vertex.pinned is not None and vertex.pinned[1] is Reason.TRANSFORMED


class _ObservingInterpreter(torch.fx.Interpreter):
    """Runs a captured graph unchanged, and adds the ranges of its values to `region`."""

    def __init__(self, captured: Captured, region: RegionRanges, watch: Observer) -> None:
        super().__init__(captured.module, garbage_collect_values=True)
        self.captured, self.region, self.watch = captured, region, watch
        self.vertices = {node: captured.problem.graph[name] for name, node in captured.nodes.items()}
        self.poles = set(chain.from_iterable(map(poles, captured.problem.graph)))

    def run_node(self, n: torch.fx.Node) -> Any:
        result = self._run_body(n) if is_checkpoint(n) else super().run_node(n)
        vertex = self.vertices.get(n)
        if vertex is None or not vertex.carries_fp32 or vertex.role == "output" or inside_transform(vertex):
            return result
        if vertex.role == "parameter" and not self.watch.weights and vertex.name not in self.poles:
            return result
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
        """Observe again the earlier values that share memory with `changed`, the tensors that `n` wrote."""
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

            def look(gradient: torch.Tensor) -> None:
                gradients[name] = gradients.get(name, ValueRange()) | ValueRange.of(gradient)

            tensor.register_hook(look)

    def _run_body(self, n: torch.fx.Node) -> Any:
        """Run the body of an activation checkpoint like any captured graph. It needs no checkpoint, because no backward recomputes it."""
        args = self.fetch_args_kwargs_from_env(n)[0]
        return self.watch(self.captured.parts[n], args[1:])
