"""Build guides, API reference and gallery as one site that can be searched: `make docs`, or

    python examples/site.py --out build/site [--gallery build/gallery]

Needs mkdocs with its material theme and mkdocstrings (`pip install '.[docs]'`); `mkdocs.yml` has the settings. Pages keep the places that
they have in the repository, so that their links hold there and here. The site needs no network. `python -m http.server -d build/site`
serves it; without a server all but the search works.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import amprewrite

ROOT = Path(__file__).resolve().parents[1]
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
"""What stands on the page of the API, in this order; public names that are in no group come last."""
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
PAGES = ("README.md", "LICENSE", "examples/first_plan.ipynb", "examples/guides/*.md", "examples/benchmarks/README.md", "examples/images/*")
"""What is copied into the site, with its place."""


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


def place_of(name: str) -> str:
    """Where the source of a public name is, for the generator, which reads it and imports nothing."""
    return f"{ELSEWHERE[name][0]}.{name}" if name in ELSEWHERE else f"{documented(name).__module__}.{documented(name).__qualname__}"


def api_page() -> Iterator[str]:
    """The lines of the page of the API."""
    yield f"# API reference\n\nVersion {amprewrite.__version__}. Every public name; errors derive from `AmpRewriteError`.\n"
    for title, group in groups().items():
        yield f"\n## {title}\n"
        for name in group:
            needs = ELSEWHERE.get(name, ("", ""))[1]
            yield f"\n::: {place_of(name)}\n    options:\n      heading_level: 3\n"
            yield f"\nNeeds `{needs}`.\n" if needs else ""


def gather(source: Path, gallery: Path | None) -> None:
    """Copy the pages to `source`, and write that of the API beside them."""
    for pattern in PAGES:
        for path in ROOT.glob(pattern):
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    (source / "api.md").write_text("".join(api_page()))
    if gallery is None:
        (source / "gallery").mkdir()
        (source / "gallery" / "index.html").write_text("<p>Built without the gallery: <code>make docs</code> builds both.</p>")
    else:
        shutil.copytree(gallery, source / "gallery")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="build/site", help="folder for index.html")
    parser.add_argument("--gallery", type=Path, help="folder that examples/gallery.py wrote, to be part of the site")
    asked = parser.parse_args()
    if any(find_spec(package) is None for package in ("mkdocs", "material", "mkdocstrings")):
        print("the site needs mkdocs, its material theme and mkdocstrings: pip install '.[docs]'", file=sys.stderr)
        raise SystemExit(2)
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    logging.basicConfig(format="%(levelname)s: %(message)s")  # mkdocs says through it which link leads nowhere
    with tempfile.TemporaryDirectory() as folder:
        gather(Path(folder), asked.gallery)
        build(load_config(str(ROOT / "mkdocs.yml"), docs_dir=folder, site_dir=str(Path(asked.out).absolute()), strict=True))
    pages = sum(1 for _ in Path(asked.out).rglob("*.html"))
    print(f"{asked.out}/index.html: {pages} pages")


if __name__ == "__main__":
    main()
