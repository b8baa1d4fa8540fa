"""Each extra is taken out of a copy of the library, and the rest works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import amprewrite
from amprewrite.tables import extras
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.extras import EXTRAS, load_extra

ROOT = Path(__file__).resolve().parents[2]
PASSES = {"FusePatterns": "normalise/fuse_patterns.py", "SplitLosses": "lower/split_losses.py", "KeepConstants": "lower/keep_constants.py"}
USE = """
import torch, amprewrite
assert amprewrite.__file__.startswith({copy!r})
assert all(getattr(amprewrite, name) is not None for name in amprewrite.__all__)
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


def use(copy: Path) -> str:
    done = subprocess.run([sys.executable, "-c", USE.format(copy=str(copy))], cwd=copy, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", EXTRAS)
def test_the_rest_works_without_an_extra(name: str, tmp_path: Path) -> None:
    copied(tmp_path)
    without(tmp_path, EXTRAS[name].files, "amprewrite/tables/extras.py", f'^    "{name}": ')
    assert "linear" in use(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", PASSES)
def test_the_rest_works_without_a_pass_that_saves_time(name: str, tmp_path: Path) -> None:
    copied(tmp_path)
    without(tmp_path, (f"passes/{PASSES[name]}",), "passes/__init__.py", name)
    assert "linear" in use(tmp_path)


def test_the_files_of_every_extra_are_there() -> None:
    assert [file for extra in EXTRAS.values() for file in extra.files if not (ROOT / file).exists()] == []
    assert {name for extra in EXTRAS.values() for name in extra.public} <= set(amprewrite.__all__)


def test_an_option_says_which_extra_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "EXTRAS", {})
    with pytest.raises(PolicyError, match="tolerance= needs the part 'accuracy search', which this copy of amprewrite leaves out"):
        load_extra("accuracy search", "tolerance=")


def test_the_readme_names_every_extra() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in EXTRAS if f"*{name}*" not in text] == []
