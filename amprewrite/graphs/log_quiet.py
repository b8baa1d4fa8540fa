"""Silence torch's logging, for this thread and for a while. Levels, handlers and records of other threads are not changed.

An op that is only tried may refuse, and the caller reports it where it matters. torch logs each refusal with its traceback.
"""

from __future__ import annotations

import logging
import threading
from typing import Self

FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")


class Quiet(logging.Filter):
    """A filter that drops the records of this thread from some loggers while it is entered."""

    def __init__(self, *loggers: logging.Logger) -> None:
        super().__init__()
        self.loggers, self.thread = loggers or (FAKE_TENSORS,), threading.get_ident()

    def __enter__(self) -> Self:
        for logger in self.loggers:
            logger.filters.insert(0, self)  # innermost first: a nested call hears its own
        return self

    def __exit__(self, *_: object) -> None:
        for logger in self.loggers:
            logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        return threading.get_ident() != self.thread


__all__ = ["FAKE_TENSORS", "Quiet"]
