"""Keep low (bf16 or fp16) copies of weights longer than one call: for a block of calls, or until an optimizer steps.

PyTorch does not count every write to a weight: fused optimizers, `.data`, NumPy, DLPack and collectives leave `_version` unchanged. A kept
copy may then be out of date without notice, so by default no copies are kept.

1. By default each call casts every weight anew, where a graph reads it (`passes/lower/hoist_weight_casts.py`).
2. Copies are kept while a `Block` is open: during `frozen_weights()` and `generate()`, and always with the option `cache_weights="step"`.
3. A kept copy is dropped if PyTorch counted a write to its weight, if an optimizer stepped the weight, or at a call of `weights_changed()`.
4. Uncounted writes are found by comparing copies with weights: some rows of a few copies in a call, every copy when a block closes.

All of this is one file because copies, the blocks that keep them and the events that drop them share one lock.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amprewrite.graphs.fx.ops.on_device import recording
from amprewrite.graphs.fx.ops.pad_ops import pad_cast, slice_dims
from amprewrite.graphs.fx.uncaptured import GradMode, unselected
from amprewrite.graphs.fx.weights.step_listeners import AFTER_STEPS
from amprewrite.ir.plans.pad_plan import Layout
from amprewrite.tables.errors import AmpRewriteWarning, StaleWeightsError
from amprewrite.torch_internals.dispatch import in_forward_mode, is_plain

LOOKED_AT = 2
"""Number of kept copies that one call compares with their weights. Each call takes the next copies in turn."""
SAMPLE = 64
"""`sample` selects this many elements of a 1-dim weight. From a weight with more dims it selects one index of the first dim."""
WORDS_FROM = 1 << 14
"""Above this number of elements, `same` compares 64-bit words of four elements each. On a CPU that is three to five times as fast."""
_CUDA = torch.device("cuda")

Key = tuple[int, torch.dtype, Layout, int]
"""(id of the weight, dtype of the copy, padded layout of the copy, id of the stream that wrote the copy)."""
Wanted = tuple[Tensor, torch.dtype, Layout]
"""(weight, dtype of a low copy of the weight, padded layout of the copy)."""
Flag = tuple[Tensor, Tensor]
"""(weight, 0-dim boolean tensor on the device of the weight: True if the weight differs from its copy)."""
Names = Callable[[], Mapping[int, str]]
"""Function that returns the names of weights by id. It is called only to write a message."""


@dataclass(slots=True)
class _Copy:
    """A kept copy, with the version counter and the address of its weight at the time of the copy."""

    weight: Tensor
    copy: Tensor
    version: int
    address: int

    def counted_fresh(self, weight: Tensor) -> bool:
        """True if this is a copy of `weight`, and `_version`, address and `requires_grad` of `weight` are the same as at the copy."""
        if self.weight is not weight or weight.is_inference() or weight.requires_grad is not self.copy.requires_grad:
            return False
        return self.version == weight._version and self.address == weight.data_ptr()


Copies = dict[Key, _Copy]


@dataclass(eq=False)
class Block:
    """A span of calls of a model, such as a `with frozen_weights()` block, and the low copies of weights that are kept for its calls.

    `lasting` is True if the span never ends, as with `cache_weights="step"`. `cause` is the call or option that opened the block, for
    messages. `depth` counts the `with` blocks that use this object now.
    """

    cause: str
    lasting: bool = False
    depth: int = 0
    whole: bool = False
    """True if every element of the copies is compared when the block closes, False if only a sample of each copy is."""
    copies: Copies = field(default_factory=dict)
    searched_from: int = 1
    """From this number of copies on, copies of freed weights are dropped before a new copy is made. Twice the rest is the next limit."""
    turn: int = 0
    asked: _Answer | None = None
    """A comparison that an accelerator began at an earlier call, and whose result was not read yet; None if there is none."""


class _OpenBlock(threading.local):
    """Holds for each thread the `Block` (kept copies of weights) that was opened for this thread alone; None if there is none."""

    block: Block | None = None


class WeightCache:
    """Makes the low copies of the weights of one rewritten model, and keeps them for several calls while a `Block` is open.

    `until_step` opens the block of `cache_weights="step"`, which keeps copies until an optimizer steps.
    """

    def __init__(self, until_step: bool = False) -> None:
        self._until_step = Block("cache_weights='step'", lasting=True) if until_step else None
        self._shared: Block | None = None
        self._own = _OpenBlock()
        self._open: list[Block] = []
        self._replayed = False
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        if until_step:
            AFTER_STEPS.add(self.stepped)

    # -- copies --------------------------------------------------------------------------
    def take(self, asked: Sequence[Wanted]) -> list[Tensor]:
        """Return a low copy for each (weight, dtype, layout) in `asked`: the one in the open `Block` if it is up to date, or a new one."""
        streams = streams_of([weight for weight, _, _ in asked])
        if streams and recording(_CUDA):
            self._replayed = True  # keep no copies from now on: a replay of the CUDA graph may update weights without calling our hook
        block = self.block() if not self._replayed else None
        if block is None:
            return [low_copy(*each) for each in asked]
        return [self._kept(block, *each, streams.get(each[0].get_device(), 0)) for each in asked]

    def _kept(self, block: Block, weight: Tensor, dtype: torch.dtype, layout: Layout, stream: int) -> Tensor:
        """Return the low copy of `weight` that `block` (a span of calls) keeps, if this copy is up to date; otherwise a new copy.

        The block keeps the new copy if `weight` is plain strided memory (`is_plain`) and no inference tensor. PyTorch counts no writes to
        inference tensors.
        """
        key, copies = (id(weight), dtype, layout, stream), block.copies  # read the dict once: another thread may replace it
        found = copies.get(key)
        if found is not None and found.counted_fresh(weight):
            return found.copy
        if len(copies) >= block.searched_from:
            with self._lock:
                _drop_dead(copies)
            block.searched_from = max(1, 2 * len(copies))
        state = _state(weight) if is_plain(weight) else None
        with torch.inference_mode(False):  # a call outside of inference mode may read the copy: make no inference tensor
            copy = low_copy(weight, dtype, layout, linked=state is not None)
        if state is not None:
            with self._lock:
                copies[key] = _Copy(weight, copy, *state)
        return copy

    # -- blocks --------------------------------------------------------------------------
    def block(self) -> Block | None:
        """Return the `Block` (a span of calls for which low copies of weights are kept) that is open for this thread; None without one.

        `frozen_weights()`, `generate()` and the option `cache_weights="step"` open a block. With this option the result is None once a CUDA
        graph has recorded a call, because no copies are kept from then on.
        """
        if self._until_step is not None:
            return None if self._replayed else self._until_step
        own: Block | None = self._own.block
        return own or self._shared

    @contextlib.contextmanager
    def frozen(self, names: Names, cause: str, everywhere: bool) -> Iterator[None]:
        """Context manager that keeps low copies of weights for several calls in a `Block`, and compares copies and weights at its end.

        With `everywhere`, all threads share the block, and every copy is compared in full. Otherwise the block is for this thread, and a
        sample of every copy is compared. Raises StaleWeightsError if a weight changed by a write that PyTorch did not count; warns instead
        if the context ends by another exception. `names` and `cause` are for messages.
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
            AFTER_STEPS.add(self.stepped)
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
        """Close `block` if no other context uses it, and return the weights that differ from their copies; [] if the block stays open."""
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
                AFTER_STEPS.discard(self.stepped)
        stale = _stale(copies, whole)
        if stale or not block.lasting:
            self._end(block)
        return stale

    def _end(self, block: Block, stepped: Set[int] | None = None) -> None:
        """Drop all copies in `block`, or with `stepped` (ids of weights that an optimizer stepped) only the copies of these weights.

        With `stepped`, the block of `cache_weights="step"` also drops the copies of all other weights that require gradients: the optimizer
        may have stepped master weights instead, and the training loop then copies master weights to these weights.
        """

        def stays(weight: Tensor) -> bool:
            return stepped is not None and id(weight) not in stepped and not (block.lasting and weight.requires_grad)

        with self._lock:
            _drop_dead(block.copies)
            block.copies, block.asked = {key: found for key, found in block.copies.items() if stays(found.weight)}, None

    # -- dropping copies -----------------------------------------------------------------
    def clear(self) -> None:
        """Drop all kept copies of all blocks."""
        with self._lock:
            for block in self._blocks():
                self._end(block)

    def _blocks(self) -> list[Block]:
        lasting = [self._until_step] if self._until_step is not None and self._until_step not in self._open else []
        return [*lasting, *self._open]

    @property
    def listens(self) -> bool:
        """True if this cache must be called after optimizer steps, because a `Block` is open: a span of calls for which it keeps copies."""
        return self._until_step is not None or bool(self._open)

    def stepped(self, optimizer: Optimizer) -> None:
        """Drop the kept copies of the weights that `optimizer` has stepped, and perhaps of other trained weights (see `_end`)."""
        with self._lock:
            for block in self._blocks():
                self._end(block, {id(p) for group in optimizer.param_groups for p in group["params"]})

    # -- writes that PyTorch does not count --------------------------------------------------
    def look(self, names: Names) -> None:
        """Compare a few rows of a few kept copies with their weights, to find writes that PyTorch does not count.

        Each call checks different rows and copies. If a weight changed, all copies of the block are dropped. In the block of
        `cache_weights="step"` the first change gives a warning; in any other block a change raises StaleWeightsError. On a CPU the result
        of the comparison is used at once. On CUDA a later call uses it, so that the host does not wait. On other accelerators, and in
        a block of `generate()`, copies are compared only when the block closes. So no token of `generate()` pays for a comparison.
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
        stale, asked = _compared(chosen, block.turn)
        asked = [each for each in asked if each[0].is_cuda]
        if asked:
            block.asked = _Answer(asked)
        return stale

    def __len__(self) -> int:
        return sum(len(block.copies) for block in self._blocks())


class _Answer:
    """The result of a comparison of weights with their copies on an accelerator. It is copied to the host without waiting."""

    def __init__(self, asked: Sequence[Flag]) -> None:
        self.weights, found = [weight for weight, _ in asked], _stacked(asked)
        self.flags = torch.empty(found.shape, dtype=found.dtype, pin_memory=True, device="cpu").copy_(found, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(found.device))

    def ready(self) -> bool:
        return bool(self.event.query())

    def stale(self) -> list[Tensor]:
        return [weight for weight, differs in zip(self.weights, self.flags.tolist(), strict=True) if differs]


# -- copies ------------------------------------------------------------------------------
def low_copy(weight: Tensor, dtype: torch.dtype, layout: Layout, linked: bool = False) -> Tensor:
    """Return a new copy of a weight in `dtype`, padded to `layout`. Autograd records the copy only if `linked`.

    The copy has the `requires_grad` of its weight, because products choose by this flag between one mm and an expanded bmm (should_fold in
    ATen/native/LinearAlgebra.cpp).
    """
    with GradMode(on=linked):
        return marked(pad_cast(weight, dtype, layout), weight)


def marked(copy: Tensor, weight: Tensor) -> Tensor:
    """Set `copy.requires_grad` to that of `weight`, and return `copy`. Products choose their kernel by this flag (see `low_copy`).

    The flag records no autograd history: a copy made under no_grad still passes no gradient to `weight`.
    """
    return copy.requires_grad_(weight.requires_grad)


def kept_cast(cache: WeightCache, weight: Tensor, dtype: torch.dtype, layout: Layout, inverse: Tensor | None) -> Tensor:
    """Return a tensor equal to `pad_cast(weight, dtype, layout, inverse)`, but made from the low copy in `cache` without a new cast.

    `inverse`, one over the loss scale, multiplies the gradient of `weight`. With `inverse`, each call makes a new autograd node, because
    the scale may change between calls. If `inverse` is None, every call in grad mode returns the kept copy itself, whose one autograd node
    serves many backwards. Tensor subclasses, and all weights in forward-mode AD, are cast anew at each call: a kept copy has no tangent.
    """
    if in_forward_mode() or not is_plain(weight):
        return pad_cast(weight, dtype, layout, inverse)
    with unselected():
        (kept,) = cache.take([(weight, dtype, layout)])
        linked = kept.grad_fn is not None or not weight.requires_grad
        return kept if linked and inverse is None and torch.is_grad_enabled() else pad_cast(weight, dtype, layout, inverse, kept)


def streams_of(weights: Sequence[Tensor]) -> dict[int, int]:
    """Return {device index: id of the current stream} for the accelerators that hold one of `weights`; {} if none does."""
    if torch.accelerator.current_accelerator() is None:
        return {}
    places = {weight.get_device() for weight in weights} - {-1}
    return {place: torch.accelerator.current_stream(place).stream_id for place in places}


def _drop_dead(copies: Copies) -> None:
    """Drop the copies of weights that the program no longer uses: only the copies still refer to such a weight."""
    held: dict[int, list[Key]] = {}
    for key in copies:
        held.setdefault(key[0], []).append(key)
    for keys in held.values():
        linked = any(copies[key].copy.grad_fn is not None for key in keys)  # autograd's references to a weight add one to its refcount
        if sys.getrefcount(copies[keys[0]].weight) <= 1 + len(keys) + linked:  # only the references of the copies and of this call are left
            for key in keys:
                del copies[key]


def _state(weight: Tensor) -> tuple[int, int] | None:
    """Return (PyTorch's count of writes to `weight`, address of `weight`). None if it was made in inference mode: no writes are counted."""
    return None if weight.is_inference() else (weight._version, weight.data_ptr())


# -- comparisons ----------------------------------------------------------------------
def _stale(copies: Copies, whole: bool) -> list[Tensor]:
    """Return the weights that differ from their copies although PyTorch counted no write. Unless `whole`, only a sample is compared."""
    with torch.no_grad():
        stale, asked = _compared(copies.items(), None if whole else 0)
        differ = _stacked(asked).tolist() if asked else []
    return stale + [weight for (weight, _), differs in zip(asked, differ, strict=True) if differs]


def _compared(kept: Iterable[tuple[Key, _Copy]], turn: int | None) -> tuple[list[Tensor], list[Flag]]:
    """Compare copies with their weights. Return (weights on a CPU that differ, a `Flag` for each weight on an accelerator).

    A `Flag` holds a result that is still on the device. `turn` selects the slice to compare; with None, all elements are compared. A weight
    is skipped if PyTorch counted a write to it, or if its GPU records a CUDA graph.
    """
    stale: list[Tensor] = []
    asked: list[Flag] = []
    for (_, dtype, layout, _), found in kept:
        weight = found.weight
        if not found.counted_fresh(weight):
            continue  # nothing to compare: the next call that reads the weight makes a new copy
        ends = (pad_cast(weight, dtype, layout), found.copy) if turn is None else sample(weight, found.copy, layout, turn)
        if not weight.is_cpu and not recording(weight.device):
            asked.append((weight, differs(*ends)))
        elif weight.is_cpu and not same(*ends):
            stale.append(weight)
    return stale, asked


def _stacked(asked: Sequence[Flag]) -> Tensor:
    """Return the boolean tensors of the flags `asked` in one tensor, on the device of the first."""
    return torch.stack([flag.to(asked[0][1].device) for _, flag in asked])


def sample(weight: Tensor, copy: Tensor, layout: Layout, turn: int) -> tuple[Tensor, Tensor]:
    """Return (slice of `weight`, cast to the dtype of `copy`; the same slice of `copy`).

    The padding of `copy`, which `layout` describes, is left out. `turn`, an int from 0 on, selects the slice.
    """
    if layout:
        copy = slice_dims(copy, layout)
    length = SAMPLE if weight.dim() == 1 else 1
    if weight.dim() and weight.numel() and weight.shape[0] > length:
        start = turn % (weight.shape[0] - length + 1)
        weight, copy = weight[start : start + length], copy[start : start + length]
    return weight.to(copy.dtype), copy


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Return a 0-dim boolean tensor: True if `a` and `b` differ by more than the smallest normal fp32 number. NaN equals NaN.

    Smaller differences do not count, because some processors flush numbers below the normal range to zero.
    """
    near = (a.float() - b.float()).abs() <= torch.finfo(torch.float32).tiny
    return ~((a == b) | near | (a.isnan() & b.isnan())).all()


def same(a: Tensor, b: Tensor) -> bool:
    """True if `differs` finds no difference between `a` and `b`. The host waits for the device of the tensors."""
    if a.numel() > WORDS_FROM and a.is_contiguous() and b.is_contiguous():
        whole_words = not any(int(count) % 4 for count in (a.numel(), a.storage_offset(), b.storage_offset()))
        if whole_words and torch.equal(a.view(-1).view(torch.int64), b.view(-1).view(torch.int64)):
            return True
    return torch.equal(a, b) or not bool(differs(a, b))


def _changed(stale: Sequence[Tensor], names: Names, cause: str) -> str:
    known = names()
    said = list(dict.fromkeys(known.get(id(weight), "a weight") for weight in stale))
    some = ", ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else "")
    return (
        f"{some} changed while low copies were kept ({cause}), by a write that PyTorch does not count, such as .data, NumPy, DLPack "
        "or a collective; results since then may come from the old values, and the copies are dropped now. Call "
        "amp.weights_changed() after each such write, or write while no copies are kept; cache_weights=False keeps none"
    )
