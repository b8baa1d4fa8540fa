"""What is built is what is imported: the wheel, the bare checkout, and nobody imports `passes` by its bare name."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PEEK = "import amprewrite, amprewrite.passes, amprewrite.frontends; print(amprewrite.__file__); print(amprewrite.passes.__file__)"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what is tracked, without network."""
    pytest.importorskip("setuptools", "77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "amprewrite", "passes"):
        here = ROOT / name
        if here.is_dir():
            shutil.copytree(here, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(here, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        str(out),
        ".",
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("amprewrite-*.whl")
    return built


def peek(folder: Path, cwd: Path) -> list[Path]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PEEK], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [Path(line) for line in done.stdout.split("\n") if line]


def test_the_wheel_holds_every_module(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "amprewrite").rglob("*.py")}
    expected |= {f"amprewrite/passes/{path.relative_to(ROOT / 'passes')}" for path in (ROOT / "passes").rglob("*.py")}
    assert expected <= held, "list every sub-package in [tool.setuptools] packages"
    assert "amprewrite/py.typed" in held and "amprewrite/passes/paint.py" in held
    assert not [name for name in held if name.startswith(("passes/", "tests/"))]


def test_the_wheel_is_imported_from_elsewhere(wheel, tmp_path):
    installed = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(installed)
    assert peek(installed, tmp_path) == [installed / "amprewrite/__init__.py", installed / "amprewrite/passes/__init__.py"]


def test_a_bare_checkout_is_imported(tmp_path):
    for name in ("amprewrite", "passes"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert peek(tmp_path, tmp_path) == [tmp_path / "amprewrite/__init__.py", tmp_path / "passes/__init__.py"]


def test_nobody_imports_passes_by_its_bare_name():
    for folder in ("amprewrite", "passes", "tests", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    names = [node.module or ""]
                assert not [name for name in names if name.partition(".")[0] == "passes"], f"{path}:{getattr(node, 'lineno', 0)}"


def test_constraints_pin_everything_that_pyproject_asks_for():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    project = SETTINGS["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(line for name, lines in extras.items() if name != "onnx-gpu" for line in lines)]
    names = {line.partition(">=")[0].strip().lower().replace("_", "-") for line in asked}
    assert names <= pinned


def test_the_version_is_one():
    import amprewrite

    assert amprewrite.__version__ == SETTINGS["project"]["version"]
