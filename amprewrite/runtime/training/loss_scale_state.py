"""Reports of a loss scale, and checks of the state that it is loaded from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.boundary.notebook import fragment
from amprewrite.tables.errors import PolicyError

_MAX = torch.finfo(torch.float32).max
_MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1
OWN_KEY = "amprewrite"
"""Where a state dict keeps what GradScaler does not know."""
COUNTERS = 4
"""Steps, skipped, skipped in a row, steps since the last overflow."""
_GRAD_SCALER_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True)
class LossScaleReport:
    """How loss scaling has been going; `str()` says it in a line or two."""

    kind: str
    scale: float
    steps: int
    """Sets of optimizer steps seen, the skipped ones included."""
    skipped: int
    consecutive_skips: int
    last_overflow_step: int | None
    """Counted from 1."""
    at_floor: bool
    overflow_at: str | None
    """Where the last overflow began, if the runtime could tell."""
    withheld: float | None = None
    """The scale that is not applied, for no optimizer is known that steps the model; `scale` is 1 then."""

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
        """The report as a notebook shows it."""
        return fragment(str(self).splitlines())


def positive(where: str, name: str, value: float) -> float:
    """`value` as a float that fp32 can hold and whose inverse it can hold; PolicyError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 / _MAX <= value <= _MAX:
        raise PolicyError(f"{where}: {name}={shown(value)} must be a positive number within fp32's range; a power of two is exact")
    return float(value)


def check_state(state: Any) -> None:
    """Raise PolicyError unless `state` is a scaler's."""
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
    """1/scale, taken in fp64 if there is one, as GradScaler does; exact for powers of two."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def host_numbers(*numbers: Tensor) -> tuple[float, ...] | None:
    """The values of 0-dim tensors; None unless all are on a CPU, where reading them waits for nothing."""
    if not all(type(number) is Tensor and number.is_cpu for number in numbers):
        return None
    return tuple(number.tolist() for number in numbers)  # type: ignore[misc]


__all__ = ["COUNTERS", "OWN_KEY", "LossScaleReport", "check_state", "host_numbers", "positive", "reciprocal"]
