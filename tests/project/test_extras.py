"""Each extra is taken out of a copy of the library, and the rest works."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from test_house import MODULES, parsed
from test_layout import imported

import amprewrite
from amprewrite.tables import extras
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.extras import EXTRAS, load_extra

ROOT = Path(__file__).resolve().parents[2]
PASSES = {
    "FusePatterns": "normalise/fuse_patterns.py", "SplitLosses": "lower/split_losses.py", "KeepConstants": "lower/keep_constants.py",
    "GroupWeights": "lower/group_weights.py",
}  # fmt: skip
USE = """
import torch, amprewrite
assert amprewrite.__file__.startswith({copy!r})
assert all(getattr(amprewrite, name) is not None for name in amprewrite.__all__)
for name in {gone}:
    try:
        getattr(amprewrite, name)
    except AttributeError as error:
        assert "leaves out" in str(error), error
    else:
        raise AssertionError(name)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 4))
x, target = torch.randn(8, 16), torch.randint(4, (8,))
print(amprewrite.plan(model, (x,), dtype="bf16"))
amp = amprewrite.rewrite(model, dtype="fp16")
optimizer = torch.optim.SGD(amp.parameters(), lr=0.1)
before = model[0].weight.detach().clone()
for _ in range(2):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(amp(x), target).backward()
    optimizer.step()
assert not torch.equal(before, model[0].weight) and model[0].weight.isfinite().all()
"""


def copied(to: Path) -> None:
    for name in ("amprewrite", "passes"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", to)


def without(copy: Path, files: tuple[str, ...], registry: str, lines: str) -> None:
    """Delete files, and the lines of a registry that match."""
    for name in files:
        path = copy / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    text = (copy / registry).read_text()
    shorter = re.sub(rf"^.*{lines}.*\n", "", text, flags=re.M)
    assert shorter != text
    (copy / registry).write_text(shorter)


def without_extra(copy: Path, name: str) -> None:
    """Delete an extra as the README says."""
    without(copy, EXTRAS[name].files, "amprewrite/tables/extras.py", f'^    "{name}": ')
    settings = (copy / "pyproject.toml").read_text()
    (copy / "pyproject.toml").write_text(re.sub(rf"^.*# extra: {name}\b.*\n", "", settings, flags=re.M))
    assert unfounded(copy) == []


def unfounded(copy: Path) -> list[str]:
    """The packages and entry points of pyproject.toml that the copy has no files for."""
    settings = tomllib.loads((copy / "pyproject.toml").read_text())
    points = [settings["project"]["scripts"], *settings["project"]["entry-points"].values()]
    modules = [*settings["tool"]["setuptools"]["packages"], *(place.partition(":")[0] for group in points for place in group.values())]
    paths = {module: copy / module.replace("amprewrite.passes", "passes").replace(".", "/") for module in modules}
    return [module for module, path in paths.items() if not path.is_dir() and not path.with_suffix(".py").is_file()]


def use(copy: Path, *gone: str) -> str:
    """What the library prints in the copy, which lacks the public names `gone`."""
    code = USE.format(copy=str(copy), gone=gone)
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", EXTRAS)
def test_the_rest_works_without_an_extra(name: str, tmp_path: Path) -> None:
    copied(tmp_path)
    without_extra(tmp_path, name)
    assert "linear" in use(tmp_path, *EXTRAS[name].public)


@pytest.mark.long
def test_the_core_works_without_all_extras(tmp_path: Path) -> None:
    copied(tmp_path)
    for name in EXTRAS:
        without_extra(tmp_path, name)
    for name, file in PASSES.items():
        without(tmp_path, (f"passes/{file}",), "passes/__init__.py", name)
    assert "linear" in use(tmp_path, *(name for extra in EXTRAS.values() for name in extra.public))


@pytest.mark.long
@pytest.mark.parametrize("name", PASSES)
def test_the_rest_works_without_a_pass_that_saves_time(name: str, tmp_path: Path) -> None:
    copied(tmp_path)
    without(tmp_path, (f"passes/{PASSES[name]}",), "passes/__init__.py", name)
    assert "linear" in use(tmp_path)


def running(tree: ast.AST) -> Iterator[ast.stmt]:
    """The import statements of a file, except those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from running(node)


@cache
def imports() -> dict[str, set[str]]:
    """The modules that each module imports when it runs."""
    return {module: {target for node in running(parsed(MODULES[module].read_text())) for target in imported(node)} for module in MODULES}


@pytest.mark.parametrize("name", EXTRAS)
def test_the_rest_imports_an_extra_through_the_table_alone(name: str) -> None:
    files = [ROOT / file for file in EXTRAS[name].files]
    own = {module for module, path in MODULES.items() if any(path.is_relative_to(file) for file in files)}
    assert own
    assert [f"{module} -> {target}" for module, targets in imports().items() if module not in own for target in targets & own] == []


def test_the_files_of_every_extra_are_there() -> None:
    assert [file for extra in EXTRAS.values() for file in extra.files if not (ROOT / file).exists()] == []
    assert {name for extra in EXTRAS.values() for name in extra.public} <= set(amprewrite.__all__)


def test_an_option_says_which_extra_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "EXTRAS", {})
    with pytest.raises(PolicyError, match="tolerance= needs the part 'accuracy', which this copy of amprewrite leaves out"):
        load_extra("accuracy", "tolerance=")


def test_a_door_says_which_extra_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    amp = amprewrite.rewrite(model, dtype="bf16")
    amp(x)
    monkeypatch.setattr(extras, "EXTRAS", {})
    doors: dict[str, Callable[[], object]] = {
        "export_onnx needs the part 'ONNX'": lambda: amp.export_onnx("model.onnx", (x,)),
        "tolerance= needs the part 'accuracy'": lambda: amprewrite.rewrite(model, tolerance=1e-2, example_inputs=(x,)),
        "to_html needs the part 'drawings'": lambda: amp.plan.to_html("plan.html"),
        "backend='inductor-exact' needs the part 'exact rounding'": lambda: amprewrite.rewrite(model, backend="inductor-exact"),
    }
    for text, enter in doors.items():
        with pytest.raises(PolicyError, match=text):
            enter()


def test_the_readme_names_every_extra() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in EXTRAS if f"*{name}*" not in text] == []
