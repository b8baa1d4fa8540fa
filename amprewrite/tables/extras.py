"""Extras: parts that a copy of amprewrite can do without. Delete an extra's files and its line in EXTRAS, and all other parts work.

Passes that only save time are extras too. Their line is in `passes/__init__.py`: `FusePatterns`, `SplitLosses`, `KeepConstants`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from amprewrite.tables.errors import PolicyError


@dataclass(frozen=True)
class Extra:
    """A part that can be removed."""

    home: str
    """The module with its functions."""
    files: tuple[str, ...]
    """Its files and folders."""
    public: tuple[str, ...] = ()
    """Names of `amprewrite.__all__` that `home` defines."""


_ACCURACY = tuple(f"amprewrite/accuracy/{name}.py" for name in ("sensitivity", "frontier", "error_cut"))
_BACKEND = ("amprewrite/api/compile_backend.py", "amprewrite/runtime/torch_compile.py")
EXTRAS = {
    "exact rounding": Extra("amprewrite.runtime.compiler.exact.backend", ("amprewrite/runtime/compiler/exact",)),
    "compile backend": Extra("amprewrite.api.compile_backend", _BACKEND, ("compile_backend", "compiled")),
    "accuracy search": Extra("amprewrite.accuracy.frontier", _ACCURACY, ("sensitivity",)),
    "integrations": Extra("amprewrite.integrations", ("amprewrite/integrations",)),
}


def load_extra(name: str, option: str) -> ModuleType:
    """The module of an extra. PolicyError for the `option` that needs it if the extra was removed."""
    if name not in EXTRAS:
        raise PolicyError(f"{option} needs the part {name!r}, which this copy of amprewrite leaves out: install amprewrite whole")
    return import_module(EXTRAS[name].home)
