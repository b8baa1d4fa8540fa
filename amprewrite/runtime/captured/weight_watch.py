"""Check whether decisions for the weights at capture hold for the weights now.

fp16 keeps the readers of a weight high if the weight does not fit: it holds more than 65504, or all of it is below fp16's smallest
number; a bias may be flushed, since it is only added to a product. Training moves weights in and out of that. So weights are looked at
again

1. after a step that was skipped for an overflow, and before training is given up;
2. when the model goes from training to evaluation or back, and when a state dict is loaded;
3. at calls 16, 32, 64 ... 1024, and at every 1024th from then on.

A look takes one multi-tensor norm and one read by the host for each device: a pass over the weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import is_opaque
from amprewrite.graphs.fx.ops.cuda_graphs import recording
from amprewrite.graphs.fx.read.bodies import operands
from amprewrite.graphs.fx.read.magnitudes import largest, weights_among
from amprewrite.ir.evidence.range_rules import Fit, fit
from amprewrite.ir.op_graph import Demand
from amprewrite.tables.boundary.members import named_buffers_in, named_parameters_in
from amprewrite.tables.formats import Format

BOUNDS = frozenset({Fit.TOO_LARGE, Fit.FLUSHED})
FIRST_LOOK, LAST_DOUBLING = 16, 1024
"""Calls at which weights are looked at: the first, and from where on the distance does not double any more."""


@dataclass(frozen=True)
class Known:
    """A weight by its path, and whether it fitted the low format when it was captured; `reference` if the model has no such path."""

    name: str
    fit: Fit
    reference: weakref.ref[Tensor] | None = None
    bounds: frozenset[Fit] = BOUNDS
    """The misfits that keep a reader of it high."""

    def judged(self, size: float, low: Format) -> Fit:
        """Its fit at another size; what harms no reader fits."""
        found = fit(size, low)
        return found if found in self.bounds else Fit.FITS


@dataclass(frozen=True)
class Moved:
    """A weight that fits now and did not, or the other way round."""

    name: str
    size: float
    before: Fit
    now: Fit

    def says(self, low: Format) -> str:
        """How its size changed, as a note for the plan."""
        how = {
            Fit.TOO_LARGE: f"{low.name} ends at {low.max:g}",
            Fit.FLUSHED: f"{low.name} flushes that to zero",
            Fit.FITS: f"which {low.name} holds now",
        }
        return f"captured anew: {self.name} has come to {self.size:.3g}, and {how[self.now]}"


def known_weights(captured: Captured, inputs: Sequence[Any], root: nn.Module) -> list[Known]:
    """The weights among the inputs of a captured graph, for `moved`; `captured.problem.magnitudes` has their sizes."""
    sizes, low = captured.problem.magnitudes, captured.problem.policy.low
    own = weights_by_path(root)
    found: list[Known] = []
    for name, tensor in weights_among(captured, inputs).items():
        bounds = frozenset(_bounds(captured, name))
        if name in sizes and bounds:
            known = Known(name, Fit.FITS, None if own.get(name) is tensor else weakref.ref(tensor), bounds)
            found.append(replace(known, fit=known.judged(sizes[name], low)))
    return found


def _bounds(captured: Captured, name: str) -> Iterator[Fit]:
    """The misfits that keep high the ops that would read a low copy of this weight, including ops in bodies of checkpoints."""
    for reader in captured.problem.graph.readers(name):
        node = captured.nodes[reader.name]
        part = captured.parts.get(node)
        if part is not None:
            for inner, outer in operands(node, part.module):
                if captured.names.get(outer) == name and inner in part.names:
                    yield from _bounds(part, part.names[inner])
        elif is_opaque(node):
            yield from BOUNDS
        for operand in reader.operands:
            if operand.value == name and operand.demand in (Demand.COLOUR, Demand.PROMOTE):
                yield Fit.TOO_LARGE
                if not operand.summand:
                    yield Fit.FLUSHED


def weights_by_path(root: nn.Module) -> dict[str, Tensor]:
    """The current parameters and buffers of a model, by path."""
    return {**dict(named_parameters_in(root, remove_duplicate=False)), **dict(named_buffers_in(root, remove_duplicate=False))}


def moved(known: Iterable[Known], weights: Mapping[str, Tensor], low: Format) -> list[Moved]:
    """The weights that changed sides; none while a CUDA graph is being recorded."""
    now = [(each, weights.get(each.name) if each.reference is None else each.reference()) for each in known]
    here = [(each, tensor, part) for each, tensor in now if tensor is not None and (part := _readable(tensor)) is not None]
    if not here or any(recording(device) for device in {part.device for *_, part in here}):
        return []
    sizes = largest([part for *_, part in here])
    found = [
        (tensor is part, Moved(each.name, size, each.fit, each.judged(size, low)))
        for (each, tensor, part), size in zip(here, sizes, strict=True)
    ]
    return [each for whole, each in found if each.now is not each.before and (whole or each.now is Fit.TOO_LARGE)]


def _readable(tensor: Tensor) -> Tensor | None:
    """The part of a tensor that this process can read alone: all of it, its own shard of a distributed tensor, or None.

    A shard shows that a weight has become too large, and nothing else. FSDP frees gathered weights and leaves the tensors.
    """
    to_local = getattr(tensor, "to_local", None)
    part = tensor if to_local is None else to_local()
    plain = type(part) in (Tensor, nn.Parameter) and part.layout == torch.strided and part.device.type != "meta"
    return part if plain and part.numel() and part.untyped_storage().nbytes() > 0 else None


class Schedule:
    """Says at which calls to look."""

    def __init__(self) -> None:
        self.due = False
        """Something happened that makes a look worth while."""
        self._calls = 0
        self._training: bool | None = None

    def look_now(self, training: bool) -> bool:
        """Count a call of a model in this mode; whether to look before it."""
        switched = self._training is not None and training != self._training
        self._calls, self._training = self._calls + 1, training
        doubling = FIRST_LOOK <= self._calls <= LAST_DOUBLING and self._calls & (self._calls - 1) == 0
        now = self.due or switched or doubling or self._calls % LAST_DOUBLING == 0
        self.due = False
        return now


__all__ = ["Known", "Moved", "Schedule", "known_weights", "moved", "weights_by_path"]
