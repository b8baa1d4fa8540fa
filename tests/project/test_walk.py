"""The walk of `rewrite(model)(x)`: how many files a reader opens who follows the calls, and how often they come back to a room.

A file counts if a call in it leads on to another file. One that leads nowhere is understood by the name of what is called. `tables` and
`ir` are plain data: they do not count, neither as files nor as rooms. A room is a package. Files stand in the order in which they first
lead on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from test_house import MODULES, package
from torch import Tensor, nn

import amprewrite
from amprewrite.tables import devices

MOST_FILES = 6
"""Files before the first call."""
MOST_RETURNS = 7
"""Of the whole walk. Reading, deciding and applying each go down to `graphs` or `planner` and come back."""
MOST_ENTERED = 100
"""Files in which any function runs from `rewrite(model)` to the end of the first step, `tables` and `ir` among them."""
NAMES = {str(path): name for name, path in MODULES.items()}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.logsumexp(x + self.down(nn.functional.gelu(self.up(self.norm(x)))), -1)


@contextmanager
def files_that_lead_on(found: dict[str, None]) -> Iterator[None]:
    """Add to `found` the files of the library that call others while the block runs."""
    inside: list[str] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        name = NAMES.get(frame.f_code.co_filename)
        if name is None or package(name) in ("tables", "ir") or frame.f_code.co_name == "<module>":
            return
        if event == "call":
            if inside and inside[-1] != name:
                found[inside[-1]] = None
            inside.append(name)
        elif event == "return" and inside:
            inside.pop()

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def returns(files: Iterable[str]) -> list[str]:
    """The files at which the walk comes back to a room that it had left."""
    found, left, here = [], set[str](), ""
    for name in files:
        room = package(name)
        if room != here:
            found += [name] * (room in left)
            left.add(here)
            here = room
    return found


@pytest.fixture(scope="module")
def walk() -> tuple[list[str], list[str]]:
    """The files of `rewrite(model)`, and those of the first call after them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_cpu_has_bf16", lambda: True)  # elsewhere the plan has a note more, and the walk two steps
        return _walked()


def _walked() -> tuple[list[str], list[str]]:
    x = torch.randn(8, 64)
    amprewrite.rewrite(Block(64), dtype="bf16")(x)  # what is imported or made once a process is no part of it
    found: dict[str, None] = {}
    with files_that_lead_on(found):
        amp = amprewrite.rewrite(Block(64), dtype="bf16")
    before = list(found)
    torch._dynamo.reset()
    with files_that_lead_on(found):
        amp(x)
    return before, list(found)


def test_few_files_stand_before_the_first_call(walk: tuple[list[str], list[str]]) -> None:
    assert 1 < len(walk[0]) <= MOST_FILES, walk[0]


def test_the_walk_seldom_comes_back(walk: tuple[list[str], list[str]]) -> None:
    assert len(walk[1]) > 30 and "amprewrite.passes.driver" in walk[1], "it was not seen"
    assert len(returns(walk[1])) <= MOST_RETURNS, returns(walk[1])


def mlp() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), {"input": torch.randn(4, 32)}


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as hf

    sizes = {"num_hidden_layers": 2, "hidden_size": 48, "intermediate_size": 90, "num_attention_heads": 4}
    ids = torch.randint(1, 100, (2, 16))
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=100, **sizes)), {"input_ids": ids, "labels": ids}


def first_step(model: nn.Module, given: dict[str, Tensor]) -> None:
    out = amprewrite.rewrite(model, dtype="bf16")(**given)
    (out if isinstance(out, Tensor) else out.loss).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize("make", [mlp, pytest.param(bert, marks=pytest.mark.long)])
def test_a_first_step_enters_few_files(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    """A pass that has nothing to do says so by `needs`, so that a reader of a small model's step need not read it.

    The step runs in a process of its own, because earlier tests leave hooks of optimizers and modules behind.
    """
    if make is bert:
        pytest.importorskip("transformers")
    told = subprocess.run([sys.executable, __file__, make.__name__], capture_output=True, text=True, check=True).stdout.split()
    assert 50 < len(told) <= MOST_ENTERED, told


def files_of_first_step(make: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> list[str]:
    devices._cpu_has_bf16 = lambda: True
    first_step(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), {"input": torch.randn(2, 8)})  # imports, and what is made once a process
    model, given = make()
    torch._dynamo.reset()
    entered: dict[str, None] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename in NAMES:
            entered[NAMES[frame.f_code.co_filename]] = None

    sys.setprofile(watch)
    try:
        first_step(model, given)
    finally:
        sys.setprofile(None)
    return sorted(entered)


@pytest.mark.parametrize(
    "files, count",
    [("api.a runtime.b runtime.c passes.d", 0), ("api.a runtime.b passes.c runtime.d", 1), ("api.a graphs.b api.a graphs.c", 2)],
)
def test_returns_are_counted(files: str, count: int) -> None:
    assert len(returns(f"amprewrite.{name}" for name in files.split())) == count


if __name__ == "__main__":
    print(*files_of_first_step({"mlp": mlp, "bert": bert}[sys.argv[1]]))
