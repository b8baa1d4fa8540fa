"""The loss-scale schedules of this and other libraries, as arguments of `DynamicLossScale`."""

from __future__ import annotations

import math
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # the default: torch's schedule with a floor, a cap, and a faster search if the first steps overflow
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
