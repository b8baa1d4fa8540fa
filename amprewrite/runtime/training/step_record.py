"""Records the optimizer steps of one model: which overflowed and were skipped. Raises an error if too many are skipped in a row.

A record keeps, separately for each optimizer, flags of the overflows that backwards left in gradients. The hooks on an optimizer read
these flags and report its steps (optimizers/optimizer_hooks.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim.optimizer import Optimizer

from amprewrite.graphs.fx.ops.cuda_graphs import recording
from amprewrite.runtime.training.backwards import Noted
from amprewrite.runtime.training.forward_scale import ScaleUse
from amprewrite.runtime.training.loss_scale import DEFAULT_FLOOR, LossScale, LossScaleError
from amprewrite.runtime.training.nonfinite import is_finite, params_of

MAX_CONSECUTIVE_SKIPS = 50
"""Default limit of skips in a row. It exceeds 46, the halvings from the highest initial scale, 2**32, to the default floor, 2**-14."""


@dataclass(frozen=True)
class Stuck:
    """Facts for the error that too many steps in a row have overflowed. Fields that end in `_finite` are None if the fact is unknown."""

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
    """The optimizer steps of one model, and the overflow flags that backwards leave for each optimizer to read in its step.

    `parameters` returns the model's current parameters, which FSDP replaces by other tensors during a forward.
    """

    loss_scale: LossScale
    parameters: Callable[[], Iterable[Tensor]]
    max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS
    on_overflow: Callable[[], str | None] | None = None
    """Called when the host learns that a step overflowed, which is later if the optimizer is fused. Returns where it began, or None."""
    on_clean: Callable[[], None] | None = None
    """Called at the first step without overflow after a step that overflowed, once the host knows it."""
    on_stuck: Callable[[], bool] | None = None
    """Called before LossScaleError ends training. Returns True if it changed something that may help; then training continues."""
    _overflowed: bool = field(default=False, init=False)
    _facts: dict[str, bool | Tensor] = field(default_factory=dict, init=False)
    use: ScaleUse = field(init=False)
    """Decides which forwards use the loss scale. `use.unscaled` is True if the gradients of a step now come from a forward that used 1
    instead."""

    def noted(self, optimizer: Optimizer) -> Noted:
        """Return the overflow flags of the gradients of `optimizer`.

        For an optimizer that is unknown or steps copies, return the flags of parameters that no known optimizer owns.
        """
        if optimizer not in self._copies:
            for note in self._notes:
                if note.owner() is optimizer:
                    return note
        return self._rest

    def note(self, **finite: bool | Tensor) -> None:
        """Record whether the latest `inputs`, `parameters`, `outputs` and `loss` were finite, for the error message if training gets stuck.

        Values are bools, or 0-dim tensors, which are read only for the message. Raises TypeError for any other name.
        """
        unknown = finite.keys() - {"inputs", "parameters", "outputs", "loss"}
        if unknown:
            raise TypeError(f"note() takes inputs, parameters, outputs and loss, not {', '.join(sorted(unknown))}")
        self._facts |= finite

    def stepped(self, optimizer: Optimizer, overflow: bool | None) -> None:
        """Record a step of `optimizer`. Raises LossScaleError if too many steps in a row overflowed.

        `overflow`: whether the step overflowed; None if the host has not read the flag of the step. With None, the host reads the counters
        on the device after `max_consecutive_skips` steps, or sooner if steps were skipped when it last read them.
        """
        self.use.step()
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
        if recording(params_of(optimizer)[0].device):
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
        """Record whether the latest step overflowed (`overflow`), once the host knows.

        Calls `on_overflow` if the step overflowed, and `on_clean` at the first clean step after an overflow.
        """
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
        """Reset all state about optimizers and their steps, as if no optimizer had stepped yet. Also sets this state up in a new record."""
        self._until_look = self.max_consecutive_skips
        self.use = ScaleUse(self.loss_scale)
        self._rest = Noted()
        """Flags for gradients of parameters that no known optimizer owns."""
        self._notes = [self._rest]
        self._copies: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that step copies of the parameters."""
