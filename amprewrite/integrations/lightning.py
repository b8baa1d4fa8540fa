"""Support for Lightning and Fabric: `Trainer(plugins=[AmpRewritePrecision("fp16")])`, `Fabric(plugins=[AmpRewritePrecision("bf16")])`.

1. `convert_module` rewrites the module in place, because some strategies keep a reference to the original object.
2. Gradients in `.grad` are unscaled, so Lightning can clip them itself, with fused optimizers too.
3. A learning-rate schedule with interval "step" does not advance if the optimizer's step was skipped.
4. Checkpoints hold the loss scale in the optimizer's state, and in the state that Lightning saves for the precision plugin.
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
"""The two packages of Lightning. Their classes differ, so the package that the user has imported is tried first."""


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
    """A precision plugin for Lightning and Fabric that rewrites modules in place. It takes the options of `amprewrite.rewrite`.

    Do not also pass `precision=` to the trainer: by default the trainer keeps the parameters in fp32, as the rewrite needs.
    """

    precision = "32-true"

    def __init__(self, dtype: Any = None, **options: Any) -> None:
        super().__init__()
        self._options = {"dtype": dtype, **options}
        self._sessions: list[Session] = []

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Rewrite `module` in place and return it. A module that is rewritten already does not change: a trainer may call this again."""
        if not is_rewritten(module):
            rewrite(module, inplace=True, **self._options)
        session = session_of(module)
        if session not in self._sessions:
            self._sessions.append(session)
        return module

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[nn.Module, list[Any], list[Any]]:
        """Make the optimizers skip steps with overflowed gradients, and keep their learning-rate schedules from advancing at such a step.

        Schedules with another interval than "step" are not changed. Return the arguments, which are changed in place.
        """
        for optimizer in optimizers:
            for session in self._sessions:
                session.training.gate.attach_if_own(optimizer)
        for config in lr_schedulers:
            if config.interval == "step" and not isinstance(config.scheduler, HeldSchedule):
                config.scheduler = HeldSchedule(config.scheduler)
        return model, optimizers, lr_schedulers

    # The next four methods override methods of `Precision` that call callbacks of the module's trainer. Under Fabric a module has no
    # trainer: then skip `Precision`, and call the method of its base class, which is Fabric's precision plugin.
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
        """Return {"0": state of the first module's loss scale, "1": of the second, ...}. A module without a loss scale has no entry."""
        return {str(number): state for number, session in enumerate(self._sessions) if (state := session.training.loss_scale.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the dynamic loss scales from the result of `state_dict`."""
        for number, session in enumerate(self._sessions):
            if str(number) in state_dict and session.training.loss_scale.kind == "dynamic":
                session.training.loss_scale.load_state_dict(state_dict[str(number)])


def _has_trainer(module: Any) -> bool:
    return getattr(module, "_trainer", None) is not None


class HeldSchedule:
    """Wraps a learning-rate schedule so that it does not advance if the optimizer skipped its step. It has the schedule's attributes."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, unless the optimizer's latest step was skipped."""
        if not step_was_skipped(self.scheduler.optimizer):
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # `copy` looks up attributes before `scheduler` is set: avoid endless recursion
            raise AttributeError(name)
        return getattr(self.scheduler, name)


__all__ = ["AmpRewritePrecision", "HeldSchedule"]
