"""Write the API reference, one HTML page made from docstrings: `make api`, or

    python examples/api_reference.py --out build/api

Needs pdoc (`pip install '.[docs]'`). The page has every public name of amprewrite, what a rewritten model has beyond its own class, and the
integrations whose libraries are installed. It needs no network.
"""

from __future__ import annotations

import argparse
import sys
import types
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import amprewrite

GROUPS: dict[str, tuple[str, ...]] = {
    "Rewriting": ("rewrite", "plan", "restore", "compile_backend", "compiled", "gather_low", "LowGathers"),
    "The rewritten model": ("Rewritten",),
    "Plans": ("CastPlan", "RegionPlan", "NodePlan", "Cast", "Skipped", "OpLists"),
    "Accuracy": ("verify", "debug", "calibrate", "Calibration", "sensitivity", "search"),
    "Loss scales": ("DynamicLossScale", "StaticLossScale", "NoLossScale", "LossScale", "TrainingLog"),
    "ONNX": ("rewrite_onnx", "export_onnx"),
    "Integrations": ("AmpRewriteCallback", "AmpRewriteConfig", "prepare", "AmpRewritePrecision"),
    "Errors and warnings": (
        "AmpRewriteError", "AccuracyError", "CalibrationError", "CaptureError", "EmitError", "LossScaleError", "MissingPackageError",
        "OpListError", "PassError", "PlanError", "PolicyError", "StaleWeightsError", "AmpRewriteWarning",
    ),
}  # fmt: skip
"""What stands on the page, in this order; public names that are in no group come last."""
ELSEWHERE = {
    "Rewritten": ("amprewrite.api.module", ""),
    "search": ("amprewrite.accuracy.frontier", ""),
    "rewrite_onnx": ("amprewrite.api.onnx.convert", "onnxruntime"),
    "export_onnx": ("amprewrite.api.onnx.convert", "onnxruntime"),
    "AmpRewriteCallback": ("amprewrite.integrations.transformers", "accelerate"),
    "AmpRewriteConfig": ("amprewrite.integrations.transformers", "accelerate"),
    "prepare": ("amprewrite.integrations.accelerate", "accelerate"),
    "AmpRewritePrecision": ("amprewrite.integrations.lightning", "lightning"),
}
"""Names that are not those of `amprewrite` itself: their module, and the package that it needs."""


def groups() -> dict[str, tuple[str, ...]]:
    """The groups of the page; each public name is in one."""
    grouped = {name for group in GROUPS.values() for name in group}
    rest = tuple(name for name in amprewrite.__all__ if name not in grouped)
    return GROUPS | ({"More": rest} if rest else {})


def missing(name: str) -> str:
    """The package that `name` needs and that is not installed; "" if nothing is missing."""
    package = ELSEWHERE.get(name, ("", ""))[1]
    return package if package and find_spec(package) is None else ""


def documented(name: str) -> Any:
    """The function or class called `name` on the page."""
    return getattr(import_module(ELSEWHERE[name][0]) if name in ELSEWHERE else amprewrite, name)


def page() -> types.ModuleType:
    """A module that holds what the page shows, with an index for a docstring."""
    module = types.ModuleType("amprewrite")
    names = [name for group in groups().values() for name in group if not missing(name)]
    for name in names:
        setattr(module, name, documented(name))
    module.__all__ = names  # type: ignore[attr-defined]
    lines = [f"Version {amprewrite.__version__}. Errors derive from `AmpRewriteError`.", ""]
    for title, group in groups().items():
        shown = (f"`{name}` (needs {missing(name)})" if missing(name) else f"[`{name}`](#{name})" for name in group)
        lines.append(f"* **{title}**: {', '.join(shown)}")
    module.__doc__ = "\n".join(lines)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="build/api", help="folder for index.html")
    folder = Path(parser.parse_args().out)
    if find_spec("pdoc") is None:
        print("the API reference needs pdoc: pip install '.[docs]'", file=sys.stderr)
        raise SystemExit(2)
    import pdoc.doc
    import pdoc.render

    pdoc.render.configure(docformat="google", show_source=False)
    module = pdoc.doc.Module(page())
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "index.html"
    target.write_text(pdoc.render.html_module(module, all_modules={"amprewrite": module}))
    print(f"{target}: {len(module.members)} names")


if __name__ == "__main__":
    main()
