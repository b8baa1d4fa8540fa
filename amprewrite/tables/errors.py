"""One error class for each stage. Every message says what happened, where, and what to do."""

from __future__ import annotations

from typing import Any


class AmpRewriteError(Exception):
    """Base of all errors that amprewrite raises on purpose."""


class OpListError(AmpRewriteError):
    """An op list contradicts itself or names an op that does not exist."""


class PolicyError(AmpRewriteError):
    """The user's request is invalid: an unknown dtype, a pattern that matches nothing, a contradiction."""


class CaptureError(AmpRewriteError):
    """The model, or part of it, cannot be captured."""


class PlanError(AmpRewriteError):
    """There is no plan yet, or a given plan does not fit."""


class CalibrationError(AmpRewriteError):
    """Sample batches cannot be run or compared, or ranges belong to another model."""


class PassError(AmpRewriteError):
    """A pass broke its contract: a bug in amprewrite, please report it."""


class EmitError(AmpRewriteError):
    """The rewritten graph cannot be written in the form asked for."""


class AccuracyError(EmitError):
    """The requested accuracy cannot be reached. No file was written; `result` holds what it would have been."""

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class StaleWeightsError(AmpRewriteError):
    """A weight changed unseen while low copies of it were kept: results may come from its old values."""


class MissingPackageError(AmpRewriteError, ImportError):
    """A part of amprewrite needs a library that is not installed."""

    def __init__(self, part: str, package: str, extra: str) -> None:
        super().__init__(f"{part} needs {package}, which is not installed: pip install 'amprewrite[{extra}]'", name=package)


class AmpRewriteWarning(UserWarning):
    """Something runs differently than asked. The message says what and why."""


def one_line(error: object, most: int = 300) -> str:
    """The text of a foreign error, on one line of at most `most` characters."""
    return " ".join(str(error).split())[:most] or type(error).__name__
