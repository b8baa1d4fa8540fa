"""Automatic mixed precision as a graph-rewrite compiler pass for PyTorch."""

from __future__ import annotations

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from amprewrite.tables.extras import EXTRAS as _EXTRAS
from amprewrite.tables.version import VERSION as _VERSION

# In a checkout, `passes/` is a sibling of this folder, so the parent folder joins the package path. A wheel holds amprewrite/passes.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "passes" / "__init__.py").is_file():
    __path__.append(str(_root))

if _TYPE_CHECKING:
    from amprewrite.accuracy.door import calibrate, debug, sensitivity, verify
    from amprewrite.api.compile_backend import compile_backend, compiled
    from amprewrite.api.gather_low import LowGathers, gather_low
    from amprewrite.api.onnx.door import rewrite_onnx
    from amprewrite.api.rewrite import plan, restore, rewrite
    from amprewrite.api.training_log import TrainingLog
    from amprewrite.ir.evidence.ranges import Calibration
    from amprewrite.ir.plans.plan import Cast, NodePlan, RegionPlan, Skipped
    from amprewrite.report.cast_plan import CastPlan
    from amprewrite.runtime.training.loss_scale import DynamicLossScale, LossScale, LossScaleError, NoLossScale, StaticLossScale
    from amprewrite.tables.errors import (
        AccuracyError,
        AmpRewriteError,
        AmpRewriteWarning,
        CalibrationError,
        CaptureError,
        EmitError,
        MissingPackageError,
        OpListError,
        PassError,
        PlanError,
        PolicyError,
        StaleWeightsError,
    )
    from amprewrite.tables.ops.op_lists import OpLists

_HOMES = {
    "amprewrite.tables.errors": (
        "AccuracyError", "AmpRewriteError", "AmpRewriteWarning", "CalibrationError", "CaptureError", "EmitError", "MissingPackageError",
        "OpListError", "PassError", "PlanError", "PolicyError", "StaleWeightsError",
    ),
    "amprewrite.runtime.training.loss_scale": ("DynamicLossScale", "LossScale", "LossScaleError", "NoLossScale", "StaticLossScale"),
    "amprewrite.tables.ops.op_lists": ("OpLists",),
    "amprewrite.ir.plans.plan": ("Cast", "NodePlan", "RegionPlan", "Skipped"),
    "amprewrite.report.cast_plan": ("CastPlan",),
    "amprewrite.ir.evidence.ranges": ("Calibration",),
    "amprewrite.api.rewrite": ("plan", "restore", "rewrite"),
    **{extra.home: extra.public for extra in _EXTRAS.values() if extra.public},
}  # fmt: skip
"""{module: its public names}. The first use of a name imports its module. Slow imports (Dynamo, scipy) wait until a function is called."""
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> _Any:
    """Import a public name or a subpackage on first use. Raises AttributeError for other names."""
    if name in _HOME:
        value = getattr(_import_module(_HOME[name]), name)
    elif not name.startswith("_") and _find_spec(f"{__name__}.{name}") is not None:
        value = _import_module(f"{__name__}.{name}")
    elif name in _LEFT_OUT:
        raise AttributeError(f"{__name__}.{name} is in a part that this copy of amprewrite leaves out: install amprewrite whole")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


__version__ = _VERSION

__all__ = [
    "AccuracyError", "AmpRewriteError", "AmpRewriteWarning", "Calibration", "CalibrationError", "CaptureError", "Cast", "CastPlan",
    "DynamicLossScale", "EmitError", "LossScale", "LossScaleError", "LowGathers", "MissingPackageError", "NoLossScale", "NodePlan",
    "OpListError", "OpLists", "PassError", "PlanError", "PolicyError", "RegionPlan", "Skipped", "StaleWeightsError", "StaticLossScale",
    "TrainingLog", "calibrate", "compile_backend", "compiled", "debug", "gather_low", "plan", "restore", "rewrite", "rewrite_onnx",
    "sensitivity", "verify",
]  # fmt: skip
_LEFT_OUT = {name for name in __all__ if name not in _HOME}  # public names of optional parts (extras) that are not installed
__all__[:] = [name for name in __all__ if name in _HOME]
