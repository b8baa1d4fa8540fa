"""Parts of dynamic loss scaling: presets for the schedules of known libraries, the report for the user, and checks of a saved state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.boundary.printable import fragment
from amprewrite.tables.errors import PolicyError

_MAX = torch.finfo(torch.float32).max
_MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1
OWN_KEY = "amprewrite"
"""Key of a state dict under which our own state is kept. GradScaler ignores it."""
COUNTERS = 4
"""Number of counters in a loss scale and in its saved state: steps, skipped steps, skipped steps in a row, steps since an overflow."""
PRESETS: dict[str, dict[str, Any]] = {
    # the default: torch's schedule, with the default floor and cap, and with a faster search for the scale if the first steps overflow
    "auto": {"search_interval": 100},
    # torch/amp/grad_scaler.py: no bounds; the scale grows as long as the grown scale is finite
    "torch": {"floor": None, "cap": None},
    # TensorFlow 1 DynamicLossScale and Keras 2 LossScaleOptimizer: an overflow sets the scale to max(scale / 2, 1)
    "tf": {"init": 2.0**15, "floor": 1.0, "cap": None},
    "keras": {"init": 2.0**15, "floor": 1.0, "cap": None},
    # Keras 3 LossScaleOptimizer: no floor, and no check that the doubled scale is finite, hence the infinite cap
    "keras3": {"init": 2.0**15, "floor": None, "cap": math.inf},
    # apex/amp/scaler.py: no floor, and a cap of 2**24
    "apex": {"floor": None, "cap": 2.0**24},
    # deepspeed/runtime/fp16/loss_scaler.py with the defaults of DeepSpeed's config: the first clean step after an overflow does not
    # count towards growth, and an overflow at the floor ends training
    "deepspeed": {"growth_interval": 1000, "floor": 1.0, "cap": None, "hysteresis": 2, "rest": 1, "raise_at_floor": True},
    # megatron/core/optimizer/grad_scaler.py: no check that the grown scale is finite, hence the infinite cap
    "megatron": {"init": 2.0**32, "growth_interval": 1000, "floor": 1.0, "cap": math.inf, "hysteresis": 2},
}
"""For each preset, by name: the arguments of `DynamicLossScale` that give its schedule. Other arguments keep their defaults."""
_GRAD_SCALER_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True)
class LossScaleReport:
    """The state of a loss scale, for the user: its value, the counts of steps and of skipped steps, and the last overflow.

    Steps of several optimizers between two forward passes count as one: a "set of steps". `str()` gives the report in one or two lines.
    """

    kind: str
    """"none", "static" or "dynamic"."""
    scale: float
    """The scale of the next training forward."""
    steps: int
    """Number of sets of optimizer steps, including skipped sets."""
    skipped: int
    """Number of sets of optimizer steps that were skipped."""
    consecutive_skips: int
    """Number of sets of steps that were skipped in a row, up to the latest set. 0 if the latest set was not skipped."""
    last_overflow_step: int | None
    """Position of the last skipped set among all sets of steps, counted from 1; None if no set was skipped."""
    at_floor: bool
    """True if the scale has reached its lower bound."""
    overflow_at: str | None
    """The place in the model where the last overflow began; None if there was none or it was not found."""
    withheld: float | None = None
    """The scale of the schedule, if forwards use 1 instead of it because no optimizer of the model is known; otherwise None."""

    def __str__(self) -> str:
        if self.kind == "none":
            return "no loss scaling"
        text = f"{self.kind} loss scale {self.scale:g}: {self.skipped} of {self.steps} steps skipped"
        if self.withheld is not None:
            text += f"; {self.withheld:g} is not applied yet, for no optimizer is known that steps this model: amp.attach(optimizer)"
        if self.last_overflow_step is not None:
            text += f", last at step {self.last_overflow_step}"
        if self.consecutive_skips:
            text += f", {self.consecutive_skips} in a row just now"
        if self.at_floor:
            text += "; the scale is at its floor"
        if self.overflow_at:
            text += f"\nlast overflow began at {self.overflow_at}"
        return text

    def _repr_html_(self) -> str:
        """Return the report as HTML, for a notebook."""
        return fragment(str(self).splitlines())


def positive(where: str, name: str, value: float) -> float:
    """Return `value` as a float. Raises PolicyError unless it is a positive number, and fp32 can hold both the number and its inverse.

    For the error message: `name` is the setting that has this value, and `where` is the class or function that has the setting.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 / _MAX <= value <= _MAX:
        raise PolicyError(f"{where}: {name}={shown(value)} must be a positive number within fp32's range; a power of two is exact")
    return float(value)


def check_state(state: Any) -> None:
    """Raise PolicyError unless `state` is a valid `state_dict()` of a loss scale or of an enabled GradScaler."""
    if not isinstance(state, Mapping):
        raise PolicyError(f"a loss scale cannot be loaded from {type(state).__name__}; give what state_dict() returned")
    if not state:
        raise PolicyError(
            "this loss-scale state is empty, as a disabled GradScaler or NoLossScale saves it; there is nothing to resume: "
            "leave load_state_dict out"
        )
    missing = [key for key in _GRAD_SCALER_KEYS if key not in state]
    if missing:
        raise PolicyError(
            f"this is not the state of a loss scale: it lacks {', '.join(missing)}; give what amp.loss_scale.state_dict() "
            "or torch.amp.GradScaler.state_dict() returned"
        )
    where = "load_state_dict"
    positive(where, "scale", state["scale"])
    for key in ("growth_factor", "backoff_factor"):
        positive(where, key, state[key])
    _whole(where, "growth_interval", state["growth_interval"], 1, _MAX_INT32)
    _whole(where, "_growth_tracker", state["_growth_tracker"], -_MAX_INT32, _MAX_INT32)
    own = state.get(OWN_KEY, {})
    if not isinstance(own, Mapping):
        raise PolicyError(f"{where}: {OWN_KEY!r} holds {shown(own)}, which is no state; leave it out to resume GradScaler's five keys")
    counters = own.get("counters", [0] * COUNTERS)
    if not isinstance(counters, list | tuple) or len(counters) != COUNTERS:
        raise PolicyError(f"{where}: counters={shown(counters)} must be a list of {COUNTERS} counts of steps")
    for count in counters:
        _whole(where, "counters", count, 0, _MAX_INT64)
    for key in ("left", "searching"):
        if key in own:
            _whole(where, key, own[key], 0, _MAX_INT32)
    for key in ("floor", "cap"):
        value = own.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise PolicyError(f"{where}: {key}={shown(value)} must be a number, or None for no bound")
    if not isinstance(own.get("raise_at_floor", False), bool):
        raise PolicyError(f"{where}: raise_at_floor={shown(own['raise_at_floor'])} must be True or False")


def _whole(where: str, name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PolicyError(f"{where}: {name}={shown(value)} must be a whole number from {least} to {most}")


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1/scale in fp32. The division is done in fp64, as in GradScaler, except on MPS, which has no fp64."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def host_numbers(*numbers: Tensor) -> tuple[float, ...] | None:
    """Return the values of 0-dim CPU tensors as Python numbers. None if one needs a host sync or is of a subclass of Tensor."""
    for number in numbers:
        if type(number) is not Tensor or not number.is_cpu:
            return None
    values: tuple[Any, ...] = tuple(map(Tensor.tolist, numbers))  # not `item`: a TorchDispatchMode would see a host sync
    return values
