"""The options of one rewrite, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from amprewrite.ir.evidence.keep_high import KeepHigh
from amprewrite.ir.evidence.ranges import Calibration
from amprewrite.ir.plans.plan import ModelPlan
from amprewrite.ir.policies.pad_policy import PadPolicy
from amprewrite.ir.policies.policy import Override
from amprewrite.runtime.model.parts import MODEL, Granularity
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import OpLists


@dataclass(frozen=True)
class Options:
    """The options of one `rewrite` call, checked."""

    low: Format | None
    """None: what the device does best, which may be nothing."""
    lists: str | OpLists = "default"
    overrides: tuple[Override, ...] = ()
    backend: str | Callable[..., Any] = "eager"
    cache_weights: bool | str = True
    """"step": in training, too."""
    strict: bool = False
    given: ModelPlan | None = None
    granularity: Granularity = MODEL
    """What `parse_granularity` returns."""
    calibration: Calibration | None = None
    keep_high: KeepHigh | None = None
    loss_scale: Any = "auto"
    """What `parse_loss_scale` takes: "auto", a number, a preset, or a LossScale to share."""
    device: str = ""
    """The device to plan for; "": the one at hand."""
    measure: bool = False
    memory: float = 0.0
    parity: float | None = 1.0
    """How much a step of training counts in the prices that all graphs share; None: each graph is decided by itself."""
    pad: PadPolicy = field(default_factory=PadPolicy)
