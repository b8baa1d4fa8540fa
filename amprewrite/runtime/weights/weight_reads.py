"""Find out how a rewritten graph reads each weight of its model: cast to the low format (bf16 or fp16), in fp32, or both. Check later
whether the plan, which was made for the weights at capture, still fits the present weights.

An op that reads a weight stays fp32 in an fp16 plan if the weight does not fit fp16: if its largest value exceeds 65504, or if all of its
values are below fp16's smallest number. (The second case does not count for a bias, which is only added to a product.) Training can
move a weight into or out of this range. So the weights are checked again

1. after a step that was skipped for an overflow, and before training is stopped with an error;
2. when the model switches between training and evaluation mode, and when a state dict is loaded;
3. at calls 16, 32, 64 ... 1024, and at every 1024th call after that.

A check takes one multi-tensor norm, which reads all weights, and one transfer to the host, for each device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import is_opaque
from amprewrite.graphs.fx.ops.on_device import local_part, recording
from amprewrite.graphs.fx.read.bodies import operands
from amprewrite.graphs.fx.read.number_facts import largest, weights_among
from amprewrite.ir.evidence.range_rules import Fit, fit
from amprewrite.ir.op_graph import Demand
from amprewrite.passes.lower.emit import Emitted
from amprewrite.passes.lower.hoist_weight_casts import Copy
from amprewrite.tables.boundary.members import named_buffers_in, named_parameters_in
from amprewrite.tables.errors import CaptureError
from amprewrite.tables.formats import Format


@dataclass(frozen=True)
class WeightReads:
    """The paths of the weights that one graph reads. Two sets, `low` and `full`, say how the graph reads them.

    `low`: weights that the graph casts to the low format and reads in no other way. `full`: all other weights that it reads.
    """

    low: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    copies: Mapping[str, frozenset[Copy | None]] = field(default_factory=dict)
    """{path of a weight: set of the low copies (dtype, layout) that the graph makes of it}. None in a set stands for a read in fp32. A tied
    weight is listed under one of its paths."""


class RoundedRead(CaptureError):
    """Raised if code may read rounded values as fp32: after `gather_low`, FSDP2 gathers weights in the low format.

    The functions of `ReadChecks` raise it. Captured graphs stay valid.
    """


@dataclass
class ReadChecks:
    """Functions that check whether a model reads rounded weights in fp32, and raise RoundedRead if it does.

    `gather_low` adds these functions. It makes FSDP2 gather weights in the low format, so the gathered weights are rounded.
    """

    graphs: tuple[Callable[[WeightReads, str], None], ...] = ()
    """Functions called before a graph runs. Arguments: how it reads weights, and the name of its code. They raise RoundedRead if the graph
    must not run."""
    calls: tuple[Callable[[str, str, bool], None], ...] = ()
    """Functions called after a call of a module. Arguments: its path, its name for messages, and True if the module's whole forward ran as
    one graph in the call. They raise RoundedRead if the call may have read rounded weights in fp32."""


def weight_reads(emitted: Emitted, inputs: Sequence[Any], root: nn.Module) -> WeightReads:
    """Return how a graph reads the weights of the model `root`: cast to the low format, in fp32, or both.

    `emitted` is the rewritten graph as a callable. `inputs` are the inputs of the graph, which include the weights.
    """
    names: dict[int, list[str]] = {}
    for name, weight in named_parameters_in(root, remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    reads: dict[bool, set[str]] = {True: set(), False: set()}
    weights = {place: names[id(value)] for place, value in enumerate(inputs) if id(value) in names}
    for place, paths in weights.items():
        if emitted.copies[place]:
            reads[place in emitted.low_alone].update(paths)
    copies = {paths[-1]: emitted.copies[place] for place, paths in weights.items()}
    return WeightReads(frozenset(reads[True] - reads[False]), frozenset(reads[False]), copies)


BOUNDS = frozenset({Fit.TOO_LARGE, Fit.FLUSHED})
"""The two ways in which a weight may not fit the low format: a value is too large, or all values are flushed to zero."""
FIRST_LOOK, LAST_DOUBLING = 16, 1024
"""Weights are checked at call FIRST_LOOK, at each doubling of this number up to LAST_DOUBLING, and at every multiple of LAST_DOUBLING."""


@dataclass(frozen=True)
class Known:
    """A weight that a graph reads, and whether its values fitted the low format at capture. `moved` checks if that has changed."""

    name: str
    """Name of the weight in the op graph. It usually is the path of the weight in the model, by which its present value is found."""
    fit: Fit
    reference: weakref.ref[Tensor] | None = None
    """A weak reference to the weight, by which it is found if `name` is not its path in the model; otherwise None."""
    bounds: frozenset[Fit] = BOUNDS
    """The misfits (too large, or all flushed to zero) that keep an op that reads the weight in fp32."""

    def judged(self, size: float, low: Format) -> Fit:
        """Return how a weight whose largest magnitude is `size` fits the low format: it fits, is too large, or is flushed to zero.

        Only the misfits in `bounds` count, because they keep an op in fp32. For any other misfit return `Fit.FITS`.
        """
        found = fit(size, low)
        return found if found in self.bounds else Fit.FITS


def known_weights(captured: Captured, inputs: Sequence[Any], root: nn.Module) -> list[Known]:
    """Return the weights among the `inputs` of a captured graph that `moved` must check again later: do they still fit the low format?

    A weight is left out if no op's format depends on this, or if its largest value is not in `captured.problem.magnitudes`.
    """
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
    """Yield the misfits (`Fit.TOO_LARGE`, `Fit.FLUSHED`) that would keep an op that reads the weight `name` in fp32.

    Ops in the body graphs of checkpoints count as well. A misfit may be yielded several times.
    """
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
    """Return the current parameters and buffers of a model, by path. A tied tensor appears under each of its paths."""
    return {**dict(named_parameters_in(root, remove_duplicate=False)), **dict(named_buffers_in(root, remove_duplicate=False))}


def moved(known: Iterable[Known], weights: Mapping[str, Tensor], low: Format) -> list[tuple[str, Fit]]:
    """Return (note for the plan, present `Fit`) for each weight in `known` whose fit to the low format has changed since capture.

    `weights` has the present weights by path. If a weight is sharded over ranks, only the local shard is read, so only a change to "too
    large" counts. Returns [] while a CUDA graph is being recorded, because the check needs a host sync.
    """
    now = [(each, weights.get(each.name) if each.reference is None else each.reference()) for each in known]
    here = [(each, tensor, part) for each, tensor in now if tensor is not None and (part := _readable(tensor)) is not None]
    if not here or any(recording(device) for device in {part.device for *_, part in here}):
        return []
    how = {
        Fit.TOO_LARGE: f"{low.name} ends at {low.max:g}",
        Fit.FLUSHED: f"{low.name} flushes that to zero",
        Fit.FITS: f"which {low.name} holds now",
    }
    found = []
    for (each, tensor, part), size in zip(here, largest([part for *_, part in here]), strict=True):
        fits = each.judged(size, low)
        if fits is not each.fit and (tensor is part or fits is Fit.TOO_LARGE):
            found.append((f"captured anew: {each.name} has come to {size:.3g}, and {how[fits]}", fits))
    return found


def _readable(tensor: Tensor) -> Tensor | None:
    """Return the part of a tensor that this process can read without other ranks; None if there is none.

    The part is the whole tensor, or the local shard of a DTensor. If a shard fits the low format, the weight may still be too large: other
    shards may hold larger numbers. The result is None, for instance, if FSDP has freed the memory of the weight.
    """
    part = local_part(tensor)
    plain = type(part) in (Tensor, nn.Parameter) and part.layout == torch.strided and part.device.type != "meta"
    return part if plain and part.numel() and part.untyped_storage().nbytes() > 0 else None


class Schedule:
    """Decides before which calls of a model its weights are checked (a list is at the top of this file)."""

    def __init__(self) -> None:
        self.due = False
        """True if an event asks for a check before the next call, such as a skipped step or a loaded state dict."""
        self._calls = 0
        self._training: bool | None = None

    def look_now(self, training: bool) -> bool:
        """Count a call of the model, and return True if its weights must be checked before the call. `training`: the mode of the model."""
        switched = self._training is not None and training != self._training
        self._calls, self._training = self._calls + 1, training
        doubling = FIRST_LOOK <= self._calls <= LAST_DOUBLING and self._calls & (self._calls - 1) == 0
        now = self.due or switched or doubling or self._calls % LAST_DOUBLING == 0
        self.due = False
        return now
