"""Where every line lives: floors, rooms and what they may know, checked on every import, those inside functions too.

Files that stand against a rule today are in ALLOWED, with the cut that takes each out. An entry that is no longer needed fails, too.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

from amprewrite.tables.formats import FORMATS, LOW_FORMATS, parse_format

ROOT = Path(__file__).parents[2]
FACE = "amprewrite"
FLOORS = {
    "torch_internals": 0, "tables": 1, "ir": 2, "planner": 3, "graphs": 3, "passes": 4, "runtime": 5, "report": 5, "accuracy": 6,
    "api": 7, "integrations": 8, FACE: 9,
}  # fmt: skip
"""Floor of each package. An import points to a lower floor, or stays in its package; neighbours on one floor never import each other."""
FX_ROOMS = (
    "amprewrite.graphs.fx", "amprewrite.passes.normalise", "amprewrite.passes.apply", "amprewrite.passes.lower",
    "amprewrite.passes.driver", "amprewrite.runtime", "amprewrite.accuracy.strict", "amprewrite.torch_internals",
)  # fmt: skip
"""What may know torch.fx."""
ONNX_ROOMS = ("amprewrite.graphs.onnx", "amprewrite.api.onnx")
"""What may know ONNX, and the files that know it."""
ONNX = {"onnx", "onnx_ir", "onnxscript", "onnxruntime"}
LONG = 500
REASON = "One file because"
"""A file above LONG lines gives its reason in its first docstring, in a sentence that begins so."""


ALLOWED: dict[str, dict[str, str]] = {
    "imports point down": {},
    "rooms do not import each other both ways": {},
    "a protocol stands for more than one class": {},
    "nobody takes what is private to another file": {},
    "torch.fx stays in its rooms": {},
    "ONNX stays in its rooms": {},
    "a long file gives its reason": {},
    "a room says what it is for": {},
}


@dataclass
class Seen:
    """What one file imports and names, wherever in it that stands."""

    ours: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)


@cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a file, made once for all tests."""
    return ast.parse(text)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = (FACE, *parts) if parts[0] == "passes" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for top in (FACE, "passes") for path in sorted((ROOT / top).rglob("*.py"))}


def package(module: str) -> str:
    """The package on a floor that a module is in; the face is `amprewrite` itself and what runs it."""
    found = [*module.split("."), ""][1]
    return found if found in FLOORS else FACE


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def seen(module: str) -> Seen:
    """Read one file. A module is imported by a statement, at the top or inside a function, or by name through `import_module`."""
    found, bound = Seen(), {}
    tree = parsed(MODULES[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _note(found, alias.name, "")
                bound[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                _note(found, node.module or "", alias.name)
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for argument in node.args:
                if isinstance(argument, ast.Constant):
                    _note(found, str(argument.value), "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted == "torch.fx":
                found.others.add(dotted)
            owner = bound.get(dotted.rpartition(".")[0], "")
            if owner in MODULES and _is_private(node.attr):
                found.private.add(f"{owner}.{node.attr}")
    found.ours.discard(module)
    return found


def _note(found: Seen, module: str, name: str) -> None:
    """Note one name that is imported from a module; of `from package import module` the module counts."""
    full = f"{module}.{name}"
    if full in MODULES:
        found.ours.add(full)
    elif module in MODULES:
        found.ours.add(module)
        if _is_private(name):
            found.private.add(full)
    else:
        assert module.partition(".")[0] != FACE, f"there is no module {module}"
        found.others.add("torch.fx" if full == "torch.fx" else module)


def _inside(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def folders() -> Iterator[Path]:
    for top in (FACE, "passes"):
        yield ROOT / top
        yield from (path for path in sorted((ROOT / top).rglob("*")) if path.is_dir() and not path.name.startswith("__"))


# rules: each gives what stands against it ----------------------------------------------------------------------------


def arrows_up() -> Iterator[str]:
    for name in MODULES:
        for target in seen(name).ours:
            here, there = package(name), package(target)
            if here != there and FLOORS[there] >= FLOORS[here]:
                yield f"{name} -> {target}"


def rooms_both_ways() -> Iterator[str]:
    """Two folders or files of one folder that import each other, by whichever of the files in them."""
    arrows = set()
    for name in MODULES:
        for target in seen(name).ours:
            here, there = name.split("."), target.split(".")
            shared = next((n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), 0)
            if shared:
                arrows.add((".".join(here[: shared + 1]), ".".join(there[: shared + 1])))
    yield from (f"{here} <-> {there}" for here, there in arrows if here < there and (there, here) in arrows)


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Every class of the library, by its name, which no other class has."""
    trees = (parsed(path.read_text()) for path in MODULES.values())
    return {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _bases(name: str) -> list[str]:
    return [ast.unparse(base).rpartition(".")[2] for base in classes()[name].bases]


@cache
def members(name: str) -> frozenset[str]:
    """The attributes of a class, and its methods with the names of their arguments, those of its bases in the library included."""
    found = set().union(*(members(base) for base in _bases(name) if base in classes()))
    for node in ast.walk(classes()[name]):
        if isinstance(node, ast.FunctionDef):
            asked = any(ast.unparse(each) == "property" for each in node.decorator_list)
            found.add(node.name if asked else f"{node.name}({', '.join(each.arg for each in node.args.args)})")
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return frozenset(found)


def lone_protocols() -> Iterator[str]:
    """Protocols whose members exactly one class of the library has, or a class and those that derive from it.

    Such a protocol only hides the import of that class. A protocol that no class of the library has describes objects of users.
    """
    protocols = {name for name in classes() if "Protocol" in _bases(name)}
    for name in protocols:
        have = {each for each in classes() if each not in protocols and members(name) <= members(each)}
        if len({each for each in have if have.isdisjoint(_bases(each))}) == 1:
            yield name


def private_names() -> Iterator[str]:
    for name in MODULES:
        for target in seen(name).private:
            yield f"{name} -> {target}"


def fx_elsewhere() -> Iterator[str]:
    for name in MODULES:
        if not _inside(name, FX_ROOMS) and any(other == "torch.fx" or other.startswith("torch.fx.") for other in seen(name).others):
            yield name


def onnx_elsewhere() -> Iterator[str]:
    for name in MODULES:
        knows = any(other.partition(".")[0] in ONNX for other in seen(name).others)
        if not _inside(name, ONNX_ROOMS) and (knows or any(_inside(target, ONNX_ROOMS[:1]) for target in seen(name).ours)):
            yield name


def long_without_reason() -> Iterator[str]:
    for name, path in MODULES.items():
        text = path.read_text()
        if len(text.splitlines()) > LONG and REASON not in " ".join((ast.get_docstring(parsed(text)) or "").split()):
            yield name


def silent_rooms() -> Iterator[str]:
    """A room's __init__ says what it is for in three lines; only the face and the pipeline hold code."""
    for folder in folders():
        if any(folder.glob("*.py")) or any((inner / "__init__.py").exists() for inner in folder.iterdir()):
            file = folder / "__init__.py"
            body = parsed(file.read_text()).body if file.exists() else []
            says = ast.get_docstring(ast.Module(body, [])) or ""
            bare = len(body) == 1 or module_name(file) in (FACE, f"{FACE}.passes")
            if not says or not bare or len(says.splitlines()) > 3:
                yield str(folder.relative_to(ROOT))


RULES: dict[str, Callable[[], Iterator[str]]] = {
    "imports point down": arrows_up,
    "rooms do not import each other both ways": rooms_both_ways,
    "a protocol stands for more than one class": lone_protocols,
    "nobody takes what is private to another file": private_names,
    "torch.fx stays in its rooms": fx_elsewhere,
    "ONNX stays in its rooms": onnx_elsewhere,
    "a long file gives its reason": long_without_reason,
    "a room says what it is for": silent_rooms,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_holds(rule: str) -> None:
    assert not sorted(set(RULES[rule]()) - ALLOWED[rule].keys())


@pytest.mark.parametrize("rule", RULES)
def test_what_is_allowed_is_still_needed(rule: str) -> None:
    assert not sorted(ALLOWED[rule].keys() - set(RULES[rule]())), "take these out of ALLOWED"


def test_every_rule_has_its_exceptions_in_one_table() -> None:
    assert ALLOWED.keys() == RULES.keys()


def test_every_package_has_a_floor() -> None:
    assert {package(name) for name in MODULES} == FLOORS.keys()
    assert {name.split(".")[1] for name in MODULES if name.count(".") > 1} == FLOORS.keys() - {FACE}


def test_files_import_each_other_in_no_circle() -> None:
    """The arrows up that are allowed aside, no chain of imports comes back to where it began."""
    graph = {name: {target for target in seen(name).ours if f"{name} -> {target}" not in ALLOWED["imports point down"]} for name in MODULES}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"these files import each other: {' -> '.join(reversed(error.args[1]))}")


def test_no_class_name_stands_for_two_things() -> None:
    """A reader who searches for a name finds one class."""
    places: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{name}:{node.lineno}")
    assert {word: found for word, found in places.items() if len(found) > 1} == {}


FORMAT_NAMES = {word for row in LOW_FORMATS for word in (row.name, row.name.upper(), *row.spellings)} - {"half"}
"""`half` is also an op."""
SHOWN_TO_USERS = {"amprewrite.runtime.compiler.plain_words"}
"""What quotes the options of other libraries."""


def _said(node: ast.AST) -> str:
    """The one word that a node is: a string, an attribute, a name, an imported name."""
    word = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    return str(word or getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", ""))


def test_low_formats_are_named_in_tables_alone() -> None:
    """So a third format is a row. What a format can do is asked of its row."""
    asked = [name for name in MODULES if package(name) != "tables" and name not in SHOWN_TO_USERS]
    assert [name for name in asked if any(_said(node) in FORMAT_NAMES for node in ast.walk(parsed(MODULES[name].read_text())))] == []


def test_the_facts_of_a_format_row_fit_its_dtype() -> None:
    for row in FORMATS.values():
        assert (row.bytes, row.max) == (row.dtype.itemsize, torch.finfo(row.dtype).max)
        assert row.pad_multiple * row.bytes == 16
        assert row.narrow == (row.max < torch.finfo(torch.float32).max / 2)
        assert all(parse_format(word) is row for word in (row.name, *row.spellings, row.dtype))
