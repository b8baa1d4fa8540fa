"""Silence torch's logging in one thread for a while. Levels, handlers and records of other threads are not changed.

When the library only tries an op, a failure is expected, and the caller reports it where it matters. torch would log each failure with its
traceback.
"""

from __future__ import annotations

import logging
import threading
from typing import Self

FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")
"""The logger to which torch reports ops that fail on fake tensors."""


class Quiet(logging.Filter):
    """A context manager that drops the log records of the thread that made it, by default from the logger of fake tensors."""

    def __init__(self, *loggers: logging.Logger) -> None:
        super().__init__()
        self.loggers, self.thread = loggers or (FAKE_TENSORS,), threading.get_ident()

    def __enter__(self) -> Self:
        for logger in self.loggers:
            logger.filters.insert(0, self)  # in front, so that an inner block that reads records sees them before an outer one drops them
        return self

    def __exit__(self, *_: object) -> None:
        for logger in self.loggers:
            logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        return threading.get_ident() != self.thread
