"""Leave calls of loggers out of captured graphs."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


class Unlogged(set[Any]):
    """Replaces Dynamo's set of functions to leave out of graphs. It also contains every method of a logging.Logger.

    If a logger's method is looked up, `note` is called with the name of the logger.
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
    """Return the loggers that the code of a model may write to."""
    return {logger for module in model.modules() for cls in type(module).__mro__ for logger in _loggers(cls.__module__)}


def _loggers(module: str) -> list[logging.Logger]:
    """Return the loggers among the globals of an imported Python module, given its name."""
    found = sys.modules.get(module)
    return [] if found is None else [value for value in list(vars(found).values()) if isinstance(value, logging.Logger)]
