"""Low copies of weights that outlive a call: for a block of calls, or until an optimizer steps.

PyTorch does not count every write: fused optimizers, `.data`, NumPy, DLPack and collectives leave `_version` unchanged. So by default a
copy serves one call of one graph, and nothing is kept.

1. Outside of a block every call makes new copies, all in one multi-tensor launch.
2. A `Block` keeps copies for longer. `frozen_weights()` and `generate()` open one; the block of `cache_weights="step"` never closes.
3. A kept copy is dropped if PyTorch counted a write, if an optimizer stepped the weight, or if the user says that weights changed.
4. Other writes are searched for: a few rows at every call, and the copies once more at the end of a block.

One file because copies, the blocks that keep them and the events that drop them share one lock.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amprewrite.graphs.fx.ops.cuda_graphs import recording
from amprewrite.graphs.fx.ops.fused_copy import copy_many, is_plain
from amprewrite.graphs.fx.ops.pad_ops import copy_ends, empty_padded, pad_cast
from amprewrite.graphs.fx.uncaptured import GradMode, unselected
from amprewrite.graphs.fx.weights.compare import differs, same, sample
from amprewrite.graphs.fx.weights.step_listeners import add_listener, drop_listener
from amprewrite.ir.plans.pad_plan import Layout
from amprewrite.tables.errors import AmpRewriteWarning, StaleWeightsError

LOOKED_AT = 2
"""Number of kept copies that one call compares, in turn."""
_CUDA = torch.device("cuda")

Key = tuple[int, torch.dtype, Layout, int]
"""id of the weight, dtype and padded layout of its copy, stream that wrote it."""
Names = Callable[[], Mapping[int, str]]
"""Names of weights by id; only messages need them."""


@dataclass(slots=True)
class _Copy:
    """A copy that is kept, with the version and the address of its weight when it was made."""

    weight: Tensor
    copy: Tensor
    version: int
    address: int

    def counted_fresh(self, weight: Tensor) -> bool:
        """True if PyTorch counts no write to `weight` since."""
        if self.weight is not weight or weight.is_inference():
            return False
        return self.version == weight._version and self.address == weight.data_ptr()


Copies = dict[Key, _Copy]


@dataclass(eq=False)
class Block:
    """Copies that outlive a call. `lasting` marks the block of `cache_weights="step"`, which never closes."""

    cause: str
    lasting: bool = False
    depth: int = 0
    whole: bool = False
    """True if every element is compared at the end."""
    copies: Copies = field(default_factory=dict)
    turn: int = 0
    asked: _Answer | None = None
    """A comparison that an accelerator began at an earlier call."""


class _OpenBlock(threading.local):
    """Per thread: the block that this thread alone has opened."""

    block: Block | None = None


class WeightCache:
    """Copies by (weight, dtype, padded layout, stream) of one rewritten model."""

    def __init__(self, until_step: bool = False) -> None:
        self._until_step = Block("cache_weights='step'", lasting=True) if until_step else None
        self._shared: Block | None = None
        self._own = _OpenBlock()
        self._open: list[Block] = []
        self._replayed = False
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        if until_step:
            add_listener(self)

    # -- copies --------------------------------------------------------------------------
    def take(self, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype], layouts: Sequence[Layout]) -> list[Tensor]:
        """A new copy of each weight, or the copy that an open block keeps of it."""
        streams = streams_of(weights)
        if streams and recording(_CUDA):
            self._replayed = True  # a replay steps weights and calls no hook
        block = self.block() if not self._replayed else None
        if block is None:
            return make_copies(weights, dtypes, layouts)
        keys = [
            (id(weight), dtype, layout, streams[weight.get_device()] if streams else 0)
            for weight, dtype, layout in zip(weights, dtypes, layouts, strict=True)
        ]
        copies = block.copies  # dropping copies replaces this dict: a copy made from here on is then not found
        taken: list[Tensor | None] = []
        for weight, key in zip(weights, keys, strict=True):
            found = copies.get(key)
            taken.append(found.copy if found is not None and found.counted_fresh(weight) else None)
        stale = [place for place, copy in enumerate(taken) if copy is None]
        if stale:
            made = self._make_kept([weights[place] for place in stale], [keys[place] for place in stale], copies)
            for place, copy in zip(stale, made, strict=True):
                taken[place] = copy
        return taken  # type: ignore[return-value]

    def _make_kept(self, weights: Sequence[Tensor], keys: Sequence[Key], keep: Copies) -> list[Tensor]:
        """New copies. Copies of plain weights are kept in `keep`."""
        states = [_state(weight) if is_plain(weight) else None for weight in weights]
        with self._lock:
            _drop_dead(keep)
        with torch.inference_mode(False):  # a call outside of inference mode may read them, too
            made = make_copies(weights, [key[1] for key in keys], [key[2] for key in keys])
        with self._lock:
            for weight, key, state, copy in zip(weights, keys, states, made, strict=True):
                if state is not None:
                    keep[key] = _Copy(weight, copy, *state)
        return made

    # -- blocks --------------------------------------------------------------------------
    def block(self) -> Block | None:
        """The block that keeps the copies of a call in this thread at present; None outside of one."""
        if self._until_step is not None:
            return None if self._replayed else self._until_step
        own: Block | None = self._own.block
        return own or self._shared

    @contextlib.contextmanager
    def frozen(self, names: Names, cause: str, everywhere: bool) -> Iterator[None]:
        """Keep copies in this block, and check at its end that no weight changed.

        `everywhere` is a promise for all threads, and every copy is compared in full. Without it the promise is for this thread, and a
        sample of every copy is compared.
        """
        with self._lock:
            block = self._until_step or (self._shared if everywhere else self.block())
            if block is None:
                block = Block(cause)
                if everywhere:
                    self._shared = block
                else:
                    self._own.block = block
            if block.depth == 0:
                self._open.append(block)
            block.depth += 1
            block.whole |= everywhere
            add_listener(self)
        try:
            yield
        except BaseException:
            stale = self._leave(block)
            if stale:
                warnings.warn(_changed(stale, names, cause), AmpRewriteWarning, stacklevel=3)
            raise
        stale = self._leave(block)
        if stale:
            raise StaleWeightsError(_changed(stale, names, cause))

    def _leave(self, block: Block) -> list[Tensor]:
        """Close `block` if this was its outermost user; returns the weights that differ from their copies."""
        with self._lock:
            block.depth -= 1
            if block.depth:
                return []
            self._open.remove(block)
            if block is self._shared:
                self._shared = None
            elif not block.lasting:
                self._own.block = None
            copies, whole, block.whole = dict(block.copies), block.whole, False
            if not self.listens:
                drop_listener(self)
        stale = _stale(copies, whole)
        if stale or not block.lasting:
            self._end(block)
        return stale

    def _end(self, block: Block, which: Callable[[Tensor], bool] = lambda weight: True) -> None:
        """Drop the copies in `block` of the weights for which `which` is true."""
        with self._lock:
            _drop_dead(block.copies)
            block.copies, block.asked = {key: found for key, found in block.copies.items() if not which(found.weight)}, None

    # -- the end of copies ---------------------------------------------------------------
    def clear(self) -> None:
        """Drop all kept copies."""
        with self._lock:
            for block in self._blocks():
                self._end(block)

    def _blocks(self) -> list[Block]:
        lasting = [self._until_step] if self._until_step is not None and self._until_step not in self._open else []
        return [*lasting, *self._open]

    @property
    def listens(self) -> bool:
        """True if steps of optimizers drop copies."""
        return self._until_step is not None or bool(self._open)

    def stepped(self, optimizer: Optimizer) -> None:
        """Drop the copies of weights that `optimizer` has stepped, and of all weights that train if copies are kept until a step.

        It may step copies of the weights that live elsewhere, which the training loop then copies here.
        """
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}

        def ends(weight: Tensor) -> bool:
            return id(weight) in stepped

        def ends_too(weight: Tensor) -> bool:
            return id(weight) in stepped or weight.requires_grad

        with self._lock:
            for block in self._blocks():
                self._end(block, which=ends_too if block.lasting else ends)

    # -- writes that no version counts -------------------------------------------------------
    def look(self, names: Names) -> None:
        """Compare a few rows of a few kept copies with their weights, different ones at every call.

        On a CPU the comparison is made at once, before the copies are read. An accelerator answers at a later call, so that the host does
        not wait. A `generate()` is compared once, at its end: otherwise each token would pay for it.
        """
        block = self.block() if self._open or self._until_step is not None else None
        if block is None or not block.copies or not (block.lasting or block.whole):
            return
        answered, block.asked = block.asked, None
        if answered is not None and not answered.ready():
            block.asked = answered
            return
        stale = answered.stale() if answered is not None else []
        with GradMode(on=False), unselected():
            stale += self._look_now(block) if not stale else []
        if not stale:
            return
        self._end(block)
        if not block.lasting:
            raise StaleWeightsError(_changed(stale, names, block.cause))
        if block.cause not in self._warned:
            self._warned.add(block.cause)
            warnings.warn(_changed(stale, names, block.cause), AmpRewriteWarning, stacklevel=2)

    def _look_now(self, block: Block) -> list[Tensor]:
        everything = list(block.copies.items())
        block.turn += LOOKED_AT
        chosen = [everything[(block.turn + at) % len(everything)] for at in range(min(LOOKED_AT, len(everything)))]
        asked: list[tuple[Tensor, Tensor]] = []
        stale = []
        for (_, _, layout, _), found in chosen:
            weight = found.weight
            if not found.counted_fresh(weight):
                continue  # copied anew by the call that reads it
            if weight.is_cpu and not same(*sample(weight, found.copy, layout, block.turn)):
                stale.append(weight)
            elif weight.is_cuda and not recording(weight.device):
                asked.append((weight, differs(*sample(weight, found.copy, layout, block.turn))))
        if asked:
            block.asked = _Answer([weight for weight, _ in asked], [flag for _, flag in asked])
        return stale

    def __len__(self) -> int:
        return sum(len(block.copies) for block in self._blocks())


class _Answer:
    """The result of comparing weights with their copies on an accelerator, copied to the host without waiting."""

    def __init__(self, weights: list[Tensor], flags: list[Tensor]) -> None:
        self.weights = weights
        found = torch.stack([flag.to(flags[0].device) for flag in flags])
        self.flags = torch.empty(found.shape, dtype=found.dtype, pin_memory=True, device="cpu").copy_(found, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(found.device))

    def ready(self) -> bool:
        return bool(self.event.query())

    def stale(self) -> list[Tensor]:
        return [weight for weight, differs in zip(self.weights, self.flags.tolist(), strict=True) if differs]


# -- copies ------------------------------------------------------------------------------
def make_copies(weights: Sequence[Tensor], dtypes: Sequence[torch.dtype], layouts: Sequence[Layout]) -> list[Tensor]:
    """New copies, all copies of plain weights in one launch. They record no gradient.

    A copy has its weight's `requires_grad` all the same: products choose by this flag between one mm and an expanded bmm (should_fold in
    ATen/native/LinearAlgebra.cpp).
    """
    wanted, copies = list(zip(weights, dtypes, layouts, strict=True)), list[Tensor]()
    sources, targets = list[Tensor](), list[Tensor]()
    with GradMode(on=False):
        for weight, dtype, layout in wanted:
            if is_plain(weight):
                copies.append(empty_padded(weight, dtype, layout))
                source, target = copy_ends(weight, copies[-1], layout)
                sources.append(source)
                targets.append(target)
            else:
                copies.append(pad_cast(weight, dtype, layout))
        if targets:
            copy_many(sources, targets)
    for weight, copy in zip(weights, copies, strict=True):
        if weight.requires_grad:
            copy.requires_grad_()
    return copies


def streams_of(weights: Sequence[Tensor]) -> dict[int, int]:
    """The current stream of each accelerator that holds one of `weights`."""
    if torch.accelerator.current_accelerator() is None:
        return {}
    places = {weight.get_device() for weight in weights} - {-1}
    return {place: torch.accelerator.current_stream(place).stream_id for place in places} | ({-1: 0} if places else {})


def _drop_dead(copies: Copies) -> None:
    """Drop the copies of weights that nothing but these copies refers to."""
    held: dict[int, list[Key]] = {}
    for key in copies:
        held.setdefault(key[0], []).append(key)
    for keys in held.values():
        if sys.getrefcount(copies[keys[0]].weight) <= 1 + len(keys):  # references by the copies, and by the call that counts
            for key in keys:
                del copies[key]


def _state(weight: Tensor) -> tuple[int, int] | None:
    """PyTorch's count of writes to a weight, and its address; None for a weight made in inference mode, whose writes are not counted."""
    return None if weight.is_inference() else (weight._version, weight.data_ptr())


# -- stale copies ----------------------------------------------------------------------
def _stale(copies: Copies, whole: bool) -> list[Tensor]:
    """Weights that differ from their copies though PyTorch counts no write. `whole` compares every element."""
    stale, asked, flags = [], [], []
    with torch.no_grad():
        for (_, dtype, layout, _), found in copies.items():
            weight = found.weight
            if not found.counted_fresh(weight):
                continue
            ends = (pad_cast(weight, dtype, layout), found.copy) if whole else sample(weight, found.copy, layout, 0)
            if not weight.is_cpu:
                asked.append(weight)
                flags.append(differs(*ends))
            elif not same(*ends):
                stale.append(weight)
        found_out = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
    return stale + [weight for weight, differs in zip(asked, found_out, strict=True) if differs]


def _changed(stale: Sequence[Tensor], names: Names, cause: str) -> str:
    known = names()
    said = list(dict.fromkeys(known.get(id(weight), "a weight") for weight in stale))
    some = ", ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else "")
    return (
        f"{some} changed while low copies were kept ({cause}), by a write that PyTorch does not count, such as .data, NumPy, DLPack "
        "or a collective; results since then may come from the old values, and the copies are dropped now. Call "
        "amp.weights_changed() after each such write, or write while no copies are kept; cache_weights=False keeps none"
    )


__all__ = ["Block", "WeightCache", "make_copies"]
