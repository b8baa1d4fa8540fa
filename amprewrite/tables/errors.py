"""One error class for each stage. Every message says what happened, where, and what to do."""

from __future__ import annotations

from typing import Any


class AmpRewriteError(Exception):
    """Base class of all errors that amprewrite raises on purpose."""


class OpListError(AmpRewriteError):
    """An op list contradicts itself or names an op that does not exist."""


class PolicyError(AmpRewriteError):
    """The user's request is invalid: an unknown dtype, a pattern that matches nothing, a contradiction."""


class CaptureError(AmpRewriteError):
    """The model, or part of it, cannot be captured."""


class PlanError(AmpRewriteError):
    """There is no plan yet, or a given plan is invalid or does not fit the model."""


class CalibrationError(AmpRewriteError):
    """Sample batches cannot be run or compared, or a calibration is damaged or belongs to another model."""


class PassError(AmpRewriteError):
    """A pass broke its contract: a bug in amprewrite, please report it."""


class EmitError(AmpRewriteError):
    """The rewritten graph cannot be written in the form asked for."""


class AccuracyError(EmitError):
    """The requested accuracy cannot be reached. No file was written. `result` is the rejected result of an ONNX conversion, or None."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class StaleWeightsError(AmpRewriteError):
    """A weight was changed unnoticed while low copies of it were kept, so that results may come from its old values."""


class MissingPackageError(AmpRewriteError, ImportError):
    """A part of amprewrite needs a library that is not installed."""

    def __init__(self, part: str, package: str, extra: str) -> None:
        super().__init__(f"{part} needs {package}, which is not installed: pip install 'amprewrite[{extra}]'", name=package)


class AmpRewriteWarning(UserWarning):
    """Warning that something runs differently than the user asked. The message gives the reason."""


def one_line(error: object, most: int = 300) -> str:
    """Return the text of an error of another library on one line, cut to `most` characters; the name of its class if it has no text."""
    return " ".join(str(error).split())[:most] or type(error).__name__
