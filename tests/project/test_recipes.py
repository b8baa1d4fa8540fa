"""The recipes of the README, followed in a copy of the tree: an op, a pass, an op on another list."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The library and its tests, to be changed."""
    for name in ("amprewrite", "passes", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def run(copy: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=copy, env={"PYTHONPATH": str(copy), "PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(copy: Path, *tests: str) -> None:
    run(copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)




def add_line(file: Path, after: str, line: str) -> None:
    """Insert a line behind the only place where `after` stands."""
    text = file.read_text()
    assert text.count(after) == 1, f"{after!r} stands {text.count(after)} times in {file}"
    file.write_text(text.replace(after, f"{after}{line}\n"))


PLAN_OF_AN_OP = """
import torch, amprewrite
torch.library.define("mylib::twice", "(Tensor x) -> Tensor")
torch.library.impl("mylib::twice", "CompositeExplicitAutograd")(lambda x: x * 2)
torch.library.register_fake("mylib::twice")(torch.empty_like)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)
    def forward(self, x):
        return self.down(torch.ops.mylib.twice(self.up(x)))
for dtype in ("bf16", "fp16"):
    with torch.no_grad():
        plan = amprewrite.plan(Net(), (torch.randn(8, 64),), dtype=dtype)
    print(*[f"{node.op} {node.dtype} ({node.reason.value})" for node in plan.nodes if node.role == "op"])
"""


def test_an_op_is_one_row(copy: Path) -> None:
    row = '    *rows(CLEAR, "a product with two is exact", "mylib::twice", no_kernel=("cpu:fp16",)),'
    add_line(copy / "amprewrite/tables/ops/rows/clear.py", "ROWS = (\n", row)
    bf16, fp16 = run(copy, "-c", PLAN_OF_AN_OP).splitlines()
    assert "mylib::twice bf16" in bf16
    assert "mylib::twice fp32 (the device has no low kernel for it)" in fp16
    check(copy, "tests/tables", "tests/project/test_op_names.py")


PASS = '''
"""Keep the first and the last product high, as quantised models often do.

An override of either stays. Without a product nothing changes.
"""

from __future__ import annotations

from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.tables.vocabulary import OpKind, Reason


class RepaintEnds(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        products = [node.name for node in problem.graph if node.kind is OpKind.ALLOW]
        for name in (*products[:1], *products[-1:]):
            decisions.keep_high(problem, name, Reason.SENSITIVE)
        decisions.tie(problem)
'''


def test_a_pass_is_one_file_one_line_and_one_text(copy: Path) -> None:
    (copy / "passes/repaint/repaint_ends.py").write_text(PASS.lstrip())
    pipeline = copy / "passes/__init__.py"
    imports = "from amprewrite.passes.repaint.repaint_counts import RepaintCounts\n"
    add_line(pipeline, imports, "from amprewrite.passes.repaint.repaint_ends import RepaintEnds")
    add_line(pipeline, "EVIDENCE: tuple[Deciding, ...] = (\n", "    RepaintEnds(),  # the first and the last product stay high")
    text = copy / "tests/passes/repaint_ends.txt"
    text.write_text("== default bf16: matmul gelu matmul gelu matmul\n")
    check(copy, "tests/passes/test_fixtures.py", "-k", "repaint-ends", "--update-golden")
    assert "before  L ? L ? L\nafter   H ? L ? H" in text.read_text()
    check(copy, "tests/passes/test_fixtures.py", "-k", "repaint-ends or text_is_of_a_pass")
    check(copy, "tests/project/test_layout.py", "tests/project/test_house.py", "tests/project/test_op_names.py")


SOFTMAX = """
import torch, amprewrite
class Net(torch.nn.Module):
    def __init__(self, written):
        super().__init__()
        self.written = written
        self.up, self.down = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    def forward(self, x):
        h = self.up(x)
        e = torch.exp(h - h.amax(-1, keepdim=True)) if self.written else None
        return self.down(e / e.sum(-1, keepdim=True) if self.written else torch.softmax(h, -1))
for written in (False, True):
    with torch.no_grad():
        plan = amprewrite.plan(Net(written), (torch.randn(8, 64),), dtype="bf16")
    print(*[f"{node.op} {node.dtype}" for node in plan.nodes if node.role == "op"])
"""


def test_an_op_on_another_list_is_one_row(copy: Path) -> None:
    """What is known of softmax by its other rows, and softmax written out by hand, stay known."""
    file = copy / "amprewrite/tables/ops/rows/internal.py"
    words = '"softmax _softmax _safe_softmax _masked_softmax special_softmax"'
    text = file.read_text()
    assert text.count(f"{words}, ") == 1
    file.write_text(text.replace(f"{words}, ", ""))
    why = '"exponentials and their sum stay in fp32 inside the kernel"'
    add_line(copy / "amprewrite/tables/ops/rows/infer.py", "ROWS = (\n", f"    *rows(INFER, {why}, {words}),")
    assert run(copy, "-c", SOFTMAX).splitlines() == ["linear bf16 softmax bf16 linear bf16"] * 2
    check(copy, "tests/passes/test_fuse_patterns.py")


def test_the_readme_tells_of_these_recipes() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    for sentence in ("*An op* is one row in `amprewrite/tables/ops/rows`", "*A pass* is one file in a stage of `passes/`"):
        assert sentence in text
