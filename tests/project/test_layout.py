"""Every pass is listed, documented and tested, and every public name is documented. What may import what is in test_house.py."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from test_house import MODULES, parsed

import amprewrite
from amprewrite import passes
from amprewrite.ir.pass_base import Pass

ROOT = Path(__file__).parents[2]
STAGES = ("paint", "repaint", "plan", "apply")
"""Folders of passes/ that hold passes alone; in the others a file may be a part of one that is no pass yet."""
PASSES = {
    path.stem: f"amprewrite.passes.{path.parent.name}.{path.stem}"
    for path in sorted((ROOT / "passes").glob("*/*.py"))
    if path.stem != "__init__" and (path.parent.name in STAGES or re.search(r"^class \w+\(Pass\[", path.read_text(), re.M))
}
"""The module of each pass."""
LIBRARY = list(MODULES.values())


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def at_import(tree: ast.AST) -> Iterator[ast.stmt]:
    """Import statements that run when the file is imported: not those inside functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from at_import(node)


def imported(node: ast.stmt) -> list[str]:
    """Full names of the modules that one statement imports; of `from package import module` the module's."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, f"line {node.lineno} imports relatively"
    inner = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in inner if name in MODULES] or [node.module or ""]


# passes ---------------------------------------------------------------------------------------------------------------


def test_a_pass_is_one_file_one_class_one_name() -> None:
    for name in PASSES:
        module = importlib.import_module(PASSES[name])
        classes = [c for _, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, Pass) and c.__module__ == module.__name__]
        assert [(c.name, c.__name__.lower()) for c in classes] == [(name.replace("_", "-"), name.replace("_", ""))], module.__file__


def test_every_pass_is_in_the_pipeline_once() -> None:
    listed = [each.name.replace("-", "_") for members in passes.stages().values() for each in members]
    assert sorted(listed) == sorted(PASSES)


def test_a_pass_stands_in_the_folder_of_its_stage() -> None:
    folders = {stage: {type(each).__module__.split(".")[2] for each in members} for stage, members in passes.stages().items()}
    assert {stage: found for stage, found in folders.items() if not found <= {stage, "lower" if stage == "apply" else stage}} == {}


def test_every_pass_has_a_docstring_and_a_text() -> None:
    assert [name for name, module in PASSES.items() if not importlib.import_module(module).__doc__] == []
    assert [name for name in PASSES if not (ROOT / "tests" / "passes" / f"{name}.txt").is_file()] == []


def test_every_line_of_the_pipeline_says_what_it_does() -> None:
    text = (ROOT / "passes" / "__init__.py").read_text()
    listed = re.findall(r"^    \w+\(\),.*$", text, re.M)
    assert listed
    assert all(re.search(r",  # \w.*$", line) for line in listed), listed


def test_a_deciding_pass_knows_no_torch() -> None:
    """So every front end shares it."""
    deciding = [type(each).__module__ for stage in ("paint", "repaint", "plan") for each in passes.stages()[stage]]
    known = {name: [module for node in at_import(parsed(MODULES[name].read_text())) for module in imported(node)] for name in deciding}
    assert [name for name, modules in known.items() if any(module.partition(".")[0] == "torch" for module in modules)] == []


# imports --------------------------------------------------------------------------------------------------------------


EVERY_FILE = [path for folder in ("amprewrite", "passes", "tests", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_the_bare_name_passes_is_never_imported() -> None:
    """It would make a second copy of every pass."""

    def bare(path: Path) -> bool:
        statements = (node for node in ast.walk(parsed(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom))
        return any(name.partition(".")[0] == "passes" for node in statements for name in imported(node))

    assert [shown(path) for path in EVERY_FILE if bare(path)] == []


# documents ------------------------------------------------------------------------------------------------------------


def test_a_file_says_what_it_is_for() -> None:
    texts = {shown(path): path.read_text() for path in LIBRARY}
    assert [path for path, text in texts.items() if text.strip() and not ast.get_docstring(parsed(text))] == []


def test_every_public_name_exists_and_is_documented() -> None:
    assert sorted(set(amprewrite.__all__)) == list(amprewrite.__all__)
    for name in amprewrite.__all__:
        assert inspect.getdoc(getattr(amprewrite, name)), name


def test_public_methods_are_documented() -> None:
    for name in amprewrite.__all__:
        found = getattr(amprewrite, name)
        if inspect.isclass(found) and found.__module__.startswith("amprewrite") and not issubclass(found, Exception):
            for method, function in vars(found).items():
                bare = getattr(function, "__func__", getattr(function, "fget", function))
                if not method.startswith("_") and inspect.isfunction(bare):
                    assert bare.__doc__ or len(inspect.getsource(bare).splitlines()) <= 6, f"{name}.{method}"


MAKERS = {
    f"torch.{name}" for name in (
        "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
        "scalar_tensor", "tensor", "zeros",
    )
}  # fmt: skip
"""What makes a tensor on the default device of the process, unless it is told another."""


def test_what_makes_a_tensor_names_its_device() -> None:
    """Users set another default device: a tensor of the host would come to lie there."""

    def nameless(path: Path) -> Iterator[str]:
        for node in ast.walk(parsed(path.read_text())):
            makes = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in MAKERS
            if makes and not any(keyword.arg == "device" for keyword in node.keywords):
                yield f"{shown(path)}:{node.lineno}: {ast.unparse(node)}"

    assert [line for path in LIBRARY for line in nameless(path)] == []
