"""Backwards that enter a rewritten model: the two moments of each, and how long an overflow that it left counts.

An overflow counts at every step until its gradients are thrown away: the loop may clip them, write to them, or make another
optimizer. They are thrown away if all of them are None when a forward or a backward of the model begins. Once a step has heard of
the overflow, they are thrown away as well if all of them are zero then, or all are other tensors than at that step. Before that
zeros count as an overflow, because they cannot be told from infinities that the loop replaced.

The two moments are when a backward first enters the model, and its very end:

1. A hook on the results of a graph runs when a gradient enters. The first hook of a backward queues a callback with autograd.
2. Autograd runs queued callbacks when all gradients are there. DDP and FSDP queue theirs too, and may queue another from it, so
   this callback queues itself again a few times and acts last.

A backward is known by autograd's number for it. Backwards in other threads and inside another one have numbers of their own.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer

from amprewrite.graphs.fx.ops.cuda_graphs import recording
from amprewrite.graphs.fx.ops.on_device import on_device
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.runtime.ambient.hook_watch import hook_result
from amprewrite.runtime.training.nonfinite import any_nonzero, any_of, found_after_backward
from amprewrite.torch_internals.autograd import call_after_backward, current_backward

_ROUNDS = 3
"""How often the callback queues itself again: DDP with a static graph queues a callback that queues another."""
_MOST = 64
"""Backwards under way that are remembered; a backward that raised never ends."""
_MOST_FLAGS = 16
"""Backwards whose flags are kept apart before they become one."""
_MOST_SETS = 2
"""Sets of steps for which an overflow counts that a step has heard of. A loop that throws gradients away where it cannot be seen,
between a forward and a loss that reads weights by itself, must not skip for ever."""
_SAMPLE = 16
"""Gradients that are recognised later, where the host does not know whether there was an overflow at all."""


class BackwardEnd:
    """Calls `began()` when a backward first enters a watched result, and `ended(number)` when all its gradients are there."""

    def __init__(self, began: Callable[[], None], ended: Callable[[int], None]) -> None:
        self.began, self.ended = began, ended
        self._under_way: set[int] = set()

    def watch(self, results: Iterable[Any]) -> None:
        """Watch for backwards that enter one of these."""
        for result in results:
            if isinstance(result, Tensor) and result.grad_fn is not None:  # a hook on a leaf would outlive this forward
                hook_result(result, self._entered)

    @uncaptured
    def _entered(self, gradient: Tensor) -> None:
        number = current_backward()
        if number < 0 or number in self._under_way:
            return
        if len(self._under_way) >= _MOST:
            self._under_way.clear()
        self._under_way.add(number)
        self.began()
        self._queue(number, _ROUNDS)

    @uncaptured
    def _queue(self, number: int, rounds: int) -> None:
        callback = functools.partial(self._queue, number, rounds - 1) if rounds else functools.partial(self._end, number)
        call_after_backward(callback)  # type: ignore[attr-defined]

    @uncaptured
    def _end(self, number: int) -> None:
        self._under_way.discard(number)
        self.ended(number)


class Noted:
    """Flags of the non-finite values that backwards of one model left in gradients of one optimizer, or of none.

    Flags stay on the device. Inside a CUDA graph they gather in one place, which replays write, too; the host sees no replay, so
    from then on no flag outlives a step.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self._owner = None if optimizer is None else weakref.ref(optimizer)
        self._flags: list[Tensor] = []
        """Of backwards that no step has heard of."""
        self._heard: Tensor | None = None
        """Of the latest step, if that may have been skipped."""
        self._there: dict[int, StorageWeakRef] = {}
        """Memory of the gradients at that step, or at the end of the latest backward, by its address."""
        self._sets = 0
        self._ended = False
        """Whether a backward has ended since the latest step."""
        self._place: Tensor | None = None
        self._recorded = False

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of these gradients; None if they are no optimizer's, or if it is gone."""
        return None if self._owner is None else self._owner()

    def __bool__(self) -> bool:
        return self._recorded or self._heard is not None or bool(self._flags)

    def ended(self, params: Iterable[Tensor]) -> None:
        """Note what a backward that has ended left in the gradients of `params`."""
        params = list(params)
        flag = found_after_backward(params)
        self._ended = True
        if self._heard is not None:
            self._there = _memory(p.grad for p in params if p.grad is not None)
        if flag is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            if recording(flag.device) and self._place is not None:
                self._recorded = True
                self._place.copy_(torch.maximum(self._place, flag))
                return
            if self._place is None:
                self._place = torch.zeros_like(flag)
            self._flags.append(flag)
            if len(self._flags) > _MOST_FLAGS:
                self._flags = [any_of(self._flags)]

    def began(self, params: Iterable[Tensor]) -> None:
        """Drop the flags of gradients of `params` that were discarded. Called when a forward or a backward begins."""
        if not self:
            return
        gradients = [p.grad for p in params if p.grad is not None]
        if not gradients:
            self._unheard()
            self._heard = None
        elif self._heard is not None and (recording(self._heard.device) or not self._still_there(gradients)):
            self._heard = None
        elif self._heard is not None:
            self._heard = self._heard * on_device(any_nonzero(gradients), self._heard.device)

    def due(self, params: Iterable[Tensor]) -> list[Tensor]:
        """All flags that count at a step of `params`."""
        flags = self._unheard()
        if self._heard is not None:
            recorded = recording(self._heard.device)
            if not recorded and self._still_there([p.grad for p in params if p.grad is not None]):
                flags.append(self._heard)
            else:
                self._heard = None
        return flags

    def heard(self, flag: Tensor, overflow: bool | None, params: Iterable[Tensor]) -> None:
        """Note that a step of `params` has read all flags; `flag` is what it made of them, `overflow` the same on the host, if known."""
        known, ended = self._heard is not None, self._ended
        self._sets = self._sets + ended if known else 0
        self._ended = False
        untold = self._owner is None or self._recorded or recording(flag.device)  # of copies the loop may write new gradients in place
        if untold or overflow is False or self._sets > _MOST_SETS or not (known or ended):
            self._heard, self._there = None, {}
            return
        gradients = [p.grad for p in params if p.grad is not None]
        if overflow is None:
            gradients = gradients[:: max(1, len(gradients) // _SAMPLE)]
        self._heard, self._there = flag, _memory(gradients)

    def inherit(self, others: Iterable[Noted]) -> None:
        """Take in what other notes of the same model say: they stand for gradients that were there before this one's optimizer."""
        for other in others:
            self._flags += other._flags
            if other._recorded and other._place is not None:
                self._flags.append(other._place.clone())
            if other._heard is not None:
                self._heard = other._heard if self._heard is None else any_of([self._heard, other._heard])
                self._there |= other._there
            self._ended |= other._ended

    def _unheard(self) -> list[Tensor]:
        """The flags that no step has heard of; none is left."""
        flags, self._flags = self._flags, []
        if self._recorded and self._place is not None:
            with torch.inference_mode(False), torch.no_grad():
                flags.append(self._place.clone())
                self._place.zero_()
        return flags

    def _still_there(self, gradients: Sequence[Tensor]) -> bool:
        """Whether one of these gradients is the tensor that it was."""
        return any((known := self._there.get(address)) is not None and not known.expired() for address in map(_address, gradients))


def _memory(gradients: Iterable[Tensor]) -> dict[int, StorageWeakRef]:
    return {_address(g): StorageWeakRef(_values(g).untyped_storage()) for g in gradients}


def _address(gradient: Tensor) -> int:
    address: int = _values(gradient).untyped_storage()._cdata
    return address


def _values(gradient: Tensor) -> Tensor:
    """The tensor whose memory holds the gradient's values on this rank."""
    if hasattr(gradient, "to_local"):
        gradient = gradient.detach().to_local()  # type: ignore[attr-defined]
    return gradient._values() if gradient.is_sparse else gradient  # `coalesce` would make a copy


__all__ = ["BackwardEnd", "Noted"]
