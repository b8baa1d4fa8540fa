"""Training without an optimizer that PyTorch knows: when to say that gradients are not scaled, and what steps the weights.

A dynamic loss scale follows optimizer steps, which PyTorch's hooks tell of. Optimizers of other libraries (fastai, Keras 3), steps by hand
and optimizers over copies of the weights have none, so the scale stays 1. A few backwards that give weights gradients show that a model is
trained so. In eval mode gradients are taken without training as well (saliency, attacks): there the weights must move, too.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amprewrite.runtime.training.optimizers.closures import params_of
from amprewrite.runtime.training.optimizers.find_optimizers import differentiates, every_optimizer
from amprewrite.tables.formats import NARROWEST

BACKWARDS = 8
"""How many backwards show that a model is trained. Fewer are common where gradients are looked at."""
_DEPTH = 7
"""How many objects may stand between a weight and what steps it: fastai keeps weights in lists of lists of its own."""
_WIDTH = 4000
_PROBES, _NUMBERS = 8, 64
"""Weights, and numbers of each, by which a step in eval mode is seen."""
_COPIES = "amp.attach(optimizer, copies=True)"
_NOT_TORCH = (
    "Use a torch optimizer (fastai: opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), call amp.attach(optimizer) with the torch "
    "optimizer inside a wrapper, or use the library's own loss scale (Keras: LossScaleOptimizer) with loss_scale='none' here"
)
_METHODS = ("step", "apply_gradients", "apply")
"""Methods by which an optimizer of any library steps."""


class UnscaledBackwards:
    """Counts the backwards of one model that give weights gradients without a loss scale."""

    def __init__(self) -> None:
        self.warned = False
        self._count, self._latest = 0, -1
        self._numbers: list[Tensor] = []

    def enough(self, number: int, weights: Sequence[Tensor], evaluates: bool) -> bool:
        """Count a backward that gave gradients to `weights`. True once there are enough to warn that gradients are not scaled.

        `number` is autograd's number of the backward, which counts once. With `evaluates` it counts only if the weights have changed.
        """
        if number == self._latest:
            return False
        self._latest = number
        if evaluates and not self._moved(weights):
            return False
        self._count += 1
        return self._count >= BACKWARDS

    def _moved(self, weights: Sequence[Tensor]) -> bool:
        """Whether weights have other numbers than at the backward before. A write through `.data` counts no version."""
        with torch.no_grad():
            now = [weight.detach().flatten()[:_NUMBERS].clone() for weight in weights[:_PROBES]]
        before, self._numbers = self._numbers, now
        return len(before) == len(now) and not all(map(torch.equal, before, now))


def unscaled_message(weights: Sequence[Tensor], parameters: Iterable[Tensor]) -> str:
    """The warning; "" if what steps the weights has a loss scale of its own."""
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
    """The library that steps the weights, and the remedy; None if it scales the loss itself."""
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
    """The nearest object with the method of an optimizer that holds one of the weights, maybe in containers; None if there is none."""
    seen: set[int] = set()
    ahead: list[Any] = list(weights[:_PROBES])
    seen.update(map(id, ahead))
    for _ in range(_DEPTH):
        found: list[Any] = []
        for each in gc.get_referrers(*ahead):
            if id(each) in seen or each is ahead or isinstance(each, _NO_HOLDERS) or len(found) >= _WIDTH:
                continue
            seen.add(id(each))
            if isinstance(each, dict) and "__builtins__" in each:  # the globals of a module or a script
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
    """Whether an optimizer of another library multiplies the loss by a scale of its own."""
    scale: Callable[[float], Any] | None = getattr(optimizer, "scale_loss", None)
    try:
        return callable(scale) and float(scale(1.0)) != 1.0
    except (TypeError, ValueError, RuntimeError):  # its method takes something else: nothing is known of a scale
        return False


__all__ = ["BACKWARDS", "UnscaledBackwards", "unscaled_message"]
