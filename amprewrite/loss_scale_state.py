"""What a loss scale tells of itself, and what it may be loaded from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from amprewrite.errors import PolicyError

_MAX = torch.finfo(torch.float32).max
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
    culprit: str | None
    """Where the last overflow began, if whoever runs the graph could tell."""

    def __str__(self) -> str:
        if self.kind == "none":
            return "no loss scaling"
        text = f"{self.kind} loss scale {self.scale:g}: {self.skipped} of {self.steps} steps skipped"
        if self.last_overflow_step is not None:
            text += f", last at step {self.last_overflow_step}"
        if self.consecutive_skips:
            text += f", {self.consecutive_skips} in a row just now"
        if self.at_floor:
            text += "; the scale is at its floor"
        if self.culprit:
            text += f"\nlast overflow began at {self.culprit}"
        return text


def positive(where: str, name: str, value: float) -> float:
    """`value` as a float that fp32 can hold and whose inverse it can hold; PolicyError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 / _MAX <= value <= _MAX:
        raise PolicyError(f"{where}: {name}={value!r} must be a positive number within fp32's range; a power of two is exact")
    return float(value)


def check_state(state: Any) -> None:
    """PolicyError unless `state` is a scaler's."""
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
    positive("load_state_dict", "scale", state["scale"])


__all__ = ["LossScaleReport", "check_state", "positive"]
