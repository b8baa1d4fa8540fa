"""Extras: parts of amprewrite that can be removed. Delete an extra's files, its line in EXTRAS, and the lines of pyproject.toml that end in
"# extra:" and its name. All other parts still work.

Passes that only save time are extras as well: `FusePatterns`, `SplitLosses`, `KeepConstants` and `GroupWeights`, each with a line in
`passes/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from amprewrite.tables.errors import PolicyError


@dataclass(frozen=True)
class Extra:
    """A part of amprewrite that can be removed."""

    home: str
    """Name of the module that the rest of amprewrite imports for this part."""
    files: tuple[str, ...]
    """Files and folders of this part, as paths from the root of the repository."""
    public: tuple[str, ...] = ()
    """The names in `amprewrite.__all__` that `home` defines."""


_BACKEND = ("amprewrite/api/compile_backend.py", "amprewrite/runtime/torch_compile.py")
_DRAWINGS = tuple(f"amprewrite/report/{name}" for name in ("drawings.py", "html", "pictures"))
_ONNX = ("amprewrite/api/onnx", "amprewrite/graphs/onnx", "amprewrite/tables/ops/onnx_names.py")
_MEASURED = ("amprewrite/graphs/fx/run/measure.py",)
EXTRAS: dict[str, Extra] = {
    "exact rounding": Extra("amprewrite.runtime.compiler.exact.backend", ("amprewrite/runtime/compiler/exact",)),
    "compile backend": Extra("amprewrite.api.compile_backend", _BACKEND, ("compile_backend", "compiled")),
    "accuracy": Extra("amprewrite.accuracy.door", ("amprewrite/accuracy",), ("calibrate", "debug", "sensitivity", "verify")),
    "drawings": Extra("amprewrite.report.drawings", _DRAWINGS),
    "command line": Extra("amprewrite.api.cli.main", ("amprewrite/api/cli", "amprewrite/__main__.py")),
    "training log": Extra("amprewrite.api.training_log", ("amprewrite/api/training_log.py",), ("TrainingLog",)),
    "measured prices": Extra("amprewrite.graphs.fx.run.measure", _MEASURED),
    "low gathers": Extra("amprewrite.api.gather_low", ("amprewrite/api/gather_low.py",), ("LowGathers", "gather_low")),
    "ONNX": Extra("amprewrite.api.onnx.door", _ONNX, ("rewrite_onnx",)),
    "integrations": Extra("amprewrite.integrations", ("amprewrite/integrations",)),
}


def load_extra(name: str, option: str) -> ModuleType:
    """Import and return the module of the extra `name`. Raises PolicyError, with the `option` that needs it, if it is not installed."""
    if name not in EXTRAS:
        raise PolicyError(f"{option} needs the part {name!r}, which this copy of amprewrite leaves out: install amprewrite whole")
    return import_module(EXTRAS[name].home)
