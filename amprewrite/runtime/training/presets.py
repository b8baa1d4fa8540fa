"""The loss-scale schedules of other libraries, as settings of `DynamicLossScale`."""

from __future__ import annotations

import math
from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # ours: torch's, but for a quick search where the first steps overflow
    "auto": {"search_interval": 100},
    # torch/amp/grad_scaler.py: no bounds; grows as long as the product is finite
    "torch": {"floor": None, "cap": None},
    # TensorFlow 1 DynamicLossScale and Keras 2 LossScaleOptimizer: max(scale / 2, 1)
    "tf": {"init": 2.0**15, "floor": 1.0, "cap": None},
    "keras": {"init": 2.0**15, "floor": 1.0, "cap": None},
    # Keras 3 LossScaleOptimizer: neither a floor nor a look whether the doubled scale is finite
    "keras3": {"init": 2.0**15, "floor": None, "cap": math.inf},
    # apex/amp/scaler.py
    "apex": {"floor": None, "cap": 2.0**24},
    # deepspeed/runtime/fp16/loss_scaler.py with its config's defaults: the first clean step after an overflow does not count
    # towards growth, and an overflow at the floor ends the run
    "deepspeed": {"growth_interval": 1000, "floor": 1.0, "cap": None, "hysteresis": 2, "rest": 1, "raise_at_floor": True},
    # megatron/core/optimizer/grad_scaler.py, which does not look whether the grown scale is finite either
    "megatron": {"init": 2.0**32, "growth_interval": 1000, "floor": 1.0, "cap": math.inf, "hysteresis": 2},
}

__all__ = ["PRESETS"]
