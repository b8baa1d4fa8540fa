"""Finds the optimizers of a rewritten model, has their overflowing steps skipped, and raises an error if too many are skipped in a row.

Each rewritten model has a gate. Hooks on each optimizer do the work for it (optimizers/optimizer_hooks.py); optimizers are not wrapped.

A gate finds an optimizer

1. when `attach` is called with it;
2. in forward number 1, 2, 4, 8, ... without a known optimizer: these search the objects of the process for optimizers that own a
   parameter of the model;
3. at the optimizer's first step, by a hook that PyTorch calls before the steps of all optimizers. The gradients of that step were not
   scaled, so the step does not change the scale. It is skipped if the gradients overflowed.

`forward_scale.py` decides which scale a forward has until then. If the model is trained and no optimizer is found, a single warning says
that gradients are not scaled (optimizers/unscaled.py).

The hook for all optimizers does nothing to optimizers of other models. Without it, an optimizer that was copied, unpickled or made by a
trainer would apply infinities to the weights without a message. It is removed with the last gate.

Training does not skip steps for ever: after `max_consecutive_skips` skips in a row an error names the likely cause.

One file because every method reads or writes the state of one gate.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from amprewrite.graphs.fx.ops.cuda_graphs import recording
from amprewrite.runtime.parts import is_flattened
from amprewrite.runtime.training.backwards import BackwardEnd, Noted
from amprewrite.runtime.training.forward_scale import ScaleUse
from amprewrite.runtime.training.loss_scale import DEFAULT_FLOOR, LossScale, LossScaleError
from amprewrite.runtime.training.nonfinite import local_values
from amprewrite.runtime.training.optimizers.closures import params_of
from amprewrite.runtime.training.optimizers.find_optimizers import can_be_guarded, existing_optimizers, in_a_step, optimizer_inside
from amprewrite.runtime.training.optimizers.grad_scalers import GradScalers
from amprewrite.runtime.training.optimizers.optimizer_hooks import guard_of
from amprewrite.runtime.training.optimizers.unscaled import UnscaledBackwards
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import NARROW_DTYPES

MAX_CONSECUTIVE_SKIPS = 50
"""Default limit of skips in a row. It exceeds 46, the halvings from the highest initial scale, 2**32, to the default floor, 2**-14."""


@dataclass(frozen=True)
class Stuck:
    """The facts when too many steps in a row have overflowed. Fields that end in `_finite` are None if the fact is unknown."""

    skips: int
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


class StepGate:
    """Guards the optimizers of one model: steps whose gradients overflowed are skipped, and the loss scale is updated after each step.

    `parameters` returns the model's current parameters, which FSDP replaces by other tensors during a forward.
    """

    _backwards: BackwardEnd
    _use: ScaleUse
    _notes: list[Noted]
    _stray: bool
    """True if there may be a parameter with gradients that no known optimizer owns."""
    _known: set[int] | None
    """Ids of all parameters of known optimizers; None until they are needed in the current forward."""

    def __init__(
        self,
        loss_scale: LossScale,
        parameters: Callable[[], Iterable[Tensor]],
        *,
        max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS,
        on_overflow: Callable[[], str | None] | None = None,
        on_clean: Callable[[], None] | None = None,
        on_stuck: Callable[[], bool] | None = None,
        on_unscaled: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        self.loss_scale = loss_scale
        self.parameters = parameters
        self.max_consecutive_skips = max_consecutive_skips
        self.adopt = True
        """True if the gate searches for optimizers; False once it is retired."""
        self.on_overflow = on_overflow
        """Called when the host learns that a step overflowed: at once, or later for a fused optimizer. Returns where it began, or None."""
        self.on_clean = on_clean
        """Called when the host learns that the first step after an overflow was clean."""
        self.on_stuck = on_stuck
        """Called before LossScaleError ends training. Returns True if it changed something that may help; then training continues."""
        self.on_unscaled = on_unscaled
        """Called with the weights once it is clear that the model is trained although no optimizer is known."""
        self._overflowed = False
        self._facts: dict[str, bool | Tensor] = {}
        self._first = {id(p) for p in self.parameters()}
        """Ids of the parameters at the start. By these, parameters that FSDP1 takes out of the model during a forward are recognised."""
        self._forget_optimizers()

    def attach(self, optimizer: Optimizer, copies: bool = False, group: Any = None) -> None:
        """Guard `optimizer`: its steps are skipped if gradients overflowed, and the loss scale is updated by them.

        `copies`: the optimizer steps copies of the parameters, kept elsewhere, and the loop copies gradients to them, as offloading does.
        `group`: a process group whose ranks step other parts of the model. If one of them skips a step, all do.

        Raises PolicyError if it is attached already, owns an fp16 parameter of the model, or owns no parameter of it and `copies` is false.
        """
        optimizer = optimizer_inside(optimizer)
        if optimizer in self._attached:
            raise PolicyError(f"this {type(optimizer).__name__} is attached already; attach each optimizer once")
        if not (copies or self._owns(optimizer)):
            raise PolicyError(
                f"this {type(optimizer).__name__} owns none of the model's parameters, so there is nothing to guard; build it "
                "from amp.parameters() or leave it out, or say attach(optimizer, copies=True) if it steps copies of them"
            )
        if copies:
            self._copies.add(optimizer)
        self._guard(optimizer)
        if group is not None:
            guard_of(optimizer).agree_with(group)
        self._attached.add(optimizer)

    def attach_if_own(self, optimizer: Optimizer) -> None:
        """Guard `optimizer` if it owns parameters of the model and this gate does not guard it yet. Without a loss scale, do nothing."""
        optimizer = optimizer_inside(optimizer)
        if self.loss_scale.enabled and optimizer not in self._guarded and self._owns(optimizer):
            self.attach(optimizer)

    def retire(self) -> None:
        """Stop guarding optimizers, because the model is no longer rewritten."""
        for optimizer in self._guarded:
            guard_of(optimizer).remove(self)
        ref = _LISTENERS.get(id(self))
        if ref is not None:
            _gone(id(self), ref)
        self.adopt = False
        self._forget_optimizers()

    def guards(self, optimizer: Optimizer) -> bool:
        """True if steps of `optimizer` are skipped when gradients of this model overflowed."""
        return optimizer in self._guarded and self.loss_scale.enabled

    @property
    def ran_unscaled(self) -> bool:
        """True if an optimizer step now would use gradients of a forward that used 1 in place of the dynamic scale."""
        return self._use.unscaled

    def snapshot(self, device: torch.device | str, evaluates: bool = False) -> tuple[Tensor, Tensor]:
        """Return (scale, inverse) for one forward: 0-dim fp32 tensors on `device`. `evaluates`: all modules are in eval mode."""
        for optimizer in self._guarded:
            guard_of(optimizer).resume()
        learns = any(p.requires_grad for p in self.parameters())
        return self._use.pair(torch.device(device), learns, evaluates, len(self._guarded) > 0, self._knows_optimizer)

    @property
    def listens(self) -> bool:
        """True if backwards are counted: no optimizer is known whose steps a dynamic scale could follow, and no warning was given yet."""
        return self.adopt and self.loss_scale.kind == "dynamic" and not self._guarded and not self._alone.warned

    def heard(self, number: int, weights: Sequence[Tensor]) -> None:
        """Count a backward that gives `weights` gradients. `number` is autograd's number of the backward.

        After a few such backwards, search for an optimizer once more. If there is none, call `on_unscaled`, once.
        """
        if self.listens and self._alone.enough(number, weights, self._use.evaluates):
            for optimizer in existing_optimizers():
                self._adopt(optimizer)
            if not self._guarded and self.on_unscaled is not None:
                self._alone.warned = True
                self.on_unscaled(weights)

    def look_for_optimizers(self) -> None:
        """Search for the optimizers of the model, if none is known, before its forward runs on other tensors than its parameters."""
        self._knows_optimizer()

    def _knows_optimizer(self) -> bool:
        """True if an optimizer is guarded. If none is, calls number 1, 2, 4, 8, ... search the process for one."""
        if not self._guarded and self.adopt and self.loss_scale.enabled and torch.is_grad_enabled():
            self._unguarded += 1
            if self._unguarded & (self._unguarded - 1) == 0:
                for optimizer in existing_optimizers():
                    self._adopt(optimizer)
        return len(self._guarded) > 0

    def await_backward(self, results: Iterable[Any], learning: Sequence[int] = ()) -> None:
        """Check gradients for overflow at the end of each backward that enters one of `results`.

        `learning` has the ids of parameters that require gradients and from which the results are computed.
        """
        if learning and self._guarded and not self._stray:
            if self._known is None:
                self._known = {id(p) for optimizer in self._guarded for p in params_of(optimizer)}
            self._stray = not self._known.issuperset(learning)
        self._backwards.watch(results)

    def forward_began(self) -> None:
        """Drop the overflow flags of gradients that the training loop has discarded. Called when a training forward begins."""
        self._known = None
        for note in self._notes:
            note.began(self._share(note))

    def _backward_began(self) -> None:
        """Drop the overflow flags of gradients that were discarded. Called when a backward begins.

        Only gradients of the model's own parameters are checked: an optimizer may also have parameters of a head outside the model, and
        their gradients may be new.
        Raises LossScaleError if a GradScaler has handled an optimizer of this model since the backward before.
        """
        self._scalers.refuse(self._guarded)
        for note in self._notes:
            if note:
                share = self._share(note)
                note.began(share if all(p.grad is None for p in share) else self._own_among(share))

    def _backward_ended(self, number: int) -> None:
        """Check the gradients after a backward: those of each known optimizer, and of parameters that none of them owns."""
        if self._guarded:
            self._scalers.backward_ended()
        known: set[int] = set()
        for note in self._notes:
            optimizer = note.optimizer
            if optimizer is not None:
                share = guard_of(optimizer).share(self)
                known.update(map(id, share))
                note.ended(share)
        if self.adopt and (self._stray or not self._guarded):
            rest = [p for p in self.parameters() if id(p) not in known]
            self._stray = any(p.requires_grad for p in rest)
            moved = all(p.grad is None for p in rest)
            self._rest.ended([*rest, *self._copied()] if moved else rest)

    def _share(self, note: Noted) -> list[Tensor]:
        """Return the parameters whose gradients `note` is about; [] if it holds no flag."""
        optimizer = note.optimizer if note else None
        if optimizer is not None:
            return guard_of(optimizer).share(self)
        return [*self.parameters(), *self._copied()] if note else []

    def _copied(self) -> list[Tensor]:
        """Return the copies of parameters that optimizers attached with `copies=True` step."""
        return [p for optimizer in self._copies for p in params_of(optimizer)]

    def _own_among(self, params: list[Tensor]) -> list[Tensor]:
        own = self._own()
        return [p for p in params if id(p) in own] or params

    def noted(self, optimizer: Optimizer) -> Noted:
        """Return the overflow flags that backwards left for gradients of `optimizer`.

        A new optimizer takes over the flags of all others, because it may own any of their gradients.
        """
        if optimizer in self._copies:
            return self._rest
        found = next((note for note in self._notes if note.optimizer is optimizer), None)
        if found is None:
            self.forward_began()
            found = Noted(optimizer)
            found.inherit(self._notes)
            self._notes = [note for note in self._notes if note is self._rest or note.optimizer is not None] + [found]
        return found

    def note(self, **finite: bool | Tensor) -> None:
        """Note whether the latest `inputs`, `parameters`, `outputs` and `loss` were finite, for the error message if training gets stuck.

        Values are bools, or 0-dim tensors, which are only read then. Raises TypeError for any other name.
        """
        unknown = finite.keys() - {"inputs", "parameters", "outputs", "loss"}
        if unknown:
            raise TypeError(f"note() takes inputs, parameters, outputs and loss, not {', '.join(sorted(unknown))}")
        self._facts |= finite

    def _owns(self, optimizer: Optimizer) -> bool:
        own = self._own()
        if any(id(p) in own for p in params_of(optimizer)):
            return True
        return any(id(p) in self._first and is_flattened(p) for p in params_of(optimizer))

    def _own(self) -> set[int]:
        """Return the ids of the model's current parameters."""
        return {id(p) for p in self.parameters()}

    def _guard(self, optimizer: Optimizer) -> None:
        own = self._own()
        for p in params_of(optimizer):
            if p.dtype in NARROW_DTYPES and p.requires_grad and id(p) in own:
                raise PolicyError(
                    f"a parameter of shape {tuple(p.shape)} is fp16, in which small updates are lost; keep the "
                    "model in fp32 (model.float()): the rewrite runs it in fp16 and its parameters are the master weights"
                )
        guard_of(optimizer).add(self)
        self.noted(optimizer)
        self._guarded.add(optimizer)
        self._unguarded, self.loss_scale.withheld = 0, False

    def _adopt(self, optimizer: Optimizer) -> None:
        """Guard `optimizer` if it can be guarded and owns parameters of this model."""
        if optimizer in self._guarded or not self.loss_scale.enabled or not can_be_guarded(optimizer):
            return
        first = next(iter(self.parameters()), None)
        heads = tuple((len(group["params"]), id(next(iter(group["params"]), None))) for group in optimizer.param_groups)
        signature = (id(first), heads)
        if self._foreign.get(optimizer) == signature:
            return
        if self._owns(optimizer):
            self._guard(optimizer)
        else:
            self._foreign[optimizer] = signature

    def stepped(self, optimizer: Optimizer, overflow: bool | None) -> None:
        """Note a step of `optimizer`. Raises LossScaleError if too many steps in a row overflowed.

        `overflow` is None if the host has not read the flag of the step. Then the host reads the counters after `max_consecutive_skips`
        steps, or sooner if steps were skipped when it last read them.
        """
        self._use.step()
        if overflow is None:
            self.loss_scale.ask = self._locate
        else:
            self._learn(overflow)
        if overflow is False:
            self._until_look = self.max_consecutive_skips
            return
        self._until_look -= 1
        if self._until_look > 0 and not (overflow and self.loss_scale.stuck()):
            return
        if recording(next(params_of(optimizer)).device):
            return
        skips = self.loss_scale.consecutive_skips()
        if overflow is None:
            self._learn(skips > 0)
        self._until_look = max(self.max_consecutive_skips - skips, 1)
        if skips >= self.max_consecutive_skips or self.loss_scale.stuck():
            self._until_look = self.max_consecutive_skips
            if self.on_stuck is not None and self.on_stuck():
                return
            raise self._stuck(optimizer, skips)

    def _learn(self, overflow: bool) -> None:
        """Note whether the latest step overflowed, once the host knows, and call `on_overflow`, or `on_clean` after an overflow."""
        self.loss_scale.ask = None
        if overflow:
            self._overflowed = True
            if self.on_overflow is not None:
                self.loss_scale.overflow_at = self.on_overflow() or self.loss_scale.overflow_at
        elif self._overflowed:
            self._overflowed = False
            self._facts = {}
            if self.on_clean is not None:
                self.on_clean()

    def _locate(self) -> None:
        """Find where the latest step overflowed. The loss scale calls this while it makes a report."""
        self._learn(True)

    def _stuck(self, optimizer: Optimizer, skips: int) -> LossScaleError:
        floor = getattr(self.loss_scale, "floor", None) or DEFAULT_FLOOR
        gradients = [p.grad for p in params_of(optimizer) if p.grad is not None]
        finite = {f"{name}_finite": bool(value) for name, value in self._facts.items()}
        stuck = Stuck(
            skips,
            self.loss_scale.number,
            floor,
            self.loss_scale.kind == "dynamic",
            sum(not bool(local_values(g).isfinite().all()) for g in gradients),
            len(gradients),
            **finite,
        )
        overflow_at = f"; the last overflow began at {self.loss_scale.overflow_at}" if self.loss_scale.overflow_at else ""
        return LossScaleError(
            f"{skips} optimizer steps in a row were skipped for non-finite gradients "
            f"({stuck.nonfinite} of {stuck.gradients} now), with the loss scale at {stuck.scale:g} (floor {floor:g}). "
            f"Diagnosis: {stuck.diagnosis()}{overflow_at}"
        )

    def _forget_optimizers(self) -> None:
        self._attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._guarded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._foreign: weakref.WeakKeyDictionary[Optimizer, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._until_look = self.max_consecutive_skips
        self._unguarded = 0
        """Number of forwards with gradients while no optimizer was known."""
        self._use = ScaleUse(self.loss_scale)
        self._rest = Noted()
        """Flags for gradients of parameters that no known optimizer owns."""
        self._notes = [self._rest]
        self._stray = False
        self._known = None
        self._copies: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._alone, self._scalers = UnscaledBackwards(), GradScalers()
        self._backwards = BackwardEnd(self._backward_began, self._backward_ended)
        if self.adopt and self.loss_scale.enabled:
            _listen(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without optimizers: a copy of the gate belongs to a copy of the model, and will find the optimizers of that."""
        mine = (
            "_attached", "_guarded", "_foreign", "_until_look", "_unguarded", "_use", "_rest", "_notes",
            "_stray", "_known", "_copies", "_backwards", "_first", "_alone", "_scalers",
        )  # fmt: skip
        return {name: value for name, value in self.__dict__.items() if name not in mine} | {"_facts": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._first = set()
        self._forget_optimizers()


_LISTENERS: dict[int, weakref.ref[StepGate]] = {}
_HOOK: list[Any] = []


def _listen(gate: StepGate) -> None:
    """Have `gate` called before every step of every optimizer, for as long as the gate exists."""
    number = id(gate)
    _LISTENERS[number] = weakref.ref(gate, lambda ref: _gone(number, ref))
    if not _HOOK:
        _HOOK.append(register_optimizer_step_pre_hook(_before_any_step))


def _gone(number: int, ref: weakref.ref[StepGate]) -> None:
    """Forget a gate, and remove the hook after the last one, except during a step, when PyTorch may be iterating over its hooks."""
    if _LISTENERS.get(number) is ref:
        del _LISTENERS[number]
    if not _LISTENERS and _HOOK and not in_a_step():
        _HOOK.pop().remove()


@torch.compiler.disable
def _before_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let every gate guard `optimizer`, which is about to step. A hook that a gate adds to it here still runs before this very step."""
    for ref in tuple(_LISTENERS.values()):
        gate = ref()
        if gate is not None:
            gate._adopt(optimizer)
