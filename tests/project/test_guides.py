"""What guides say of files and commands is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "examples" / "guides"


def files_named(page: str) -> set[str]:
    """Paths of Python files and folders that a page names, as the repository or the package has them."""
    return set(re.findall(r"`((?:[\w.]+/)+(?:\w+\.py)?)`", (GUIDES / page).read_text()))


def test_every_step_names_files_that_are_there():
    named = files_named("how_it_works.md")
    assert len(named) > 20
    assert {name for name in named if not any((top / name).exists() for top in (ROOT, ROOT / "amprewrite"))} == set()


@pytest.mark.parametrize("stage", ["normalise", "paint", "repaint", "plan", "apply", "lower"])
def test_every_stage_of_the_pipeline_is_told_of(stage):
    assert (ROOT / "passes" / stage).is_dir()
    assert f"passes/{stage}/" in (GUIDES / "how_it_works.md").read_text()
