"""Automatic mixed precision as a graph-rewrite compiler pass for PyTorch."""

from pathlib import Path as _Path
from typing import Any as _Any

# In a checkout `passes/` stands beside this folder; an installed wheel holds it as amprewrite/passes.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "passes" / "__init__.py").is_file():
    __path__.append(str(_root))

from amprewrite.calibrate import calibrate  # noqa: E402
from amprewrite.debug import debug  # noqa: E402
from amprewrite.errors import (  # noqa: E402
    AccuracyError,
    AmpRewriteError,
    AmpRewriteWarning,
    CalibrationError,
    CaptureError,
    EmitError,
    OpListError,
    PassError,
    PlanError,
    PolicyError,
    StaleWeightsError,
)
from amprewrite.loss_scale import (  # noqa: E402
    DynamicLossScale,
    LossScale,
    LossScaleError,
    NoLossScale,
    StaticLossScale,
)
from amprewrite.oplists import OpLists  # noqa: E402
from amprewrite.plan import Cast, CastPlan, NodePlan, RegionPlan, Skipped  # noqa: E402
from amprewrite.ranges import Calibration  # noqa: E402
from amprewrite.rewrite import plan, rewrite  # noqa: E402
from amprewrite.rewritten import onnx_road as _onnx_road  # noqa: E402
from amprewrite.sensitivity import sensitivity  # noqa: E402
from amprewrite.verify import verify  # noqa: E402


def rewrite_onnx(model: _Any, out: _Any = None, **options: _Any) -> _Any:
    """Rewrite an fp32 ONNX model into mixed precision; `amprewrite.convert.rewrite_onnx` has the options and the result.

    EmitError where the onnx extra is not installed.
    """
    return _onnx_road().rewrite_onnx(model, out, **options)


__version__ = "0.1.0"

__all__ = [
    "AccuracyError",
    "AmpRewriteError",
    "AmpRewriteWarning",
    "Calibration",
    "CalibrationError",
    "CaptureError",
    "Cast",
    "CastPlan",
    "DynamicLossScale",
    "EmitError",
    "LossScale",
    "LossScaleError",
    "NoLossScale",
    "NodePlan",
    "OpListError",
    "OpLists",
    "PassError",
    "PlanError",
    "PolicyError",
    "RegionPlan",
    "Skipped",
    "StaleWeightsError",
    "StaticLossScale",
    "calibrate",
    "debug",
    "plan",
    "rewrite",
    "rewrite_onnx",
    "sensitivity",
    "verify",
]
