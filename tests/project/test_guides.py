"""What guides say of files and commands is so."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import amprewrite
from amprewrite.ir.evidence import ranges
from amprewrite.ir.plans.versions import MIGRATIONS, SCHEMA
from amprewrite.tables.version import VERSION

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


# -- the site, and the API reference --------------------------------------------------------------------------------------


def site() -> ModuleType:
    """The script that builds the site, as a module."""
    spec = importlib.util.spec_from_file_location("site_script", ROOT / "examples" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_shows_every_public_name():
    script = site()
    page = "".join(script.api_page())
    names = [name for group in script.groups().values() for name in group]
    assert set(amprewrite.__all__) <= set(names) and len(names) == len(set(names))
    assert [name for name in names if not re.search(rf"^::: [\w.]+\.{name}$", page, re.M)] == []


def test_the_site_leads_to_every_guide():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in GUIDES.glob("*.md") if f"- examples/guides/{page.name}\n" not in settings] == []


FUNCTIONS = [name for name in amprewrite.__all__ if inspect.isfunction(getattr(amprewrite, name))]
PLAIN = {"model", "amp", "module", "graph", "inputs", "args", "kwargs", "options", "batches", "progress", "example_kwargs"}
"""Parameters whose names say what they take."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_tell_of_their_options_and_errors(name):
    function = getattr(amprewrite, name)
    text = inspect.getdoc(function) or ""
    assert len(FUNCTIONS) > 8
    assert [option for option in inspect.signature(function).parameters if option not in PLAIN and option not in text] == []
    assert re.search(r"Raises|Error", text), "which errors?"


@pytest.mark.parametrize("name", sorted({name for group in site().groups().values() for name in group}))
def test_public_classes_tell_of_their_methods(name):
    reference = site()
    if reference.missing(name):
        pytest.skip(f"{name} needs {reference.missing(name)}")
    found = reference.documented(name)
    assert inspect.getdoc(found)
    if not inspect.isclass(found):
        return
    inherited = {key for base in found.__mro__ if not base.__module__.startswith("amprewrite") for key in vars(base)}
    own = {key: value for base in found.__mro__ if base.__module__.startswith("amprewrite") for key, value in vars(base).items()}
    told = {key: inspect.getdoc(value) for key, value in own.items() if not key.startswith("_") and key not in inherited}
    functions = {key for key in told if inspect.isroutine(own[key]) or isinstance(own[key], property)}
    assert sorted(key for key in functions if not told[key]) == []


# -- the page on the project, and the notebook ---------------------------------------------------------------------------


def test_the_changelog_and_the_schemas_are_those_of_the_code():
    page = (GUIDES / "project.md").read_text()
    assert f"### {VERSION}" in page
    assert f"(`plan.to_json()`) | {SCHEMA} |" in page
    assert f"(`calibration.save`) | {ranges.SCHEMA} |" in page
    assert set(MIGRATIONS) == set(range(1, SCHEMA)), "each older version has its step"


def test_a_loss_scale_of_a_later_version_loads():
    """As the page says: keys that are unknown are ignored, and one that is missing takes its default."""
    state = amprewrite.DynamicLossScale(init=2.0**10).state_dict()
    own = {key: value for key, value in state["amprewrite"].items() if key != "searching"} | {"later": 1}
    scale = amprewrite.DynamicLossScale()
    scale.load_state_dict(state | {"amprewrite": own, "later": 1})
    assert scale.value == 2.0**10


NOTEBOOK = json.loads((ROOT / "examples" / "first_plan.ipynb").read_text())


def test_the_notebook_carries_no_outputs():
    code = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert NOTEBOOK["nbformat"] == 4 and len(code) > 3
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert code[0]["source"][-1] == "plan", "it opens with a plan that shows itself"


def test_the_cells_of_the_notebook_run(capsys):
    names: dict[str, object] = {}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "softmax" in printed and "True torch.float32" in printed and "loss scale" in printed
    assert "<" in names["plan"]._repr_html_()  # type: ignore[attr-defined]


def test_pages_that_the_notebook_links_are_there():
    for cell in NOTEBOOK["cells"]:
        for link in re.findall(r"\]\(([^)#:]+)\)", "".join(cell["source"])):
            assert (ROOT / "examples" / link).exists(), link
