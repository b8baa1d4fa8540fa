"""Train one rewritten model: give each forward its loss scale, guard the optimizers of the model, and find overflows."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from amprewrite.runtime.ambient.past import asking_node
from amprewrite.runtime.training.forward_scale import ForwardScale
from amprewrite.runtime.training.loss_scale import LossScale
from amprewrite.runtime.training.optimizers.find_optimizers import parameters_of
from amprewrite.runtime.training.optimizers.unscaled import unscaled_message
from amprewrite.runtime.training.overflow_control import StepGate
from amprewrite.runtime.training.overflow_probe import OverflowProbe
from amprewrite.torch_internals.trees import tree_leaves


class _Thread(threading.local):
    scale: ForwardScale | None = None
    """Loss scale of the forward that this thread runs; None if no graph has asked for it yet."""


class Training:
    """Loss scaling of one model: its loss scale, the StepGate that guards its optimizers, and the probe that finds its overflows.

    `in_parts()` is true if code of the model may run between the graphs of the running forward. `on_overflow` and `on_stuck` are as in
    StepRecord, `first` as in StepGate. `warn` warns the user.
    """

    def __init__(
        self, root: nn.Module, loss_scale: LossScale, first: frozenset[int], in_parts: Callable[[], bool],
        on_overflow: Callable[[], str | None], on_stuck: Callable[[], bool], warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.root, self.loss_scale, self.in_parts, self.probe = root, loss_scale, in_parts, OverflowProbe(root)
        self.gate = StepGate(
            loss_scale, parameters_of(root), on_overflow=on_overflow, on_clean=self.probe.disarm, on_stuck=on_stuck, first=first,
            on_unscaled=lambda weights: warn(unscaled_message(weights, self.gate.parameters())),
        )  # fmt: skip
        self._thread = _Thread()
        self._entered: weakref.ref[ForwardScale] | None = None
        """The forward that a backward has entered most recently."""

    def begin_forward(self) -> None:
        """Drop the overflow flags of discarded gradients, if the forward that begins is scaled."""
        if torch.is_grad_enabled() and self.loss_scale.enabled:
            self.gate.forward_began()

    def forward_scale(self, device: torch.device, learns: bool = False) -> ForwardScale:
        """Return the loss scale of this forward. All graphs of the forward share it; the first request creates it, on `device`.

        `learns=True` says that some parameter requires gradients; with False the parameters are searched for one. A recomputation in a
        backward (activation checkpoint) gets the scale of the forward that this backward entered most recently.
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
        """Mark the forward as ended: a backward through it from now on is the backward of a loss, not a part of the model's computation."""
        if self._thread.scale is not None:
            self._thread.scale.under_way = False
            self._thread.scale = None

    def await_backward(self, results: Any) -> None:
        """Check gradients for overflow at the end of each backward through `results`, the results of a call of the model."""
        if torch.is_grad_enabled() and self.loss_scale.enabled:
            self.gate.await_backward((results,) if isinstance(results, torch.Tensor) else tree_leaves(results))
