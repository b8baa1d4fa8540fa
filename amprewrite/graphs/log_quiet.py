"""Silence torch's logging in one thread for a while, and leave calls of a model's loggers out of captured graphs.

The levels and handlers of loggers stay unchanged, and so do the records of other threads. When the library only tries an op, a failure is
expected, and torch would log it with a traceback. If a failure matters, the caller reports it.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

from torch import nn

FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")
"""The logger to which torch reports ops that fail on fake tensors."""


class Quiet(logging.Filter):
    """Context manager that drops log records that the current thread sends to `loggers` (default: torch's logger for fake tensors)."""

    def __init__(self, *loggers: logging.Logger) -> None:
        super().__init__()
        self.loggers, self.thread = loggers or (FAKE_TENSORS,), threading.get_ident()

    def __enter__(self) -> Self:
        for logger in self.loggers:
            logger.filters.insert(0, self)  # insert this filter first: an outer block's filter would drop records before this one sees them
        return self

    def __exit__(self, *_: object) -> None:
        for logger in self.loggers:
            logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        return threading.get_ident() != self.thread


class Unlogged(set[Any]):
    """The set of functions whose calls Dynamo leaves out of graphs: `others`, and every method of any logging.Logger.

    When Dynamo looks up a logger's method, `note` is called with a sentence that names the logger.
    """

    def __init__(self, others: Iterable[Any] = (), note: Callable[[str], None] | None = None) -> None:
        super().__init__(others)
        self.note = note

    def __contains__(self, function: object) -> bool:
        logger = getattr(function, "__self__", None)
        if not isinstance(logger, logging.Logger):
            return super().__contains__(function)
        if self.note is not None:
            self.note(f"calls of the logger {logger.name!r} are not made where the model is captured")
        return True


@functools.cache
def has_logger(module: str) -> bool:
    """True if the Python module named `module` has a logger among its globals, so that its code may write to a log."""
    return bool(_loggers(module))


def loggers_of(model: nn.Module) -> set[logging.Logger]:
    """Return the loggers that a model's code may write to: globals of the Python modules that define the classes of its `nn.Module`s."""
    return {logger for module in model.modules() for cls in type(module).__mro__ for logger in _loggers(cls.__module__)}


def _loggers(module: str) -> list[logging.Logger]:
    """Return the loggers among the globals of an imported Python module, given its name."""
    found = sys.modules.get(module)
    return [] if found is None else [value for value in list(vars(found).values()) if isinstance(value, logging.Logger)]
