"""Record which optimizer steps of one model overflowed and were skipped. Raise an error if too many are skipped in a row.

For each optimizer, a record keeps overflow flags: 0-dim tensors that are above 0 if a backward pass left inf or NaN in its gradients. The
hooks on an optimizer read these flags and report its steps (optimizers/optimizer_hooks.py).

An overflow counts at every optimizer step until the training loop discards the gradients, even if the loop clips them, writes to them, or
makes another optimizer. When a forward or a backward of the model begins, the gradients count as discarded

1. if all of them are None;
2. if the optimizer has made a step since the overflow, and no gradient lies in the memory of a gradient of that step;
3. if any optimizer of the model has made a step since the overflow, and all gradients are zero. (Zeros before a step may stand for
   infinities: the loop may have replaced them.)

The begin and the end of a backward are noticed as follows:

1. A hook on the results of a graph runs when a gradient enters. The first such hook in a backward queues a callback with autograd.
2. Autograd runs queued callbacks when all gradients are computed. DDP and FSDP queue callbacks too, which may queue further callbacks.
   So under torch.distributed our callback queues itself again a few times, in order to act last.

A backward pass is identified by autograd's id. A pass in another thread and a pass inside another pass have their own ids.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer

from amprewrite.graphs.fx.ops.on_device import local_part, on_device, recording
from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.runtime.ambient.hook_watch import hook_result
from amprewrite.runtime.training.forward_scale import ScaleUse
from amprewrite.runtime.training.loss_scale import DEFAULT_FLOOR, LossScale, LossScaleError
from amprewrite.runtime.training.nonfinite import any_nonzero, any_of, found_after_backward, is_finite, params_of
from amprewrite.torch_internals.dispatch import call_after_backward, current_backward

MAX_CONSECUTIVE_SKIPS = 50
"""Default limit of skips in a row: more than the 46 halvings from the highest initial scale, 2**32, to the default floor, 2**-14."""


@dataclass(frozen=True)
class Stuck:
    """Facts for the error after too many skipped steps in a row. `diagnosis` infers the cause. A field `…_finite` is None if unknown."""

    scale: float
    floor: float
    dynamic: bool
    nonfinite: int
    """Number of gradients of the optimizer that hold inf or NaN."""
    gradients: int
    """Number of all gradients of the optimizer."""
    inputs_finite: bool | None = None
    outputs_finite: bool | None = None
    loss_finite: bool | None = None
    parameters_finite: bool | None = None

    def diagnosis(self) -> str:
        """Return the likely cause of the overflows, in words, and what to do about it."""
        if self.inputs_finite is False:
            return "NaN in the data: the model's inputs are not finite; look at the batch"
        if self.parameters_finite is False:
            return "NaN or an infinity in the model's weights: go back to a checkpoint from before they got there"
        if self.outputs_finite is False:
            return (
                "an activation overflow in the forward: the inputs are finite and the outputs are not, and no loss scale "
                "changes that; keep the layer that overflows in fp32, or use bf16"
            )
        if self.loss_finite is False:
            return "NaN in the loss: the model's outputs are finite and the loss is not; look at the loss and its targets"
        if not self.dynamic:
            return "the static scale is too large for these gradients; use a smaller one or loss_scale='dynamic'"
        if self.scale > self.floor:
            return "a scale search that has not ended: the scale is still falling; start lower (init) or back off faster"
        if self.loss_finite:
            return (
                "no scale search, for at this scale fp16 itself holds the gradients, and inputs, outputs and loss are finite: an op "
                "whose derivative is infinite, such as the square root or the norm of zero; keep its input away from there"
            )
        return (
            "no scale search, for at this scale fp16 itself holds the gradients: an activation overflow in the forward or NaN "
            "in the data or the loss; see whether the outputs and the loss are finite"
        )


@dataclass(eq=False)
class StepRecord:
    """Records which steps of one model overflowed, and keeps overflow flags of backward passes until each optimizer's next step reads them.

    `parameters` returns the model's current parameters, which FSDP replaces by other tensors during a forward.
    """

    loss_scale: LossScale
    parameters: Callable[[], Iterable[Tensor]]
    max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS
    on_overflow: Callable[[], str | None] | None = None
    """Called when the host learns that a step overflowed. For a fused optimizer this may be some steps later. Returns the place in the
    model where the overflow began, or None."""
    on_clean: Callable[[], None] | None = None
    """Called once after an overflow, when the host learns that the same optimizer made a clean step, or another optimizer made two."""
    on_stuck: Callable[[], bool] | None = None
    """Called before LossScaleError ends training. Returns True if it changed something that may help; then training continues."""
    _overflowed: set[int] = field(default_factory=set, init=False)
    """Ids of the optimizer that overflowed last and of all that made a clean step after it. Emptied just before `on_clean` is called."""
    _facts: dict[str, bool | Tensor] = field(default_factory=dict, init=False)
    _stepped: bool = field(default=False, init=False)
    """True if an optimizer of the model has stepped since the latest backward."""
    use: ScaleUse = field(init=False)
    """Decides which forwards use the loss scale, and which use 1. `unscaled`: a step now would use gradients of forwards with 1."""

    def noted(self, optimizer: Optimizer) -> Noted:
        """Return the object that holds the overflow flags of the gradients of `optimizer`.

        If `optimizer` is unknown, or steps copies of the parameters, return the object for all parameters without a known optimizer.
        """
        if optimizer not in self._copies:
            for note in self._notes:
                if note.owner() is optimizer:
                    return note
        return self._rest

    def note(self, **finite: bool | Tensor) -> None:
        """Record whether the latest `inputs`, `parameters`, `outputs` and `loss` were finite, for the error message if training gets stuck.

        A value is a bool or a 0-dim tensor. Tensors are read only for the message. Raises TypeError for any other name.
        """
        unknown = finite.keys() - {"inputs", "parameters", "outputs", "loss"}
        if unknown:
            raise TypeError(f"note() takes inputs, parameters, outputs and loss, not {', '.join(sorted(unknown))}")
        self._facts |= finite

    def stepped(self, optimizer: Optimizer, overflow: bool | None) -> None:
        """Record a step of `optimizer`. Raises LossScaleError if too many steps in a row overflowed.

        `overflow`: whether the step overflowed; None if the host has not read the step's flag. Then the host reads the number of skips in a
        row from the device only after `max_consecutive_skips` steps. It does so sooner if the last such number was above 0.
        """
        self.use.step()
        self._stepped = True
        self._count(optimizer, overflow)

    def dropped(self, note: Noted, flag: Tensor | None) -> None:
        """Count an overflow whose gradients the training loop discarded without a step, for instance because their norm was not finite.

        `flag`: the overflow flag of the discarded gradients, None if there is none. The overflow counts as a skipped step: otherwise
        the loss scale would never shrink in a loop that discards all overflowed gradients. But the first discard after a step does not
        count (with several ranks the first two), because a loop may compute gradients that are not meant for a step.
        """
        optimizer = note.owner()
        if flag is None or optimizer is None or self._stepped or self.use.unscaled or recording(flag.device):
            return
        note.discards += 1
        if note.discards > 1 and flag.item() > 0:
            self.loss_scale.observe(flag, source=id(optimizer))
            self._count(optimizer, True)

    def _count(self, optimizer: Optimizer, overflow: bool | None) -> None:
        number = id(optimizer)
        if overflow is None:
            self.loss_scale.ask = functools.partial(self._learn, number, True)
        elif overflow or self._overflowed:
            self._learn(number, overflow)
        else:
            self.loss_scale.ask = None
        if overflow is False:
            self._until_look.pop(number, None)
            return
        self._until_look[number] = self._until_look.get(number, self.max_consecutive_skips) - 1
        if self._until_look[number] > 0 and not (overflow and self.loss_scale.stuck()):
            return
        if recording(params_of(optimizer)[0].device):
            return
        skips = self.loss_scale.consecutive_skips()
        if overflow is None:
            self._learn(number, skips > 0)
        self._until_look[number] = max(self.max_consecutive_skips - skips, 1)
        if skips >= self.max_consecutive_skips or self.loss_scale.stuck():
            self._until_look.clear()
            if self.on_stuck is not None and self.on_stuck():
                return
            raise self._stuck(optimizer, skips)

    def _learn(self, number: int, overflow: bool) -> None:
        """Record whether the latest step overflowed (`overflow`), once the host knows. `number`: the id of the optimizer that stepped.

        Calls `on_overflow` after a step that overflowed. Then calls `on_clean` once: when the optimizer of that step has made a step
        without overflow, or another optimizer has made two. A report of the loss scale may also call this method (`LossScale.ask`).
        """
        self.loss_scale.ask = None
        if overflow:
            self._overflowed = {number}
            if self.on_overflow is not None:
                self.loss_scale.overflow_at = self.on_overflow() or self.loss_scale.overflow_at
        elif self._overflowed and number not in self._overflowed:
            self._overflowed.add(number)
        elif self._overflowed:
            self._overflowed = set()
            self._facts = {}
            if self.on_clean is not None:
                self.on_clean()

    def _stuck(self, optimizer: Optimizer, skips: int) -> LossScaleError:
        floor = getattr(self.loss_scale, "floor", None) or DEFAULT_FLOOR
        gradients = [p.grad for p in params_of(optimizer) if p.grad is not None]
        finite = {f"{name}_finite": bool(value) for name, value in self._facts.items()}
        stuck = Stuck(
            self.loss_scale.number,
            floor,
            self.loss_scale.kind == "dynamic",
            sum(not is_finite(g) for g in gradients),
            len(gradients),
            **finite,
        )
        overflow_at = f"; the last overflow began at {self.loss_scale.overflow_at}" if self.loss_scale.overflow_at else ""
        return LossScaleError(
            f"{skips} optimizer steps in a row were skipped for non-finite gradients "
            f"({stuck.nonfinite} of {stuck.gradients} now), with the loss scale at {stuck.scale:g} (floor {floor:g}). "
            f"Diagnosis: {stuck.diagnosis()}{overflow_at}"
        )

    def _forget_steps(self) -> None:
        """Reset all state about optimizers and their steps, as if no optimizer had stepped yet. Also called once for a new record."""
        self._until_look: dict[int, int] = {}
        """{id of an optimizer: number of steps until the host reads the count of skips}. A missing id means `max_consecutive_skips`."""
        self.use = ScaleUse(self.loss_scale)
        self._rest = Noted()
        """Flags for gradients of parameters that no known optimizer owns."""
        self._notes = [self._rest]
        self._copies: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that step copies of the parameters."""


_ROUNDS = 3
"""Number of times that our callback queues itself again if torch.distributed is initialised. DDP with a static graph queues a callback
that queues another, and ours must run after it."""
_MOST = 64
"""Largest number of backward passes remembered as running. A pass that raises never ends, so the set is cleared at this size."""
_MOST_FLAGS = 16
"""Largest number of backward passes whose overflow flags are kept as separate tensors. Further flags are merged into one."""
_MOST_SETS = 2
"""The overflow of a skipped step counts again at up to this many later steps, while the gradients exist. Only steps after a new backward
are counted. Without this limit, a loop that discards gradients between forward and backward, unseen by our code, would skip all steps."""
_SAMPLE = 16
"""After a step whose overflow flag the host has not read, about this many of its gradients are watched, to notice when the loop discards
them. If the step is known to have overflowed, all are watched."""


class BackwardEnd:
    """Notices backward passes through results of a model. `watch` puts the hooks on the results.

    Calls `began()` when a backward first reaches one of the results, and `ended(number)` when all gradients of the backward are computed.
    `number` is autograd's id of the backward.
    """

    def __init__(self, began: Callable[[], None], ended: Callable[[int], None]) -> None:
        self.began, self.ended = began, ended
        self._under_way: set[int] = set()

    def watch(self, results: Iterable[Any]) -> None:
        """Put a hook on each of `results` that notices backward passes. Skip values that have no `grad_fn` or have the hook already."""
        for result in results:
            if isinstance(result, Tensor) and result.grad_fn is not None:  # skip leaves: a hook on a leaf would outlive this forward
                hooks = result._backward_hooks
                if not hooks or self._entered not in hooks.values():
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
        apart = torch.distributed.is_available() and torch.distributed.is_initialized()
        call_after_backward(functools.partial(self._end, number, _ROUNDS if apart else 0))

    @uncaptured
    def _end(self, number: int, rounds: int) -> None:
        if rounds:
            call_after_backward(functools.partial(self._end, number, rounds - 1))
            return
        self._under_way.discard(number)
        self.ended(number)


class Noted:
    """Remembers whether backward passes of one model left inf or NaN in gradients of one optimizer, or of parameters without an optimizer.

    Each backward pass gives one overflow flag, a tensor that stays on the device. A flag may count at several steps, until its gradients
    are discarded. Once a CUDA graph was recorded, each flag counts at one step only, because the host does not see the graph's replays.
    The flags of a CUDA graph and its replays are merged into one tensor.
    """

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self.owner: Callable[[], Optimizer | None] = NoneType if optimizer is None else weakref.ref(optimizer)
        """A function that returns the optimizer of these gradients; None if no known optimizer owns them, or if it no longer exists."""
        self._flags: list[Tensor] = []
        """Overflow flags of backward passes that no optimizer step has read yet."""
        self._apart: Tensor | None = None
        """If several ranks train: overflow flag of unsharded gradients after the latest backward. Only `began` reads it, since an optimizer
        step finds the NaN in these gradients itself. None until the second backward after a step."""
        self._heard: Tensor | None = None
        """Overflow flag of the latest step, if it may have been skipped and its gradients may still exist; otherwise None."""
        self._there: dict[int, StorageWeakRef] = {}
        """Weak references to the memory of the gradients at the latest step, or at the end of a later backward. Keys are addresses."""
        self._sets = 0
        """Number of steps since the flag `_heard` was first set. A step counts only if a backward ended since the step before it."""
        self._ended = False
        """True if a backward has ended since the latest step."""
        self._place: Tensor | None = None
        """The tensor into which a CUDA graph merges its overflow flags."""
        self._recorded = False
        """True if a CUDA graph has recorded a write to `_place`."""
        self.discards = 0
        """Number of times that gradients were discarded since the latest step although no step had read their overflow flags."""
        self.waits = False
        """True if there may be an overflow flag that the next call of `began` could drop."""

    def ended(self, params: Sequence[Tensor]) -> None:
        """Check the gradients of `params` for inf and NaN after a backward, and store the resulting overflow flag."""
        flag, self._apart = found_after_backward(params, apart=self._ended)
        self._ended = True
        told = None
        if self._heard is not None:
            gradients = [p.grad for p in params if p.grad is not None]
            told = self._heard if self._still_there(gradients) else None
            self._there = _memory(gradients)
        self.waits |= flag is not None or self._apart is not None
        if flag is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            if recording(flag.device) and self._place is not None:
                self._recorded = True
                self._place.copy_(torch.maximum(self._place, flag))
                return
            if self._place is None:
                self._place = torch.zeros_like(flag)
            # `_heard` is the flag of an overflow that a step has read. If the overflow is still in the gradients, store 0 as the new flag.
            self._flags.append(flag if told is None else flag * (on_device(told, flag.device) == 0))
            if len(self._flags) > _MOST_FLAGS:
                self._flags = [any_of(self._flags)]

    def began(self, params: Iterable[Tensor], stepped: bool = False) -> Tensor | None:
        """Drop the overflow flags of gradients that the training loop has discarded. Call this when a forward or a backward begins.

        If all gradients are None now, return the overflow flag that no step has read, if there is one. Otherwise return None.
        `params`: the parameters of these gradients. `stepped`: an optimizer of the model has stepped since the last backward.
        """
        gradients = [p.grad for p in params if p.grad is not None]
        dropped: list[Tensor] = []
        if not gradients:
            dropped = self._unheard() if self._apart is None else [*self._unheard(), self._apart]
            self._heard = self._apart = None
        elif self._heard is not None and (recording(self._heard.device) or not self._still_there(gradients)):
            self._heard = None
        flags = self._flags if gradients and stepped and not any(recording(flag.device) for flag in self._flags) else []
        if self._heard is not None or flags:
            nonzero = any_nonzero(gradients)
            self._heard = None if self._heard is None else self._heard * on_device(nonzero, self._heard.device)
            self._flags = [flag * on_device(nonzero, flag.device) for flag in flags] if flags else self._flags
        self.waits = self._recorded or self._heard is not None or self._apart is not None or len(self._flags) > 0
        return any_of(dropped) if dropped and not self._recorded else None

    def due(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the overflow flags that decide if a step of the optimizer of `params` is skipped: 0-dim fp32 tensors, above 0 to skip it.

        They are the flags of backward passes since the last step, forgotten here, and that of an earlier step whose gradients still exist.
        """
        flags = self._unheard()
        if self._heard is not None:
            recorded = recording(self._heard.device)
            if not recorded and self._still_there([p.grad for p in params if p.grad is not None]):
                flags.append(self._heard)
            else:
                self._heard = None
        return flags

    def heard(self, flag: Tensor, overflow: bool | None, params: Iterable[Tensor]) -> None:
        """Record that an optimizer step has read all overflow flags (see `due`). `params` are the parameters of the optimizer.

        `flag`: a tensor above 0 if the step overflowed. `overflow`: the same as a bool; None if the host has not read `flag`.
        """
        self.discards, self._apart = 0, None
        known, ended = self._heard is not None, self._ended
        self._sets = self._sets + ended if known else 0
        self._ended = False
        # An overflow counts again at later steps while its gradients still exist (`_MOST_SETS`), with two exceptions. If no optimizer is
        # known, new gradients may lie in the same memory. If a CUDA graph was recorded, the host cannot see its replays.
        untold = overflow is False or self.owner is NoneType or self._recorded or recording(flag.device)
        if untold or self._sets > _MOST_SETS or not (known or ended):
            self._heard, self._there, self.waits = None, {}, self._recorded or len(self._flags) > 0
            return
        gradients = [p.grad for p in params if p.grad is not None]
        if overflow is None:
            gradients = gradients[:: max(1, len(gradients) // _SAMPLE)]
        self._heard, self._there, self.waits = flag, _memory(gradients), True

    def inherit(self, others: Iterable[Noted]) -> None:
        """Copy the overflow flags of `others`, which are `Noted`s of the same model, into this object.

        Call this for a newly found optimizer: earlier flags may be about gradients that it owns.
        """
        for other in others:
            self._flags += other._flags
            if other._recorded and other._place is not None:
                self._flags.append(other._place.clone())
            if other._heard is not None:
                self._heard = other._heard if self._heard is None else any_of([self._heard, other._heard])
                self._there |= other._there
            self._ended |= other._ended
            self.waits |= other.waits

    def _unheard(self) -> list[Tensor]:
        """Return the overflow flags that no optimizer step has read, and forget them."""
        flags, self._flags = self._flags, []
        if self._recorded and self._place is not None:
            with torch.inference_mode(False), torch.no_grad():
                flags.append(self._place.clone())
                self._place.zero_()
        return flags

    def _still_there(self, gradients: Sequence[Tensor]) -> bool:
        """True if one of `gradients` lies in the memory of a remembered gradient, and that memory was not freed in between."""
        return any((known := self._there.get(address)) is not None and not known.expired() for address in map(_address, gradients))


def _memory(gradients: Iterable[Tensor]) -> dict[int, StorageWeakRef]:
    return {_address(g): StorageWeakRef(_values(g).untyped_storage()) for g in gradients}


def _address(gradient: Tensor) -> int:
    address: int = _values(gradient).untyped_storage()._cdata
    return address


def _values(gradient: Tensor) -> Tensor:
    """Return the tensor that stores this rank's values of `gradient`: a local shard, a sparse tensor's values, or `gradient` itself."""
    gradient = local_part(gradient)
    return gradient._values() if gradient.is_sparse else gradient  # not `coalesce().values()`: `coalesce` returns a copy in other memory
