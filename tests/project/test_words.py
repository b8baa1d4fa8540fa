"""Docstrings, comments and guides keep to plain English: subject, verb, object. The habits in BANNED make a sentence hard to read."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAIN = ("amprewrite", "passes", "README.md", "examples/guides")
"""Files and folders, as paths from the root."""
BANNED = {
    "what as a subject": re.compile(r"(?:^|(?<=[.;:] )|\n\n)(?:(?:Of|Whether) what\b|What\b(?![^.]*\?))"),
    "as it is, as it was": re.compile(r"\bas (?:it is|it was|they are|they were)\b", re.I),
    "those that, one that": re.compile(r"\b(?:those|ones?) that\b", re.I),
    "else for otherwise": re.compile(r"(?:^|[,;:.(] ?|\band )else\b", re.I),
}
"""A habit and how it is found in a text whose lines are joined. `What ...?` is a question and may stand; so may `anything else`."""


def found_in(text: str) -> list[str]:
    joined = re.sub(r"[^\S\n]*\n(?!\s*\n)[^\S\n]*", " ", text.strip())
    return [
        f"{habit}: {joined[max(hit.start() - 30, 0) : hit.end() + 40]!r}"
        for habit, banned in BANNED.items()
        for hit in banned.finditer(joined)
    ]


def prose_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, strings below a name included, and comments; comment lines that follow each other are one text. Each with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    first, last, lines = 0, -1, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != last + 1:
                yield first, "\n".join(lines)
                lines = []
            first, last = first if lines else token.start[0], token.start[0]
            lines.append(token.string.lstrip("#: "))
    if lines:
        yield first, "\n".join(lines)


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and cells of tables of a page. Code, which includes quoted messages, and headings are left out."""
    fenced, first, lines = False, 0, []
    for number, line in enumerate([*re.sub(r"(?<!`)`[^`\n]+`(?!`)", "code", text).splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        row = line.lstrip().startswith("|")
        if lines and (fence or fenced or row or not line.strip() or re.match(r"\s*(?:[-*]|\d+\.|#+) ", line)):
            yield first, "\n".join(lines)
            lines = []
        if row and not fenced:
            yield from ((number, cell) for cell in line.split("|") if cell.strip())
        elif not (fence or fenced or line.startswith("#")) and line.strip():
            first = first if lines else number
            lines.append(re.sub(r"^\s*(?:[-*]|\d+\.) ", "", line))


def offences(path: Path) -> list[str]:
    prose = prose_of_python if path.suffix == ".py" else prose_of_page
    return [f"{path.relative_to(ROOT)}:{line}: {found}" for line, text in prose(path.read_text()) for found in found_in(text)]


def files(place: str) -> list[Path]:
    path = ROOT / place
    return sorted(file for kind in ("*.py", "*.md") for file in path.rglob(kind)) if path.is_dir() else [path]


@pytest.mark.parametrize("place", PLAIN)
def test_prose_is_plain(place: str) -> None:
    assert files(place)
    assert [found for file in files(place) for found in offences(file)] == []


@pytest.mark.parametrize(
    ("text", "habit"),
    [
        ("What the value comes in.", "what as a subject"),
        ("Of what no step has read.", "what as a subject"),
        ("A mask. What it adds blocks a position.", "what as a subject"),
        ("The model is taken\n    as it is.", "as it is, as it was"),
        ("Weights, those that a graph reads.", "those that, one that"),
        ("The format; else None.", "else for otherwise"),
    ],
)
def test_each_habit_is_found(text: str, habit: str) -> None:
    for found in (
        [text for _, text in prose_of_python(f'def f():\n    """{text}"""\n')],
        [text for _, text in prose_of_python("\n".join(f"# {line.strip()}" for line in text.splitlines()))],
        [text for _, text in prose_of_page(f"# A page\n\n{text}\n")],
    ):
        assert [each.partition(":")[0] for each in found_in(*found)] == [habit]


@pytest.mark.parametrize(
    "text", ["PolicyError for anything else.", "What runs in fp32? Reductions.", "The format of a weight, as the plan has it."]
)
def test_plain_sentences_pass(text: str) -> None:
    assert found_in(text) == []


def test_code_in_a_page_is_not_prose() -> None:
    assert list(prose_of_page("```python\nx = model as it is\n```\n")) == []
    assert [found_in(text) for _, text in prose_of_page("The warning `the model stays as it is` may come.\n")] == [[]]
