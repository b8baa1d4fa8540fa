"""Op names stand in the tables: what is true of an op is a column of its row, and sets of ops are derived from the rows.

1. A collection of op names is a fact about them. It stands in `tables/`. A collection that leads to code, as a table of pad rules does, is
   no fact: it stands with the code.
2. A file that asks for an op by name says so in its first docstring, with the name in backticks: a reader sees what it knows, and a name
   that comes to it does not come unseen.
3. ATen overloads are PyTorch's code, not names. What answers calls of them one by one holds sets of them: OVERLOAD_ROOMS.

Names of low formats are looked at in test_house.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
import torch
from test_house import MODULES, package, parsed

from amprewrite.tables.ops.onnx_names import CONTRIB, ROUNDS_NOTHING, TYPED_BY_ATTRIBUTE, VOCABULARY
from amprewrite.tables.ops.op_lists import OPS

OVERLOAD_ROOMS = ("amprewrite.runtime.compiler.exact", "amprewrite.graphs.fx.weights")
"""A compiler's calls, and those of a tensor class."""
ATTRIBUTES = {word for word in dir(torch.Tensor) if not callable(getattr(torch.Tensor, word))} | {"size", "dim", "storage"}
"""What tensors are asked about besides: such a word is hardly ever meant as an op."""
NAMES = {word for row in OPS.values() for word in (row.name, *row.spellings)} - ATTRIBUTES
ONNX_NAMES = {*VOCABULARY, *CONTRIB, *ROUNDS_NOTHING, *TYPED_BY_ATTRIBUTE}
FEWEST = 3
"""So many names are a collection; of a set two."""
OVERLOAD = re.compile(r"^(torch\.ops\.)?(aten|prims)\.\w+\.\w+$")
ASKS = re.compile(r"(\bop|\bop_type|(op_name|op_of|_op)\(.*\))$")
"""How an expression ends that gives the name of an op."""
OUTSIDE = [name for name in MODULES if package(name) != "tables"]


def _name(node: ast.AST) -> str:
    """The op name that a node is; "" if it is none."""
    node = node.value if isinstance(node, ast.Starred) else node
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) and value in NAMES | ONNX_NAMES else ""


def _collections(tree: ast.AST) -> Iterator[tuple[list[ast.expr], int]]:
    """What stands together in sets, tuples, lists, dicts and arguments, and does not lead to code; from how many names on it counts."""
    leading = {id(node.args[0]) for node in ast.walk(tree) if _leads_to_code(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Set | ast.List | ast.Tuple) and id(node) not in leading:
            yield node.elts, 2 if isinstance(node, ast.Set) else FEWEST
        elif isinstance(node, ast.Dict):
            if all(isinstance(value, ast.Constant) for value in node.values):
                yield [key for key in node.keys if key is not None], FEWEST
            yield node.values, FEWEST
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            yield node.args, FEWEST


def _leads_to_code(node: ast.AST) -> bool:
    """Whether a node is `dict.fromkeys(names, code)`."""
    keys = isinstance(node, ast.Call) and ast.unparse(node.func) == "dict.fromkeys" and len(node.args) == 2
    return keys and not isinstance(node.args[1], ast.Constant)


def sets_of_names(text: str) -> Iterator[tuple[int, list[str]]]:
    """Collections of op names in a file, each with its line."""
    tree = parsed(text)
    for members, fewest in _collections(tree):
        found = [name for member in members if (name := _name(member))]
        if len(found) >= fewest and len(found) > len(members) / 2:
            yield members[0].lineno, found
    for node in ast.walk(tree):
        words = node.value.split() if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
        if len(words) >= FEWEST and NAMES.issuperset(words):
            yield node.lineno, words


def sets_of_overloads(text: str) -> Iterator[int]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Set | ast.List | ast.Tuple) and sum(bool(OVERLOAD.match(ast.unparse(each))) for each in node.elts) > 1:
            yield node.lineno


def asked_by_name(text: str) -> set[str]:
    """Op names that a file compares the name of an op with."""
    found = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(ASKS.search(ast.unparse(side)) for side in sides):
                found |= {name for side in sides for inner in ast.walk(side) if (name := _name(inner))}
    return found


def test_sets_of_op_names_stand_in_the_tables() -> None:
    found = {name: list(sets_of_names(MODULES[name].read_text())) for name in OUTSIDE}
    assert {name: sets for name, sets in found.items() if sets} == {}, "make it a trait of the rows: amprewrite/tables/ops/rows/traits.py"


def test_sets_of_aten_overloads_stand_where_such_calls_are_answered() -> None:
    elsewhere = [name for name in OUTSIDE if not name.startswith(OVERLOAD_ROOMS)]
    assert [name for name in elsewhere if list(sets_of_overloads(MODULES[name].read_text()))] == []


def test_a_file_says_which_ops_it_knows_by_name() -> None:
    unsaid = {}
    for name in OUTSIDE:
        text = MODULES[name].read_text()
        said = set(re.findall(r"`([\w.]+)`", ast.get_docstring(parsed(text)) or ""))
        unsaid[name] = sorted(asked_by_name(text) - said)
    assert {name: ops for name, ops in unsaid.items() if ops} == {}, "say so in the first docstring: By name it knows `...`"


@pytest.mark.parametrize(
    "text",
    [
        'KEEP = {"relu", "tanh"}',
        'KEEP = frozenset(("relu", "tanh", "gelu"))',
        'KEEP = "relu tanh gelu".split()',
        'COST = {"relu": 1, "tanh": 2, "gelu": 3}',
        'def f(op):\n    return op in ("relu", "tanh", "gelu")',
        'HEAVY = ["Conv", "MatMul", "Gemm"]',
    ],
)
def test_a_new_set_of_op_names_is_seen(text: str) -> None:
    assert list(sets_of_names(text))


def test_a_room_for_overloads_still_holds_some() -> None:
    holding = [name for name in OUTSIDE if list(sets_of_overloads(MODULES[name].read_text()))]
    assert all(any(name.startswith(room) for name in holding) for room in OVERLOAD_ROOMS)


@pytest.mark.parametrize("text", ['if node.op == "relu":\n    pass', 'op_name(node.target) in ("relu", "tanh")', '_op(node) != "relu"'])
def test_a_question_for_an_op_is_seen(text: str) -> None:
    assert "relu" in asked_by_name(text)


@pytest.mark.parametrize("text", ['{"relu": relu, "tanh": tanh, "gelu": lambda x: x}', 'dict.fromkeys(("relu", "tanh", "gelu"), rule)'])
def test_a_table_of_code_is_no_fact(text: str) -> None:
    assert not list(sets_of_names(text))
