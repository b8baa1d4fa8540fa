"""Memory for low copies of weights: one launch writes it, and only while nothing else refers to it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from amprewrite.graphs.fx.ops.fused_copy import copy_many
from amprewrite.graphs.fx.ops.pad_ops import copy_ends, empty_padded
from amprewrite.ir.plans.pad_plan import Layout

Place = tuple[int, int, torch.dtype, Layout, int, int]
"""Storage of a weight and where it begins there, dtype and padded layout of its copy, stream, and which copy of that it is."""


class Memory:
    """Memory for the copies of one weight. It refers to the weight's storage alone, and weakly: `swap_tensors` wants no more."""

    __slots__ = ("address", "copy", "layout", "owner", "place", "storage", "target")

    def __init__(self, place: Place, weight: Tensor, layout: Layout) -> None:
        with torch.inference_mode(False):  # one that a call outside inference mode may write over, too
            self.copy = empty_padded(weight, place[2], layout)
            self.target = copy_ends(weight, self.copy.data, layout)[1] if layout else None  # `.data`: a view of `copy` would hold it
        self.place, self.layout = place, layout
        self.storage = self.copy.untyped_storage()
        self.address = self.storage._cdata
        self.owner = StorageWeakRef(weight.untyped_storage())


class Prepared:
    """What one graph needs for its copies, looked up once: the same weights find the same memory at every call."""

    __slots__ = ("ids", "memories", "shapes", "streams")

    def __init__(self, weights: Sequence[Tensor], streams: dict[int, int], memories: list[Memory]) -> None:
        self.ids, self.streams, self.memories = list(map(id, weights)), streams, memories
        self.shapes = [weight.shape for weight in weights]

    def serves(self, weights: Sequence[Tensor], streams: dict[int, int]) -> bool:
        """Whether they are the same, or others of their sizes in their place; a graph is guarded on all else."""
        same = self.ids == list(map(id, weights)) and self.streams == streams
        return same and PLAIN.issuperset(map(type, weights)) and self.shapes == [weight.shape for weight in weights]


def fill(weights: Sequence[Tensor], memories: Sequence[Memory], copies: Sequence[Tensor]) -> None:
    """Copy `weights` into memory in one launch."""
    sources, targets = weights, copies
    if [memory for memory in memories if memory.layout]:
        pairs = zip(weights, memories, strict=True)
        sources = [copy_ends(weight, memory.copy, memory.layout)[0] if memory.layout else weight for weight, memory in pairs]
        targets = [copy if memory.target is None else memory.target for memory, copy in zip(memories, copies, strict=True)]
    copy_many(sources, targets)
    asks = [weight.requires_grad for weight in weights]
    if asks != [copy.requires_grad for copy in copies]:
        for copy, ask in zip(copies, asks, strict=True):
            copy.requires_grad_(ask)


def _references(memories: Sequence[Memory], copies: list[Tensor]) -> tuple[list[int], list[int], list[int]]:
    """How many Python objects, C++ objects and tensors refer to each copy or to its memory; those that pad have a view of an alias more."""
    held = [_HELD(memory.address) if memory.target is None else _HELD(memory.address) - 2 for memory in memories]
    return list(map(sys.getrefcount, copies)), list(map(_USES, copies)), held


def all_alone(memories: Sequence[Memory], copies: list[Tensor]) -> bool:
    """Whether no other call, no view and no autograd graph holds the copies or their memory."""
    objects, uses, held = _references(memories, copies)
    return objects.count(_ALONE[0]) == uses.count(_ALONE[1]) == held.count(_ALONE[2]) == len(copies)


def _alone() -> list[int]:
    weight = torch.zeros(1)
    memory = Memory((0, 0, torch.float32, (), 0, 0), weight, ())
    return [counts[0] for counts in _references([memory], [memory.copy])]


_USES = torch.Tensor._use_count  # type: ignore[attr-defined]
_HELD = torch._C._storage_Use_Count  # type: ignore[attr-defined]
PLAIN = {Tensor, torch.nn.Parameter}
"""Types of weights that are dense memory and nothing else."""
_ALONE = _alone()


def stream_of(weight: Tensor, streams: dict[int, int]) -> int:
    return streams[weight.get_device()] if streams else 0


def streams_of(weights: Sequence[Tensor]) -> dict[int, int]:
    """The current stream of each accelerator that holds one of `weights`."""
    if torch.accelerator.current_accelerator() is None:
        return {}
    places = {weight.get_device() for weight in weights} - {-1}
    return {place: torch.accelerator.current_stream(place).stream_id for place in places} | ({-1: 0} if places else {})


__all__ = ["PLAIN", "Memory", "Place", "Prepared", "all_alone", "fill", "stream_of", "streams_of"]
