"""Handle code that Dynamo fails to convert: run it as written, exactly once, and report the failure to the model that it belongs to.

1. During a call Dynamo is set to run the original code of a frame that it cannot convert. A frame is one function, or the rest of a
   function after a graph break. So nothing that ran before the failure runs again.
2. Dynamo logs each such failure. A filter on its logger reports the failures of this thread, and keeps them from being printed.
3. An error of the backend is handled differently: it is wrapped, so that Dynamo passes it on, and it reaches the caller unchanged.
"""

from __future__ import annotations

import inspect
import logging
import re
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from amprewrite.graphs.log_quiet import FAKE_TENSORS, Quiet
from amprewrite.runtime.compiler.plain_words import plain_reason
from amprewrite.torch_internals.dynamo import SkipFrame, convert_again

_LOG = logging.getLogger("torch._dynamo.convert_frame")
_PASS = (torch._dynamo.exc.RestartAnalysis, SkipFrame, *torch._dynamo.exc.exceptions_allowed_to_be_fallback)
"""Errors that a backend raises to control Dynamo. They are not wrapped."""
_RESUMED = re.compile(r"^torch_dynamo_resume_in_|_at_\d+$")
"""The prefix and suffix that Dynamo adds to the name of a function that continues after a graph break."""
_EXPLANATION = re.compile(r"^  Explanation: (.*)$", re.MULTILINE)
_GIVEN_UP: weakref.WeakValueDictionary[int, types.CodeType] = weakref.WeakValueDictionary()
"""Code objects that Dynamo gave up in this process, by id. Dynamo marks the code object, which affects every model that runs it."""


@dataclass(frozen=True)
class Failure:
    """One frame that Dynamo could not convert."""

    why: str
    """The reason, in plain words."""
    place: str
    """The line that Dynamo could not read, as "file:line in function"; "" if it is unknown."""
    of_op: bool = False
    """True if an op refused its operands when Dynamo ran it on fake tensors (tensors without values)."""


def try_all_again() -> None:
    """Make Dynamo try again to convert all code that it failed to convert in this process. Call this before a model is captured anew."""
    for found in _GIVEN_UP.valuerefs():
        code = found()
        if code is not None:
            convert_again(code)
    _GIVEN_UP.clear()


class Listener(Quiet):
    """Context manager that calls `tell(failure)` for each frame that Dynamo fails to convert in this thread, and hides Dynamo's message."""

    def __init__(self, tell: Callable[[Failure], None]) -> None:
        super().__init__(FAKE_TENSORS, _LOG)
        self.tell = tell

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != _LOG.name or threading.get_ident() != self.thread:
            return super().filter(record)
        error = record.exc_info[1] if record.exc_info else None
        if error is None or record.levelno != logging.WARNING:
            return True
        code = _code(error)
        if code is not None:
            _GIVEN_UP[id(code)] = code
        self.tell(failure_of(error))
        return False


def is_capture_error(error: BaseException) -> bool:
    """True if `error` means that Dynamo failed to capture code: its class is Dynamo's, or Dynamo attached the failing line to it."""
    own = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)
    return isinstance(error, own) or hasattr(error, "innermost_user_frame_summary")


def failure_of(error: BaseException) -> Failure:
    """Return a `Failure` with the place and the reason of Dynamo's `error`, in plain words and without the names of Dynamo's exceptions."""
    line = getattr(error, "innermost_user_frame_summary", None)
    place = f"{line.filename}:{line.lineno} in {_RESUMED.sub('', line.name)}" if line is not None else ""
    said, _, more = str(error).partition("\nfrom user code")[0].strip().partition("\n")
    name, cause = type(error).__name__, error.__cause__
    if isinstance(error, torch._dynamo.exc.InternalTorchDynamoError) and cause is not None:  # report the error that this error wraps
        name = type(cause).__name__
        said = said.removeprefix(f"{name}:")
    explained = _EXPLANATION.search(more)
    why = f"{said.strip()}: {explained[1].strip()}" if explained else said.strip()
    known = isinstance(error, torch._dynamo.exc.TorchDynamoException)
    if not (known and why):
        why = f"PyTorch's capture fails on it{': ' * bool(why)}{why} ({name})"
    return Failure(plain_reason(why), place, isinstance(error, torch._dynamo.exc.TorchRuntimeError))


def _code(error: BaseException) -> types.CodeType | None:
    """Return the code object that Dynamo could not convert when it raised `error`; None if unknown.

    The first function in the traceback is the function of Dynamo that caught `error`. Its local variable `frame` refers to the code object.
    """
    caught = error.__traceback__
    frame = caught.tb_frame.f_locals.get("frame") if caught is not None else None
    code = getattr(frame, "f_code", None)
    return code if isinstance(code, types.CodeType) else None


class Unseen(BaseException):
    """Carries an error of the backend or of this package through Dynamo. Derives from BaseException: Dynamo handles any Exception."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`, which Dynamo calls, so that Dynamo passes its errors on (as `Unseen`) instead of handling them."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except _PASS:
            raise
        except Exception as error:
            raise Unseen(error) from error

    return call


def under_way(function: Callable[..., Any]) -> bool:
    """True if a call of `function` is running now in this thread. Also true if `function` has no code object to look for.

    A stack frame counts as a call of `function` if its file and its function name are those of `function`.
    """
    code, frame = getattr(function, "__code__", None), inspect.currentframe()
    while code is not None and frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) == (code.co_filename, code.co_name):
            return True
        frame = frame.f_back
    return code is None


def has_begun(error: BaseException, function: Callable[..., Any]) -> bool:
    """True if `function` was running when `error` was raised, so that its code may have had side effects.

    A frame in the traceback of `error` counts as a call of `function` if its file and its function name are those of `function`. If
    `function` has no code object, the answer is True.
    """
    code = getattr(function, "__code__", None)
    step = error.__traceback__
    while step is not None:
        ran = step.tb_frame.f_code
        if code is None or (ran.co_filename, ran.co_name) == (code.co_filename, code.co_name):
            return True
        step = step.tb_next
    return False
