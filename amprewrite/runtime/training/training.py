"""Train one rewritten model: give each forward its loss scale, find the optimizers of the model, and skip their steps on overflow.

Each rewritten model has a gate, its `StepGate`. The gate puts hooks on each optimizer, which check gradients before a step and skip the
step if they overflowed (optimizers/optimizer_hooks.py).

A gate finds an optimizer

1. when `attach` is called with it;
2. in the first, second, fourth, eighth ... forward without a known optimizer: the gate then searches the process for optimizers that own
   a parameter of the model;
3. at the optimizer's first step, by a hook that PyTorch calls before the steps of all optimizers. The gradients of that step were not
   scaled, so the step does not change the scale. The step is skipped if the gradients overflowed.

`forward_scale.py` decides which scale a forward has until an optimizer is found. If the model is trained and none is found, a single
warning says that gradients are not scaled (optimizers/scale_mistakes.py).

The hook for all optimizers ignores optimizers of other models. Without this hook, an optimizer that was copied, unpickled or made by a
trainer would apply infinities to the weights without a message. The hook is removed with the last gate.

Training does not skip steps for ever: after `max_consecutive_skips` skips in a row an error names the likely cause (step_record.py).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from amprewrite.graphs.fx.weights.step_listeners import StepListeners
from amprewrite.runtime.ambient.past import asking_node
from amprewrite.runtime.options import is_flattened
from amprewrite.runtime.training.forward_scale import ForwardScale
from amprewrite.runtime.training.loss_scale import LossScale
from amprewrite.runtime.training.nonfinite import params_of
from amprewrite.runtime.training.optimizers.find_optimizers import can_be_guarded, existing_optimizers, optimizer_inside, sharded_parameters
from amprewrite.runtime.training.optimizers.optimizer_hooks import guard_of
from amprewrite.runtime.training.optimizers.scale_mistakes import GradScalers, UnscaledBackwards, unscaled_message
from amprewrite.runtime.training.overflow_probe import OverflowProbe
from amprewrite.runtime.training.step_record import BackwardEnd, Noted, StepRecord
from amprewrite.tables.boundary.members import parameters_in
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import NARROW_DTYPES
from amprewrite.torch_internals.trees import tree_leaves


@dataclass(eq=False)
class StepGate(StepRecord):
    """Skips an optimizer step of one model if gradients overflowed, and updates the loss scale after each step."""

    on_unscaled: Callable[[Sequence[Tensor]], None] | None = None
    """Called when the model seems to be trained although no optimizer is known. The argument is the list of weights that get gradients."""
    first: frozenset[int] = frozenset()
    """Ids of the model's parameters at the rewrite. They identify parameters that FSDP1 takes out of the model during a forward."""
    adopt: bool = field(default=True, init=False)
    """True if this object searches for optimizers of its model; False once the model is no longer rewritten."""
    _stray: bool = field(init=False)
    """True if there may be a parameter that requires gradients and that no known optimizer owns."""
    _strays: frozenset[int] = field(init=False)
    """Ids of the parameters that require gradients and belong to no known optimizer, as found after the latest backward that looked."""
    _known: set[int] | None = field(init=False)
    """Ids of all parameters of known optimizers; None until they are needed in the current forward."""

    def __post_init__(self) -> None:
        self.first = self.first or frozenset(map(id, self.parameters()))
        self._forget_optimizers()

    def attach(self, optimizer: Optimizer, copies: bool = False, group: Any = None) -> None:
        """Guard `optimizer`: skip each of its steps whose gradients overflowed, and update the loss scale after each step.

        `copies`: the optimizer steps copies of the parameters, for instance offloaded ones, and the loop copies gradients to them.
        `group`: a process group whose ranks step other parts of the model. If one rank skips a step, all skip it.

        Raises PolicyError if the optimizer is attached already, owns an fp16 parameter of the model, or owns no parameter of the model and
        `copies` is False.
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
        """If the model has a loss scale, attach `optimizer`, unless it is guarded already or owns no parameter of the model."""
        optimizer = optimizer_inside(optimizer)
        if self.loss_scale.enabled and optimizer not in self._guarded and self._owns(optimizer):
            self.attach(optimizer)

    def retire(self) -> None:
        """Stop skipping steps of optimizers, because the model is no longer rewritten."""
        for optimizer in self._guarded:
            guard_of(optimizer).remove(self)
        _BEFORE_STEPS.discard(self._adopt)
        self.adopt = False
        self._forget_optimizers()

    def guards(self, optimizer: Optimizer) -> bool:
        """True if a step of `optimizer` is skipped when gradients of this model overflow."""
        return optimizer in self._guarded and self.loss_scale.enabled

    def snapshot(self, device: torch.device | str, evaluates: bool = False, learns: bool = False) -> tuple[Tensor, Tensor]:
        """Return (scale, 1/scale) for one forward: 0-dim fp32 tensors on `device`, both 1 if the forward is not scaled (`ScaleUse.pair`).

        `evaluates`: all modules are in eval mode. `learns`: the caller knows that a parameter requires gradients. If it does not
        know, this method looks for such a parameter in the model.
        """
        guarded = list(self._guarded)
        for optimizer in guarded:
            guard_of(optimizer).resume()
        learns = learns or any(p.requires_grad for p in self.parameters())
        return self.use.pair(torch.device(device), learns, evaluates, len(guarded) > 0, self.knows_optimizer)

    @property
    def listens(self) -> bool:
        """True if backward passes are counted, to warn the user: the scale is dynamic, no optimizer is known, and no warning was given."""
        return self.adopt and self.loss_scale.kind == "dynamic" and not self._guarded and not self._alone.warned

    def heard(self, number: int, weights: Sequence[Tensor]) -> None:
        """Count a backward pass that gives `weights` gradients, if `listens` is True. `number` is autograd's id of the pass.

        Once a few passes are counted, search the process again for the model's optimizer. If there is none, call `on_unscaled`, once only:
        it warns the user that gradients are not scaled, because no optimizer is known.
        """
        if self.listens and self._alone.enough(number, weights, self.use.evaluates):
            for optimizer in existing_optimizers():
                self._adopt(optimizer)
            if not self._guarded and self.on_unscaled is not None:
                self._alone.warned = True
                self.on_unscaled(weights)

    def knows_optimizer(self) -> bool:
        """True if an optimizer of the model is known. Until then the first, second, fourth ... call in grad mode searches for one."""
        if not self._guarded and self.adopt and self.loss_scale.enabled and torch.is_grad_enabled():
            self._unguarded += 1
            if self._unguarded & (self._unguarded - 1) == 0:
                for optimizer in existing_optimizers():
                    self._adopt(optimizer)
        return len(self._guarded) > 0

    def await_backward(self, results: Iterable[Any], learning: Sequence[int] = ()) -> None:
        """Hook `results`, so that gradients are checked for overflow at the end of each backward through one of them.

        `learning`: ids of the parameters that require gradients and that the results depend on.
        """
        if learning and self._guarded and not self._stray:
            if self._known is None:
                self._known = set()
                for optimizer in self._guarded:
                    for group in optimizer.param_groups:
                        self._known.update(map(id, group["params"]))
            self._stray = not self._known.issuperset(learning)
        self._backwards.watch(results)

    def forward_began(self) -> None:
        """Drop the overflow flags of gradients that the training loop has discarded. Call this when a training forward begins."""
        self._known = None
        for note in self._notes:
            if note.waits:
                self.dropped(note, note.began(self._share(note), self._stepped))

    def _backward_began(self) -> None:
        """Drop the overflow flags of gradients that the training loop has discarded. Call this when a backward begins.

        Only parameters of the model itself are examined. The optimizer may also hold parameters of a head outside the model, which may have
        got new gradients from this backward already. Raises LossScaleError if a GradScaler has handled an optimizer of this model since the
        previous backward.
        """
        self._scalers.refuse(self._guarded)
        for note in self._notes:
            if note.waits:
                share = self._share(note)
                known = () if all(p.grad is None for p in share) else self._own()
                own = [p for p in share if id(p) in known] or share
                self.dropped(note, note.began(own, self._stepped))

    def _backward_ended(self, number: int) -> None:
        """Check gradients for overflow after the backward with autograd's id `number`.

        The gradients of each known optimizer give one overflow flag. The parameters that no known optimizer owns give another.
        """
        self._stepped = False
        if self._guarded:
            self._scalers.backward_ended()
        known: set[int] = set()
        for note in self._notes:
            optimizer = note.owner()
            if optimizer is not None:
                share = guard_of(optimizer).share(self)
                known.update(map(id, share))
                note.ended(share)
        if self.adopt and (self._stray or not self._guarded):
            rest = [p for p in self.parameters() if id(p) not in known]
            strays = frozenset(id(p) for p in rest if p.requires_grad)
            self._stray = len(strays) > 0
            if strays != self._strays:  # the set of unowned parameters changed: an optimizer that owned none before may own some now
                self._strays = strays
                self._foreign.clear()
            moved = all(p.grad is None for p in rest)
            self._rest.ended([*rest, *self._copied()] if moved else rest)

    def _share(self, note: Noted) -> list[Tensor]:
        """Return the parameters of the optimizer `note.owner()`. If it is None: the model's parameters and their copies (`_copied`)."""
        optimizer = note.owner()
        return [*self.parameters(), *self._copied()] if optimizer is None else guard_of(optimizer).share(self)

    def _copied(self) -> list[Tensor]:
        """Return the copies of parameters that are stepped by the optimizers attached with `copies=True`."""
        return [p for optimizer in self._copies for p in params_of(optimizer)]

    def _owns(self, optimizer: Optimizer) -> bool:
        own = self._own()
        if any(id(p) in own for p in params_of(optimizer)):
            return True
        if all(isinstance(p, nn.Parameter) for p in self.parameters()):  # during a forward, FSDP1 replaces parameters by tensors
            return False  # FSDP1 replaced none, and an old id may belong to a parameter of another model by now
        return any(id(p) in self.first and is_flattened(p) for p in params_of(optimizer))

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
        if optimizer not in self._guarded and optimizer not in self._copies:
            self.forward_began()
            found = Noted(optimizer)
            found.inherit(self._notes)  # the new optimizer may own gradients that other `Noted`s have flagged
            self._notes = [note for note in self._notes if note is self._rest or note.owner() is not None] + [found]
        self._guarded.add(optimizer)
        self._unguarded, self.loss_scale.withheld = 0, False

    def _adopt(self, optimizer: Optimizer) -> None:
        """From now on, skip steps of `optimizer` that overflow, if hooks can skip them and the optimizer owns parameters of the model."""
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

    def _forget_optimizers(self) -> None:
        self._forget_steps()
        self._attached: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._guarded: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._foreign: weakref.WeakKeyDictionary[Optimizer, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._unguarded = 0
        """Number of forwards with gradients while no optimizer was known."""
        self._stray, self._strays, self._known = False, frozenset[int](), None
        self._alone, self._scalers = UnscaledBackwards(), GradScalers()
        self._backwards = BackwardEnd(self._backward_began, self._backward_ended)
        if self.adopt and self.loss_scale.enabled:
            _BEFORE_STEPS.add(self._adopt)


_BEFORE_STEPS = StepListeners(register_optimizer_step_pre_hook)
"""Functions that a global hook of PyTorch calls before each step of any optimizer. Each StepGate has one, which guards the optimizer if it
owns parameters of the model and is not guarded yet. The hooks that this adds to the optimizer run before the same step."""


class _Thread(threading.local):
    scale: ForwardScale | None = None
    """Loss scale of the forward that this thread runs; None if no graph has asked for it yet."""


class Training:
    """Loss scaling of one model: its loss scale, the StepGate that guards its optimizers, and the probe that finds its overflows.

    `in_parts()` is True if code of the model may run between the graphs of the running forward. `on_overflow` and `on_stuck` are described
    in StepRecord. `first` holds the ids of the model's parameters at the rewrite. `warn` shows a warning to the user.
    """

    def __init__(
        self, root: nn.Module, loss_scale: LossScale, first: frozenset[int], in_parts: Callable[[], bool],
        on_overflow: Callable[[], str | None], on_stuck: Callable[[], bool], warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.root, self.loss_scale, self.in_parts, self.probe = root, loss_scale, in_parts, OverflowProbe(root)
        self.gate = StepGate(
            loss_scale, lambda: chain(parameters_in(root), sharded_parameters(root)), first=first, on_overflow=on_overflow,
            on_clean=self.probe.disarm, on_stuck=on_stuck,
            on_unscaled=lambda weights: warn(unscaled_message(weights, self.gate.parameters())),
        )  # fmt: skip
        self._thread = _Thread()
        self._entered: weakref.ref[ForwardScale] | None = None
        """The scale of the forward that a backward has reached most recently."""

    def begin_forward(self) -> None:
        """Drop the overflow flags of gradients that the loop has discarded. Call this when a forward begins.

        Does nothing if grad mode is off or the model has no loss scale.
        """
        if torch.is_grad_enabled() and self.loss_scale.enabled:
            self.gate.forward_began()

    def forward_scale(self, device: torch.device, learns: bool = False) -> ForwardScale:
        """Return the loss scale of the running forward. The first call in a forward creates it, on `device`; later calls return it.

        `learns`: a parameter requires gradients; if False, the parameters are searched for one. A recomputation in a backward (activation
        checkpoint) gets the scale of the forward that this backward reached most recently.
        """
        thread = self._thread
        if thread.scale is None:
            entered = None if self._entered is None else self._entered()
            if entered is not None and entered.in_backward() and asking_node() is not None:
                thread.scale = entered  # a recomputation: it saves tensors for the backward of `entered`, so it needs the same scale
            else:
                evaluates = not (self.root.training or any(module.training for module in self.root.modules()))
                pair, static = self.gate.snapshot(device, evaluates, learns), self.loss_scale.kind == "static"
                thread.scale = ForwardScale(pair, self.in_parts(), static, self._backward_entered, self.gate.listens)
        return thread.scale

    def _backward_entered(self, forward: ForwardScale, number: int, learns: bool) -> None:
        self._entered = weakref.ref(forward)
        if learns:
            self.gate.heard(number, forward.weights)

    def end_forward(self) -> None:
        """Mark the forward as ended. Until then a backward through it uses 1 instead of the scale: its gradients are part of the result."""
        if self._thread.scale is not None:
            self._thread.scale.under_way = False
            self._thread.scale = None

    def await_backward(self, results: Any) -> None:
        """Hook the `results` of a call of the model, to check gradients for overflow at the end of each backward through them."""
        if torch.is_grad_enabled() and self.loss_scale.enabled:
            self.gate.await_backward((results,) if isinstance(results, torch.Tensor) else tree_leaves(results))
