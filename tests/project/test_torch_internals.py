"""Private names of torch stand in one file each, and in one table: examples/guides/torch_internals.md."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from test_house import MODULES, ROOT, parsed

PAGE = ROOT / "examples" / "guides" / "torch_internals.md"
ROW = re.compile(r"^\| `([\w.]+)` \| `([\w./]+)` \| (.+) \| (\d+\.\d+) \|$", re.M)
DOTTED = re.compile(r"torch(\.\w+)*\._[a-zA-Z]\w*(\.\w+)*")
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def rows() -> dict[str, tuple[str, str]]:
    """The file of each name, and since when torch has it."""
    found = ROW.findall(PAGE.read_text())
    assert len(found) == len({name for name, *_ in found}), "a name has two rows"
    return {name: (file, since) for name, file, _, since in found}


@cache
def resolved(name: str) -> Any:
    """The object that a dotted name means in the torch that is installed; None if there is none."""
    found: Any = torch
    done = "torch"
    for word in name.split(".")[1:]:
        done += f".{word}"
        if not hasattr(found, word):
            try:
                importlib.import_module(done)
            except ImportError:
                return None
        found = getattr(found, word, None)
    return found


def names_in(text: str) -> Iterator[str]:
    """Dotted private names of torch in a file: imported, reached through attributes, or written as a string."""
    tree = parsed(text)
    bound: dict[str, str] = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                bound[alias.asname or alias.name] = full = f"{node.module}.{alias.name}"
                if not isinstance(resolved(full), type(torch)):  # of a module its members count
                    yield full
        elif isinstance(node, ast.Import):
            bound |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.name.startswith("torch.")}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            root, _, rest = ast.unparse(node).partition(".")
            if root in bound and re.fullmatch(r"[\w.]+", rest):
                yield f"{bound[root]}.{rest}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            yield node.value


def row_of(name: str) -> str:
    """The longest row that is `name` or something that it is inside of; "" if there is none."""
    words = name.split(".")
    outer = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next((name for name in outer if name in rows()), "")


@cache
def uses() -> dict[str, set[str]]:
    """The files that use each row, and each private name without one."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in MODULES.values():
        for name in names_in(path.read_text()):
            if any(map(is_private, name.split("."))):
                found[row_of(name) or name].add(path.relative_to(ROOT).as_posix())
    return found


def test_every_private_name_of_torch_has_a_row_and_every_row_a_use():
    assert uses().keys() == rows().keys()


def test_a_private_name_of_torch_stands_in_the_file_that_its_row_names():
    said = rows()
    assert {name: files for name, files in uses().items() if name in said and files != {said[name][0]}} == {}


def test_torch_has_every_name_of_the_table():
    asked = [name for name, (_, since) in rows().items() if tuple(map(int, since.split("."))) <= VERSION]
    assert len(asked) > 90
    assert [name for name in asked if resolved(name) is None] == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from torch._foo import bar", "torch._foo.bar"),
        ("import torch\ndef f():\n    return torch._C._bar(1).x", "torch._C._bar"),
        ("import torch._foo as foo\nfoo.bar()", "torch._foo.bar"),
        ("from torch.autograd import forward_ad\nforward_ad._new_level", "torch.autograd.forward_ad._new_level"),
        ("log = 'torch._foo.bar'", "torch._foo.bar"),
    ],
)
def test_a_new_private_name_is_seen(text: str, name: str):
    assert name in set(names_in(text))
