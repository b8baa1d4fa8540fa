"""The page on troubleshooting names every class of error and warning, and quotes only what the code says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "examples" / "guides" / "troubleshooting.md").read_text()
FILES = [path for top in ("amprewrite", "passes") for path in sorted((ROOT / top).rglob("*.py"))]
BASES = {"AmpRewriteError", "AmpRewriteWarning"}
TELL = {"warn", "_warn", "warn_once", "warn_fp32", "cannot_read"}
"""Functions that make a warning of the text they are given."""


@cache
def trees() -> tuple[ast.Module, ...]:
    return tuple(ast.parse(path.read_text()) for path in FILES)


@cache
def our_classes() -> set[str]:
    """The bases of all errors and warnings, and every class that derives from one, wherever it is defined."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found, before = set(BASES), set()
    while found != before:
        before = set(found)
        found |= {name for name, parents in bases.items() if parents & found}
    return found


def pieces(node: ast.AST) -> list[str]:
    """The constant texts in an expression, each as one line."""
    parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))
    return [" ".join(part.split()) for part in parts if part.strip()]


@cache
def sayings() -> str:
    """Every text of the code, one a line."""
    return "\n".join(dict.fromkeys(piece for tree in trees() for piece in pieces(tree)))


def quoted(page: str) -> list[str]:
    """The messages in the first column of a page's tables, those of the table of symptoms aside."""
    tables = page.partition("## Errors")[2]
    rows = re.findall(r"^\| (`.*?`(?:, `.*?`)*) \|", tables, re.M)
    return [message for row in rows for message in re.findall(r"`(.*?)`", row)]


def test_every_class_is_on_the_page():
    assert len(our_classes()) > 15
    assert not {name for name in our_classes() if f"`{name}`" not in PAGE and f"amprewrite.{name}`" not in PAGE}


def test_public_classes_have_a_section_of_their_own():
    face = ast.parse((ROOT / "amprewrite" / "__init__.py").read_text())
    public = {piece for node in face.body if isinstance(node, ast.Assign) for piece in pieces(node)} & our_classes()
    assert {name for name in public - BASES if f"### `{name}`:" not in PAGE} == set()


@pytest.mark.parametrize("message", quoted(PAGE))
def test_quoted_messages_are_those_of_the_code(message):
    said = [part.strip() for part in message.split("…") if len(part.strip()) > 3]
    assert said, "a row that quotes nothing"
    assert not [part for part in said if part not in sayings()]


def warnings_of_the_code() -> dict[str, list[str]]:
    """The texts of each call that warns, by the longest of them."""
    found = {}
    for tree in trees():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in TELL and call.args:
                texts = [text for argument in call.args for text in pieces(argument) if len(text) > 12]
                if texts:
                    found[max(texts, key=len)] = texts
    return found


def test_every_warning_is_on_the_page():
    quotes = [part.strip() for message in quoted(PAGE) for part in message.split("…") if len(part.strip()) > 3]
    missing = [longest for longest, texts in warnings_of_the_code().items() if not any(quote in text for quote in quotes for text in texts)]
    assert not missing
    assert len(warnings_of_the_code()) > 8
