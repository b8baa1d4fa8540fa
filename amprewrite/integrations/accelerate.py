"""Support for accelerate: `model, optimizer, loader = prepare(accelerator, model, optimizer, loader, dtype="fp16")`."""

from __future__ import annotations

from typing import Any

from torch import nn

from amprewrite.api.rewrite import rewrite
from amprewrite.runtime.model.rewritten import is_rewritten, session_of
from amprewrite.tables.errors import MissingPackageError, PolicyError

try:
    from accelerate import Accelerator
except ImportError as error:
    raise MissingPackageError("amprewrite.integrations.accelerate", "accelerate", "accelerate") from error


def prepare(accelerator: Accelerator, *objects: Any, device_placement: list[bool] | None = None, **options: Any) -> Any:
    """Rewrite every module among `objects` in place, then return `accelerator.prepare(*objects, device_placement=device_placement)`.

    `options` are the options of `amprewrite.rewrite`. Optimizers among the objects skip steps with overflowed gradients, from the first
    step on. Checkpoints of `save_state` include the loss scale, as part of the optimizer's state. The accelerator's
    `optimizer_step_was_skipped` reports skipped steps.

    Raises PolicyError if the accelerator has its own mixed precision, or if there is no module among the objects.
    """
    if accelerator.mixed_precision != "no":
        raise PolicyError(
            f"this Accelerator has mixed_precision={accelerator.mixed_precision!r}, which runs the model under torch.autocast: a rewritten "
            "model has its casts in its graph; make it with mixed_precision='no', and give dtype= to prepare"
        )
    modules = [each for each in objects if isinstance(each, nn.Module)]
    if not modules:
        raise PolicyError("prepare() was given no module to rewrite; pass the model along with its optimizer and loaders")
    for each in modules:
        if not is_rewritten(each):
            rewrite(each, inplace=True, **options)
    prepared = accelerator.prepare(*objects, device_placement=device_placement)
    for each in objects:
        if hasattr(each, "param_groups"):
            for module in modules:
                session_of(module).training.gate.attach_if_own(each)
    return prepared


__all__ = ["prepare"]
