"""The error classes of amprewrite, one for each stage of a rewrite. Every message says what happened, where, and what to do."""

from __future__ import annotations

from typing import Any


class AmpRewriteError(Exception):
    """Base class of all errors that amprewrite raises on purpose."""


class OpListError(AmpRewriteError):
    """Raised if an op list contradicts itself or names an op that does not exist."""


class PolicyError(AmpRewriteError):
    """Raised if the user's request is invalid: an unknown dtype, a pattern that matches nothing, a contradiction."""


class CaptureError(AmpRewriteError):
    """Raised if the model, or a part of it, cannot be captured."""


class PlanError(AmpRewriteError):
    """Raised if there is no plan yet, or if a given plan is invalid or does not fit the model."""


class CalibrationError(AmpRewriteError):
    """Raised if sample batches cannot be run or compared, or if a calibration is damaged or belongs to another model."""


class PassError(AmpRewriteError):
    """Raised if a pass breaks its contract. This is a bug in amprewrite; please report it."""


class EmitError(AmpRewriteError):
    """Raised if a rewritten graph, or another result, cannot be written to a file or in the form that was asked for."""


class AccuracyError(EmitError):
    """Raised if a requested accuracy cannot be reached or measured. No file is written. `result`: the rejected ONNX conversion, or None."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class StaleWeightsError(AmpRewriteError):
    """Raised if a weight changed unnoticed while a low copy of it was cached, so that results may come from the old values."""


class MissingPackageError(AmpRewriteError, ImportError):
    """Raised if a part of amprewrite needs a library that is not installed."""

    def __init__(self, part: str, package: str, extra: str) -> None:
        super().__init__(f"{part} needs {package}, which is not installed: pip install 'amprewrite[{extra}]'", name=package)


class AmpRewriteWarning(UserWarning):
    """Warning that something runs differently than the user asked. The message gives the reason."""


def one_line(error: object, most: int = 300) -> str:
    """Return the text of an error of another library on one line, cut to `most` characters; the name of its class if it has no text."""
    return " ".join(str(error).split())[:most] or type(error).__name__
