"""Lightning and Fabric: `Trainer(plugins=[AmpRewritePrecision("fp16")])`, `Fabric(plugins=[AmpRewritePrecision("bf16")])`.

1. `convert_module` rewrites the module in place, for some strategies go on with the object that they have.
2. Gradients arrive unscaled, so clipping, with fused optimizers too, is Lightning's own.
3. A schedule that moves by steps stands still for a step that was skipped.
4. The loss scale is in the optimizer's checkpoint; Lightning's own part for the precision has it, too.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from amprewrite.api.rewrite import rewrite
from amprewrite.runtime.model.rewritten import is_rewritten, session_of
from amprewrite.runtime.training.optimizers.optimizer_hooks import step_was_skipped
from amprewrite.tables.errors import MissingPackageError

if TYPE_CHECKING:
    from amprewrite.runtime.session import Session

_NAMES = ("lightning.pytorch", "pytorch_lightning")
"""The library's two names, which have classes of their own: the one that the user imported counts."""


def _precision_class() -> type:
    for name in sorted(_NAMES, key=lambda name: name not in sys.modules):
        if find_spec(name.partition(".")[0]) is not None:
            found: type = import_module(f"{name}.plugins.precision").Precision
            return found
    raise MissingPackageError("amprewrite.integrations.lightning", "lightning", "lightning")


if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision
else:
    Precision = _precision_class()


class AmpRewritePrecision(Precision):  # type: ignore[misc]
    """A precision plugin whose modules are rewritten; `dtype` and `options` are those of `amprewrite.rewrite`.

    Leave the trainer's own `precision=` out: its default, fp32, is what the module's parameters stay in.
    """

    precision = "32-true"

    def __init__(self, dtype: Any = None, **options: Any) -> None:
        super().__init__()
        self._options = {"dtype": dtype, **options}
        self._sessions: list[Session] = []

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Rewrite `module` in place. One that is rewritten already stays as it is: a trainer may fit, test and fit again."""
        if not is_rewritten(module):
            rewrite(module, inplace=True, **self._options)
        session = session_of(module)
        if session not in self._sessions:
            self._sessions.append(session)
        return module

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[nn.Module, list[Any], list[Any]]:
        """Guard the optimizers from their first step on, and hold the schedules of skipped steps."""
        for optimizer in optimizers:
            for session in self._sessions:
                session.gate.attach_if_own(optimizer)
        for config in lr_schedulers:
            if config.interval == "step" and not isinstance(config.scheduler, HeldSchedule):
                config.scheduler = HeldSchedule(config.scheduler)
        return model, optimizers, lr_schedulers

    # Fabric has no trainer, whose callbacks these methods of the Trainer's base class call. They are Fabric's own there.
    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        return super().pre_backward(tensor, module) if _has_trainer(module) else super(Precision, self).pre_backward(tensor, module)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        above: Any = super() if _has_trainer(model) else super(Precision, self)
        above.backward(tensor, model, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: Any) -> Any:
        return super().post_backward(tensor, module) if _has_trainer(module) else super(Precision, self).post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        above: Any = super() if _has_trainer(kwargs.get("model")) else super(Precision, self)
        return above.optimizer_step(optimizer, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The state of each module's loss scale, by number."""
        return {str(number): state for number, session in enumerate(self._sessions) if (state := session.loss_scale.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the loss scales."""
        for number, session in enumerate(self._sessions):
            if str(number) in state_dict and session.loss_scale.kind == "dynamic":
                session.loss_scale.load_state_dict(state_dict[str(number)])


def _has_trainer(module: Any) -> bool:
    return getattr(module, "_trainer", None) is not None


class HeldSchedule:
    """A learning-rate schedule that stands still for a step that was skipped; all else is the schedule's own."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move on, unless the optimizer's latest step was skipped."""
        if not step_was_skipped(self.scheduler.optimizer):
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.scheduler, name)


__all__ = ["AmpRewritePrecision", "HeldSchedule"]
