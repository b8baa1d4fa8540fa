"""`import amprewrite` costs nothing that is not used, and its names are what they are called whatever was imported before."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import amprewrite

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch._dynamo", "torch._inductor", "scipy", "networkx", "sympy", "rich", "onnx", "onnx_ir", "transformers")


@cache
def said(code: str) -> str:
    """What `code` prints in a fresh process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy_that_torch_does_not_load():
    count = f"print(sorted(name for name in {HEAVY} if name in sys.modules))"
    assert said(f"import sys, torch, amprewrite; {count}") == said(f"import sys, torch; {count}")


@pytest.mark.parametrize("name", ["rewrite", "CastPlan", "Calibration"])
def test_names_of_the_face_load_nothing_heavy_before_they_are_called(name):
    """A script's `--help` does not wait for Dynamo: the first rewrite imports it."""
    count = f"print(sorted(name for name in {HEAVY} if name in sys.modules))"
    assert said(f"import sys, torch; from amprewrite import {name}; {count}") == said(f"import sys, torch; {count}")


def test_import_changes_no_warning_filter():
    code = "import warnings, torch; before = list(warnings.filters); import amprewrite; print(before == warnings.filters)"
    assert said(code) == "True"


def test_the_table_of_names_is_what_type_checkers_see():
    tree = ast.parse((ROOT / "amprewrite" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "_TYPE_CHECKING"]
    seen = {node.module: tuple(alias.name for alias in node.names) for node in block.body if isinstance(node, ast.ImportFrom)}
    assert seen == amprewrite._HOMES
    assert set(amprewrite._HOME) == set(amprewrite.__all__) <= set(dir(amprewrite))


def test_no_public_name_is_that_of_a_package():
    """Importing the package would replace the function."""
    packages = {path.name for path in (ROOT / "amprewrite").iterdir() if path.is_dir()} | {"passes"}
    assert not packages & set(amprewrite.__all__)


def test_packages_are_there_by_name():
    assert said("import amprewrite; print(bool(amprewrite.tables.__doc__), amprewrite.passes.NORMALISE[0].name)").startswith("True ")
    with pytest.raises(AttributeError, match="has no attribute 'nothing_here'"):
        _ = amprewrite.nothing_here  # type: ignore[attr-defined]


def test_rewriting_a_file_loads_nothing_that_runs_models():
    """`rewrite_onnx` has a door of its own: it neither captures nor runs a PyTorch model."""
    pytest.importorskip("onnx_ir", reason="the onnx extra is not installed")
    loaded = "print([name for name in sys.modules if name.startswith('amprewrite.runtime')])"
    tried = "with contextlib.suppress(amprewrite.CaptureError):\n    amprewrite.rewrite_onnx('none.onnx')"
    assert said(f"import contextlib, sys, amprewrite\n{tried}\n{loaded}") == "[]"
