"""What is built is what is imported: the wheel, the bare checkout, and nobody imports `passes` by its bare name."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PEEK = "import amprewrite, amprewrite.passes, amprewrite.graphs; print(amprewrite.__file__); print(amprewrite.passes.__file__)"


SOURCE = tuple(path.name for path in ROOT.iterdir() if path.name not in {".git", ".venv", "build", "dist"} and path.suffix != ".egg-info")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, to build from without leaving anything in it."""
    pytest.importorskip("setuptools", "77")
    source = tmp_path_factory.mktemp("source")
    for name in SOURCE:
        here = ROOT / name
        if here.is_dir():
            shutil.copytree(here, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache", "*.egg-info"))
        else:
            shutil.copy(here, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without network."""
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
        "-w",
        str(out),
        ".",
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "absent from the `packages` configuration" not in done.stdout + done.stderr
    (built,) = out.glob("amprewrite-*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    out = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("amprewrite-*.tar.gz")
    with tarfile.open(built) as archive:
        archive.extractall(out, filter="data")
    (unpacked,) = (path for path in out.iterdir() if path.is_dir())
    return unpacked


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
    assert "amprewrite/py.typed" in held and "amprewrite/passes/paint/paint_lists.py" in held
    assert not [name for name in held if name.startswith(("passes/", "tests/"))]


def test_the_wheel_holds_the_licence_and_the_pages_of_the_report(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    assert [name for name in held if name.endswith("licenses/LICENSE")]
    assert {f"amprewrite/report/html/assets/{path.name}" for path in (ROOT / "amprewrite/report/html/assets").iterdir()} <= held


def test_the_source_distribution_holds_what_its_tests_and_make_need(sdist):
    for folder in ("amprewrite", "passes", "tests", "examples"):
        wanted = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc"}
        assert not [path for path in wanted if not (sdist / path).is_file()]
    for name in ("LICENSE", "README.md", "Makefile", "constraints.txt", "constraints-lowest.txt", "pyproject.toml", ".ci/run"):
        assert (sdist / name).is_file(), name
    assert not list(sdist.rglob("__pycache__"))


@pytest.mark.long
def test_the_source_distribution_passes_its_own_tests(sdist):
    """Those that are quick: they import the helpers, read golden files and run the passes."""
    tests = ["tests/planner/test_min_cut.py", "tests/passes/test_paint_lists.py", "tests/ir/test_plan.py::test_print_of_several_graphs"]
    environment = {**os.environ, "PYTHONPATH": str(sdist), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=sdist, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_licence_is_the_one_that_the_project_names():
    assert SETTINGS["project"]["license"] == "MIT" and SETTINGS["project"]["license-files"] == ["LICENSE"]
    assert (ROOT / "LICENSE").read_text().startswith("MIT License\n\nCopyright (c) 2026 the amprewrite authors\n")


def test_the_lowest_constraints_are_the_floors():
    project = SETTINGS["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["onnx"]]
    floors = dict(line.split(">=") for line in asked)
    lines = [line for line in (ROOT / "constraints-lowest.txt").read_text().splitlines() if "==" in line and not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert pinned.keys() == floors.keys()
    assert all(f"{pinned[name]}.".startswith(f"{floor}.") for name, floor in floors.items()), (pinned, floors)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_finds_a_python_by_any_name(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("make", "sh", "awk", "test", "grep"):
        found = shutil.which(name)
        if found:
            (tmp_path / "bin" / name).symlink_to(found)
    question = ["make", "-n", "--no-print-directory", "-f", str(ROOT / "Makefile"), "-C", str(tmp_path), "demo", "VENV=env"]
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(question, env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True)
    assert "|| python" not in done.stdout
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    done = subprocess.run(question, env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True)
    assert "|| python3 -m venv env" in done.stdout, done.stdout + done.stderr


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
    names = {line.partition(">=")[0].partition("[")[0].strip().lower().replace("_", "-") for line in asked}
    assert names <= pinned


def test_the_version_is_one():
    import amprewrite

    assert amprewrite.__version__ == SETTINGS["project"]["version"]
