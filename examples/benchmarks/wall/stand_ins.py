"""Names that stand for torchvision's classes where it is not installed: timm imports them, and no model needs them."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn


class Named(type):
    """A class that stands for one of torchvision's; its attributes are their own names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of torchvision as one whose classes stand for the real ones."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        def named(name: str) -> Named:
            if name.startswith("__"):
                raise AttributeError(name)
            return Named(name, (nn.Module,), {})

        module.__dict__["__getattr__"] = named


def install() -> None:
    """Let torchvision be imported from now on where it is not installed."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(StandIns())


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """Let torchvision be imported within the context where it is not installed; nothing of it is found after."""
    finder = StandIns()
    missing = importlib.util.find_spec("torchvision") is None
    if missing:
        sys.meta_path.append(finder)
    try:
        yield
    finally:
        if missing:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
