"""Low copies of weights: for one call, for a block of calls, or until an optimizer steps.

PyTorch does not count every write: fused optimizers, `.data`, NumPy, DLPack and collectives leave `_version` as it was. So by
default a copy serves one call of one graph:

1. A call makes all its copies in one multi-tensor launch; one without gradients over the memory of the last ones.
2. Memory is written over only while nothing else refers to it: no other call, no view, no autograd graph.
3. A `Block` keeps copies for longer. `frozen_weights()` and `generate()` open one; `cache_weights="step"` has one for good.
4. A kept copy ends if PyTorch counted a write, if an optimizer stepped the weight, or if the user says that weights changed.
5. Other writes are looked for: a few rows at every call, and the copies once more at the end of a block.

One file because copies, the blocks that keep them and what ends them share one lock.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amprewrite.graphs.fx.ops.cuda_graphs import recording
from amprewrite.graphs.fx.ops.fused_copy import copy_many, is_plain
from amprewrite.graphs.fx.ops.pad_ops import copy_ends, fits, pad_cast
from amprewrite.graphs.fx.uncaptured import GradMode, unselected
from amprewrite.graphs.fx.weights.compare import differs, same, sample
from amprewrite.graphs.fx.weights.copy_memory import Memory, Place, Prepared, all_alone, fill, stream_of, streams_of
from amprewrite.graphs.fx.weights.step_listeners import add_listener, drop_listener
from amprewrite.ir.plans.pad_plan import Layout
from amprewrite.tables.errors import AmpRewriteWarning, StaleWeightsError

LOOKED_AT = 2
"""How many kept copies one call looks at, in turn."""
_CUDA = torch.device("cuda")

Key = tuple[int, torch.dtype, Layout, int]
"""id of the weight, dtype and padded layout of its copy, stream that wrote it."""
Names = Callable[[], Mapping[int, str]]
"""Names of weights by id, asked for by messages alone."""


@dataclass(slots=True)
class _Copy:
    """A copy that is kept, and the weight as it was when the copy was made."""

    weight: Tensor
    memory: Memory
    version: int
    address: int

    @property
    def copy(self) -> Tensor:
        return self.memory.copy

    def counted_fresh(self, weight: Tensor) -> bool:
        """Whether PyTorch counts no write to `weight` since."""
        if self.weight is not weight or weight.is_inference():
            return False
        return self.version == weight._version and self.address == weight.data_ptr()


Copies = dict[Key, _Copy]


@dataclass(eq=False)
class Block:
    """Copies that outlive a call. `lasting` is that of `cache_weights="step"`, which never closes."""

    cause: str
    lasting: bool = False
    depth: int = 0
    whole: bool = False
    """Whether every element is compared at the end."""
    copies: Copies = field(default_factory=dict)
    turn: int = 0
    asked: _Answer | None = None
    """What an accelerator was asked at an earlier call."""


class _Own(threading.local):
    """Per thread: the block that this thread alone has opened."""

    block: Block | None = None


class WeightCache:
    """Copies by (weight, dtype, padded layout, stream) of one rewritten model.

    A copy has its weight's `requires_grad`, though no graph is recorded: `matmul` looks at the flag to choose between one mm
    and an expanded bmm (should_fold in ATen/native/LinearAlgebra.cpp).
    """

    def __init__(self, until_step: bool = False) -> None:
        self._idle: dict[Place, Memory] = {}
        """Memory of copies that served one call, to be written over."""
        self._prepared: weakref.WeakKeyDictionary[object, Prepared] = weakref.WeakKeyDictionary()
        self._until_step = Block("cache_weights='step'", lasting=True) if until_step else None
        self._shared: Block | None = None
        self._own = _Own()
        self._open: list[Block] = []
        self._replayed = False
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        if until_step:
            add_listener(self)

    # -- copies --------------------------------------------------------------------------
    def take(
        self, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype], layouts: Sequence[Layout], graph: object | None = None
    ) -> list[Tensor]:
        """A copy of each weight as it is now, or as it was when an open block copied it.

        A `graph` that always asks for the same dtypes and layouts is prepared for once.
        """
        streams = streams_of(weights)
        if streams and recording(_CUDA):
            self._replayed = True  # a replay steps weights and calls no hook
            return [_made_alone(*each) for each in zip(weights, dtypes, layouts, strict=True)]
        block = self.block()
        if block is None:
            return self._make(weights, dtypes, layouts, streams, graph)
        keys = [
            (id(weight), dtype, layout, streams[weight.get_device()] if streams else 0)
            for weight, dtype, layout in zip(weights, dtypes, layouts, strict=True)
        ]
        copies = block.copies  # replaced, not emptied, if copies end meanwhile: what is made from here on is then not found
        taken: list[Tensor | None] = []
        for weight, key in zip(weights, keys, strict=True):
            found = copies.get(key)
            taken.append(found.memory.copy if found is not None and found.counted_fresh(weight) else None)
        stale = [place for place, copy in enumerate(taken) if copy is None]
        if stale:
            made = self._make_kept([weights[place] for place in stale], [keys[place] for place in stale], copies)
            for place, copy in zip(stale, made, strict=True):
                taken[place] = copy
        return taken  # type: ignore[return-value]

    def _make(
        self, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype], layouts: Sequence[Layout], streams: dict[int, int],
        graph: object | None,
    ) -> list[Tensor]:  # fmt: skip
        """New copies for one call, in one launch, over the memory of the last ones if nothing else refers to it."""
        with self._lock:
            prepared = self._prepared.get(graph) if graph is not None else None
            if prepared is None or not prepared.serves(weights, streams):
                plain = [is_plain(weight) for weight in weights]
                if not all(plain):
                    return self._make_some(weights, dtypes, layouts, streams, plain)
                on = [stream_of(weight, streams) for weight in weights]
                wanted = list(zip(dtypes, layouts, on, strict=True))
                prepared = Prepared(weights, streams, self._memories(weights, wanted))
                if graph is not None:
                    self._prepared[graph] = prepared
            memories = prepared.memories
            copies = self._free(memories, weights)
        fill(weights, memories, copies)
        return copies

    def _free(self, memories: list[Memory], weights: Sequence[Tensor]) -> list[Tensor]:
        """The copies in `memories`, of which what something else holds is exchanged for new memory."""
        copies = [memory.copy for memory in memories]
        if not all_alone(memories, copies):
            copies = []  # what nothing else held is free again
            for place, memory in enumerate(memories):
                if not all_alone([memory], [memory.copy]):
                    memories[place] = self._idle[memory.place] = Memory(memory.place, weights[place], memory.layout)
            copies = [memory.copy for memory in memories]
        return copies

    def take_with_gradients(self, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype], layouts: Sequence[Layout]) -> list[Tensor]:
        """A copy of each plain weight as it is now, or as it was when an open block copied it.

        The autograd graph owns their memory, and gives it back as backward goes. That of padded copies is kept and lent: the padding
        in it is zero already.
        """
        if self.block() is not None or recording(_CUDA):
            return self.take(weights, dtypes, layouts)
        if not any(layouts):
            copies = [torch.empty_like(weight, dtype=dtype) for weight, dtype in zip(weights, dtypes, strict=True)]
            copy_many(weights, copies)
            return copies
        wanted = list(zip(weights, dtypes, layouts, strict=True))
        lent = iter(self._lend([each for each in wanted if each[2]]))
        copies = [next(lent) if layout else torch.empty_like(weight, dtype=dtype) for weight, dtype, layout in wanted]
        ends = [copy_ends(weight, copy, layout) for weight, copy, layout in zip(weights, copies, layouts, strict=True)]
        copy_many([source for source, _ in ends], [target for _, target in ends])
        return copies

    def _lend(self, wanted: Sequence[tuple[Tensor, torch.dtype, Layout]]) -> list[Tensor]:
        """Memory for padded copies, not lent again while anything refers to it."""
        weights = [weight for weight, _, _ in wanted]
        streams = streams_of(weights)
        with self._lock:
            memories = self._memories(weights, [(dtype, layout, stream_of(weight, streams)) for weight, dtype, layout in wanted])
            return [copy.detach() for copy in self._free(memories, weights)]

    def _make_some(
        self, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype], layouts: Sequence[Layout], streams: dict[int, int],
        plain: Sequence[bool],
    ) -> list[Tensor]:  # fmt: skip
        """Copies of weights some of which are more than dense memory: those are made one by one."""
        places = [place for place, is_plain in enumerate(plain) if is_plain]
        together: list[Tensor] = []
        if places:
            asked = [dtypes[place] for place in places], [layouts[place] for place in places]
            together = self._make([weights[place] for place in places], *asked, streams, None)
        made = dict(zip(places, together, strict=True))
        return [
            made[place] if place in made else _made_alone(weight, dtypes[place], layouts[place]) for place, weight in enumerate(weights)
        ]

    def _make_kept(self, weights: Sequence[Tensor], keys: Sequence[Key], keep: Copies) -> list[Tensor]:
        """New copies; those of plain weights in one launch, and kept in `keep`."""
        plain = [place for place, weight in enumerate(weights) if is_plain(weight)]
        states = [_state(weights[place]) for place in plain]
        with self._lock:
            _drop_dead(keep)
            wanted = [keys[place][1:] for place in plain]
            memories = self._memories([weights[place] for place in plain], wanted)
            for at, memory in enumerate(memories):
                self._idle.pop(memory.place, None)
                if not all_alone([memory], [memory.copy]):
                    memories[at] = Memory(memory.place, weights[plain[at]], memory.layout)
            self._prepared.clear()  # it refers to the memory that is kept now
        copies = [memory.copy for memory in memories]
        if copies:
            fill([weights[place] for place in plain], memories, copies)
        with self._lock:
            for place, memory, state in zip(plain, memories, states, strict=True):
                if state is not None:
                    keep[keys[place]] = _Copy(weights[place], memory, *state)
        made = dict(zip(plain, copies, strict=True))
        return [
            made[place] if place in made else _made_alone(weight, key[1], key[2])
            for place, (weight, key) in enumerate(zip(weights, keys, strict=True))
        ]

    def _memories(self, weights: Sequence[Tensor], wanted: Sequence[tuple[torch.dtype, Layout, int]]) -> list[Memory]:
        """Memory for copies of `weights`, each another: that of the last ones if it fits, or new."""
        for place, memory in list(self._idle.items()):
            if memory.owner.expired():
                del self._idle[place]
        for graph, prepared in list(self._prepared.items()):
            if any(memory.owner.expired() for memory in prepared.memories):
                del self._prepared[graph]
        memories: dict[Place, Memory] = {}
        for weight, (dtype, layout, stream) in zip(weights, wanted, strict=True):
            at, copies = (weight.untyped_storage()._cdata, int(weight.storage_offset())), 0
            while (place := (*at, dtype, layout, stream, copies)) in memories:
                copies += 1
            found = self._idle.get(place)
            if found is None or not fits(found.copy, weight, layout):
                found = self._idle[place] = Memory(place, weight, layout)
            memories[place] = found
        return list(memories.values())

    # -- blocks --------------------------------------------------------------------------
    def block(self) -> Block | None:
        """The block of `frozen_weights()` that keeps the copies of a call made here and now; None outside of one."""
        if self._until_step is not None:
            return None if self._replayed else self._until_step
        own: Block | None = self._own.block
        return own or self._shared

    @contextlib.contextmanager
    def frozen(self, names: Names, cause: str, everywhere: bool) -> Iterator[None]:
        """Keep copies in this block, and check at its end that no weight changed.

        `everywhere` is a promise for all threads, and every copy is checked. Else it holds for this thread, and a sample of
        every copy is.
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
        """Close `block` if this was its outermost user; weights whose copies have not followed them."""
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
            self._end(block, idle=True)
        return stale

    def _end(self, block: Block, idle: bool, which: Callable[[Tensor], bool] = lambda weight: True) -> None:
        """Forget the copies in `block` of the weights for `which` that holds; their memory may be written over if `idle`."""
        with self._lock:
            kept: Copies = {}
            ended, block.copies, block.asked = block.copies, kept, None
            _drop_dead(ended)
            for key, found in ended.items():
                if not which(found.weight):
                    kept[key] = found
                elif idle:
                    self._idle.setdefault(found.memory.place, found.memory)

    # -- the end of copies ---------------------------------------------------------------
    def clear(self) -> None:
        """Forget all copies, kept ones too, and give their memory back."""
        with self._lock:
            for block in self._blocks():
                self._end(block, idle=False)
            self.clear_idle()

    def clear_idle(self, padded: bool = True) -> None:
        """Give back the memory of copies that no block keeps; that of padded ones only if `padded`."""
        if self._idle or self._prepared:
            with self._lock:
                self._prepared.clear()
                self._idle = {} if padded else {place: memory for place, memory in self._idle.items() if memory.layout}

    def _blocks(self) -> list[Block]:
        lasting = [self._until_step] if self._until_step is not None and self._until_step not in self._open else []
        return [*lasting, *self._open]

    @property
    def listens(self) -> bool:
        """Whether steps of optimizers end copies."""
        return self._until_step is not None or bool(self._open)

    def stepped(self, optimizer: Optimizer) -> None:
        """End the copies of weights that `optimizer` owns, which has stepped, and of all that train if copies are kept until a step.

        It may step the weights of others: copies of them elsewhere, which the loop brings here.
        """
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}

        def ends(weight: Tensor) -> bool:
            return id(weight) in stepped

        def ends_too(weight: Tensor) -> bool:
            return id(weight) in stepped or weight.requires_grad

        with self._lock:
            for block in self._blocks():
                self._end(block, idle=True, which=ends_too if block.lasting else ends)

    # -- writes that no version counts -------------------------------------------------------
    def look(self, names: Names) -> None:
        """Compare a few rows of a few kept copies with their weights, others at every call.

        On a CPU at once, before the copies are read. An accelerator answers at a later call, so that the host does not wait.
        A `generate()` is looked at once, at its end: each token would pay for a look.
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
        self._end(block, idle=True)
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
        return len(self._idle) + sum(len(block.copies) for block in self._blocks())


class _Answer:
    """What an accelerator finds out about some weights, on its way to the host."""

    def __init__(self, weights: list[Tensor], flags: list[Tensor]) -> None:
        self.weights = weights
        found = torch.stack([flag.to(flags[0].device) for flag in flags])
        self.flags = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(found.device))

    def ready(self) -> bool:
        return bool(self.event.query())

    def stale(self) -> list[Tensor]:
        return [weight for weight, differs in zip(self.weights, self.flags.tolist(), strict=True) if differs]


# -- memory ------------------------------------------------------------------------------
def _drop_dead(copies: Copies) -> None:
    """Forget the copies of weights that nothing but these copies refers to."""
    held: dict[int, list[Key]] = {}
    for key in copies:
        held.setdefault(key[0], []).append(key)
    for keys in held.values():
        if sys.getrefcount(copies[keys[0]].weight) <= 1 + len(keys):  # the copies, and the call that counts
            for key in keys:
                del copies[key]


def _made_alone(weight: Tensor, dtype: torch.dtype, layout: Layout) -> Tensor:
    """A copy of a weight that a CUDA graph records, or of one that is more than dense memory."""
    with torch.no_grad():
        return pad_cast(weight, dtype, layout).requires_grad_(weight.requires_grad)


def _state(weight: Tensor) -> tuple[int, int] | None:
    """PyTorch's count of writes to a weight, and its address; None for one made in inference mode, whose writes are not counted."""
    return None if weight.is_inference() else (weight._version, weight.data_ptr())


# -- stale copies ----------------------------------------------------------------------
def _stale(copies: Copies, whole: bool) -> list[Tensor]:
    """Weights that differ from their copies though PyTorch counts no write; `whole` compares every element."""
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


__all__ = ["Block", "WeightCache"]
