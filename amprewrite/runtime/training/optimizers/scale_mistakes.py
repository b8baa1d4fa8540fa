"""Detect gradients that are not scaled, because their optimizer is unknown, or scaled twice, by a GradScaler that was left in the loop.

A dynamic loss scale follows the steps of torch optimizers, which it sees by PyTorch's hooks. It does not see steps by optimizers of other
libraries (fastai, Keras 3), by optimizers over copies of the weights, or by hand: then the scale stays 1. A model counts as trained after a
few backward passes that give weights gradients. In eval mode, gradients are also computed without training (saliency, attacks), so in
eval mode a pass counts only if the weights have changed as well.

A torch.amp.GradScaler is detected in two ways:

1. If the scaler lets a step run, it is found among the callers of `step`, or by `found_inf`, an attribute that it sets on optimizers that
   skip steps by themselves.
2. If the scaler finds an overflow, which is likely with two scales, it does not call `step`. But it adds each optimizer that it handles to
   a dict, which its `update` replaces by a new dict. So we keep the dict at the end of each backward, and look into it at the next.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from amprewrite.runtime.training.loss_scale import LossScaleError
from amprewrite.runtime.training.nonfinite import params_of
from amprewrite.runtime.training.optimizers.find_optimizers import differentiates, every_optimizer, instances_of
from amprewrite.tables.formats import NARROWEST

BACKWARDS = 8
"""Number of backward passes after which a model counts as trained. Fewer are common in code that only inspects gradients."""
_DEPTH = 7
"""Largest number of references that are followed from a weight to its optimizer. fastai keeps weights in nested lists."""
_WIDTH = 4000
"""Largest number of objects that are searched at each distance from the weights."""
_PROBES, _NUMBERS = 8, 64
"""Number of weights, and of numbers in each, that are compared to see whether the weights changed."""
_COPIES = "amp.attach(optimizer, copies=True)"
_NOT_TORCH = (
    "Use a torch optimizer (fastai: opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), call amp.attach(optimizer) with the torch "
    "optimizer inside a wrapper, or use the library's own loss scale (Keras: LossScaleOptimizer) with loss_scale='none' here"
)
_METHODS = ("step", "apply_gradients", "apply")
"""Names of the methods by which optimizers of any library step."""


class UnscaledBackwards:
    """Counts backward passes of one model in which weights got gradients that no loss scale had multiplied."""

    def __init__(self) -> None:
        self.warned = False
        self._count, self._latest = 0, -1
        self._numbers: list[Tensor] = []

    def enough(self, number: int, weights: Sequence[Tensor], evaluates: bool) -> bool:
        """Count a backward pass that gave gradients to `weights`. Return True if enough passes are counted to warn the user.

        `number` is autograd's id of the pass. A second call with the same id counts nothing and returns False. `evaluates`: all forwards
        since the latest optimizer step were in eval mode. Then a pass counts only if the weights changed since the previous pass.
        """
        if number == self._latest:
            return False
        self._latest = number
        if evaluates and not self._moved(weights):
            return False
        self._count += 1
        return self._count >= BACKWARDS

    def _moved(self, weights: Sequence[Tensor]) -> bool:
        """True if weights have changed since the previous call. Compares numbers, because writes to `.data` change no version counter."""
        with torch.no_grad():
            now = [weight.detach().flatten()[:_NUMBERS].clone() for weight in weights[:_PROBES]]
        before, self._numbers = self._numbers, now
        return len(before) == len(now) and not all(map(torch.equal, before, now))


def unscaled_message(weights: Sequence[Tensor], parameters: Iterable[Tensor]) -> str:
    """Return the warning that gradients are not scaled; "" if an optimizer of another library steps the weights and scales the loss.

    `weights` are the weights that got gradients, `parameters` all parameters of the model.
    """
    found = _stepped_by(weights, list(parameters))
    if found is None:
        return ""
    what, remedy = found
    return (
        f"gradients in {NARROWEST.name} are not scaled: {BACKWARDS} backwards gave this model's weights gradients, and no optimizer is "
        f"known whose steps a dynamic loss scale could follow; {what}. Small ones become zero, and steps that overflow are not skipped. "
        f"{remedy}; or rewrite with loss_scale=1024.0 or another number, which is applied whatever steps, or with a format of fp32's range"
    )


def _stepped_by(weights: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[str, str] | None:
    """Return two clauses for the warning that gradients are not scaled: how the weights are updated, and what the user can do.

    None if the object that updates the weights scales the loss itself, so that no warning is needed.
    """
    own, optimizers = {id(p) for p in (*parameters, *weights)}, every_optimizer()
    for optimizer in (each for each in optimizers if any(id(p) in own for p in params_of(each))):
        name = type(optimizer).__name__
        if differentiates(optimizer):
            return f"{name} has differentiable=True, so none of its steps is skipped", "Attach the optimizer that steps on the outer loss"
        return f"{name} steps it, and never called Optimizer.__init__", "Call super().__init__(params, defaults) in its class"
    stepping = _holder(weights)
    if stepping is not None:
        return None if _scales_itself(stepping) else (f"{_name(stepping)} steps it, and is no torch.optim.Optimizer", _NOT_TORCH)
    size = sum(p.numel() for p in parameters if p.requires_grad)
    for optimizer in optimizers:
        if sum(p.numel() for p in params_of(optimizer)) == size:
            return f"{type(optimizer).__name__} steps as many numbers elsewhere", f"If these are copies of the weights, call {_COPIES}"
    return "it is stepped by hand, as it seems", f"Use a torch optimizer, and if that steps copies of the weights, call {_COPIES}"


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _holder(weights: Sequence[Tensor]) -> Any:
    """Return the nearest object that refers to one of the weights, maybe through containers, and has a method such as `step` or `apply`.

    It is likely an optimizer of another library. None if there is no such object. Torch optimizers and modules do not count.
    """
    seen: set[int] = set()
    ahead: list[Any] = list(weights[:_PROBES])
    seen.update(map(id, ahead))
    for _ in range(_DEPTH):
        found: list[Any] = []
        for each in gc.get_referrers(*ahead):
            if id(each) in seen or each is ahead or isinstance(each, _NO_HOLDERS) or len(found) >= _WIDTH:
                continue
            seen.add(id(each))
            if isinstance(each, dict) and "__builtins__" in each:  # skip the globals of modules and scripts: they refer to everything
                continue
            if any(callable(getattr(type(each), method, None)) for method in _METHODS):
                return each
            found.append(each)
        if not found:
            return None
        ahead = found
    return None


_NO_HOLDERS = (
    Tensor, nn.Module, Optimizer, type, types.ModuleType, types.FrameType, types.FunctionType, types.MethodType, types.CellType,
    types.GeneratorType, types.CodeType, types.BuiltinFunctionType,
)  # fmt: skip


def _scales_itself(optimizer: Any) -> bool:
    """True if an optimizer of another library multiplies the loss by its own scale: its `scale_loss(1.0)` does not return 1.0."""
    scale: Callable[[float], Any] | None = getattr(optimizer, "scale_loss", None)
    try:
        return callable(scale) and float(scale(1.0)) != 1.0
    except (TypeError, ValueError, RuntimeError):  # a `scale_loss` that takes or returns no number does not scale a loss
        return False


class GradScalers:
    """The enabled GradScalers of the process, and the optimizers that they have handled since the latest backward of one model."""

    def __init__(self) -> None:
        self._scalers: list[weakref.ref[GradScaler]] | None = None
        """The scalers that exist at the end of the first backward; None before. By then the loop's scaler has scaled the loss."""
        self._handled: list[dict[int, Any]] = []
        """For each scaler, its dict of handled optimizers at the end of the latest backward. Keys are ids of optimizers."""

    def backward_ended(self) -> None:
        """Remember, for each GradScaler, the dict of optimizers that it has handled. Call this at the end of a backward."""
        if self._scalers is None:
            self._scalers = [weakref.ref(each) for each in instances_of(GradScaler) if each.is_enabled()]
        if self._scalers:
            living = (scaler for ref in self._scalers if (scaler := ref()) is not None)
            self._handled = [scaler._per_optimizer_states for scaler in living]

    def refuse(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise LossScaleError if a scaler has handled one of `optimizers` since the latest backward."""
        handled, self._handled = self._handled, []
        if handled and any(id(optimizer) in each for each in handled for optimizer in optimizers):
            raise LossScaleError(_TWICE)


def refuse_grad_scaler(optimizer: Optimizer, frames: list[FrameType], kwargs: dict[str, Any]) -> None:
    """Raise LossScaleError if a GradScaler steps `optimizer`.

    `frames` are the stack frames of `step` and of its callers, `kwargs` the keyword arguments of `step`. A GradScaler sets `found_inf`
    on an optimizer that skips steps by itself, or passes itself to it as `grad_scaler`. Otherwise it is found among the callers only.
    """
    scaler = hasattr(optimizer, "found_inf") or "grad_scaler" in kwargs
    for frame in frames:
        scaler = scaler or (frame.f_code is GradScaler.step.__code__ and frame.f_locals["self"].is_enabled())
    if scaler:
        raise LossScaleError(_TWICE)


_TWICE = (
    "a torch.amp.GradScaler steps this optimizer, but the rewritten model scales its own gradients, so they are "
    "scaled twice; remove scaler.scale, unscale_, step and update and call loss.backward() and optimizer.step(), "
    "or rewrite with loss_scale='none' to keep the scaler"
)
