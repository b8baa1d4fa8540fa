"""A call that finds its graph again sets and looks at little, and sees all the same what came since the last one."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from runtime_help import data, low, matmul_dtypes, mlp
from tiers import long_beyond
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import amprewrite
import amprewrite.passes
from amprewrite import AmpRewriteWarning
from amprewrite.runtime.captured import graph_rewriter
from amprewrite.runtime.model.rewritten import session_of
from amprewrite.tables.errors import CaptureError


def steady(model: nn.Module) -> nn.Module:
    """Rewritten, and called until nothing is captured any more."""
    amp = low(model)
    with torch.no_grad():
        for _ in range(4):
            amp(data())
    return amp


def hooked(model):
    model.first.register_forward_hook(lambda module, args, result: 2 * result)


def written(model):
    model.first.weight.data.mul_(3)


def replaced(model):
    torch.manual_seed(5)
    model.second = nn.Linear(16, 4)


def patched(model):
    model.first.forward = lambda x: nn.functional.linear(x, model.first.weight)


@pytest.mark.parametrize("change", [hooked, written, replaced, patched])
@torch.no_grad()
def test_a_change_between_two_calls_is_seen(change):
    model = mlp()
    amp, x = steady(copy.deepcopy(model)), data()
    before = amp(x)
    change(amp)
    change(model)
    assert not torch.equal(amp(x), before)
    assert torch.equal(amp(x), low(model)(x))


@pytest.mark.parametrize(
    "call",
    [lambda amp, x: torch.autocast("cpu")(amp)(x), lambda amp, x: make_fx(amp)(x), lambda amp, x: torch.jit.trace(amp, (x,))],
    ids=["autocast", "make_fx", "jit.trace"],
)
def test_what_no_call_may_be_inside_of_is_refused(call):
    amp, x = steady(mlp()), data()
    with torch.no_grad():
        want = amp(x)
        with pytest.raises(CaptureError):
            call(amp, x)
        assert torch.equal(amp(x), want)


@torch.no_grad()
def test_transforms_and_modes_are_seen():
    model = mlp()
    amp, x = steady(copy.deepcopy(model)), data()
    assert matmul_dtypes(amp, x) == {torch.bfloat16}
    with pytest.warns(AmpRewriteWarning, match=r"ran in fp32"):
        assert torch.equal(torch.func.vmap(amp)(x), torch.func.vmap(model)(x))
    assert matmul_dtypes(amp, x) == {torch.bfloat16}


def test_gradients_switched_on_between_two_calls_flow():
    amp, x = steady(mlp()), data()
    assert amp(x).grad_fn is not None
    amp(x).sum().backward()
    assert all(p.grad is not None for p in amp.parameters())


def test_code_that_is_not_captured_runs_under_the_users_settings():
    asked = []

    @torch._dynamo.disable
    def ask(x):
        asked.append(torch._dynamo.config.suppress_errors)
        return x

    class Asks(nn.Sequential):
        def forward(self, x):
            return self[1](ask(self[0](x)))

    with pytest.warns(AmpRewriteWarning, match=r"runs as it is written"):
        steady(Asks(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert asked == [False] * 4
    assert not torch._dynamo.config.suppress_errors


# -- how many functions of this library run -------------------------------------------------------------------------
OURS = tuple(str(Path(package.__file__).parent) for package in (amprewrite, amprewrite.passes))
MOST_IN_A_CALL, MOST_IN_A_STEP = 24, 116
"""Functions of this library that run in a steady call with gradients in bf16, and in a whole steady step of training in fp16."""


class Blocks(nn.Module):
    """Blocks of a norm and two products, like those of a transformer without attention."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def functions_run(steady: Callable[[], Any]) -> int:
    """The number of calls of functions of this library in one run of `steady`."""
    count = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    for _ in range(6):  # graphs are captured, the loss scale finds its optimizer, the optimizer makes its state
        steady()
    sys.setprofile(watch)
    try:
        steady()
    finally:
        sys.setprofile(None)
    return count


def functions_of_a_step(depth: int, optimizer: type[torch.optim.Optimizer]) -> int:
    amp = amprewrite.rewrite(Blocks(depth), dtype="fp16")
    steps = optimizer(amp.parameters(), lr=1e-3)

    def run() -> None:
        steps.zero_grad()
        amp(data()).square().mean().backward()
        steps.step()

    return functions_run(run)


def functions_of_a_call() -> int:
    amp = amprewrite.rewrite(Blocks(12), dtype="bf16")
    return functions_run(lambda: amp(data()))


def functions_of_two_modes(depth: int) -> int:
    amp = amprewrite.rewrite(Blocks(depth), dtype="bf16")

    def run() -> None:
        amp(data())
        with torch.no_grad():
            amp(data())

    return functions_run(run)


@pytest.fixture
def alone() -> Iterator[ProcessPoolExecutor]:
    """A process whose calls begin with no other model alive, since other models would look at the steps of an optimizer."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        yield pool


@pytest.mark.parametrize("optimizer", long_beyond(1, [torch.optim.AdamW, torch.optim.SGD]))
def test_a_step_runs_as_many_functions_for_many_weights_as_for_few(
    optimizer: type[torch.optim.Optimizer], alone: ProcessPoolExecutor
) -> None:
    few, many = (alone.submit(functions_of_a_step, depth, optimizer).result() for depth in (2, 6))
    assert 50 < few == many <= MOST_IN_A_STEP


def test_a_call_runs_few_functions(alone: ProcessPoolExecutor) -> None:
    assert 10 < alone.submit(functions_of_a_call).result() <= MOST_IN_A_CALL


def test_calls_in_turn_with_and_without_gradients_run_as_few_functions_in_a_deep_model(alone: ProcessPoolExecutor) -> None:
    few, many = (alone.submit(functions_of_two_modes, depth).result() for depth in (2, 6))
    assert 20 < few == many <= 53


def test_two_threads_share_the_state_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a loss scale it is made when it is first read, and two first reads at the same time make it once."""
    made, before = list[int](), graph_rewriter.Training

    def slow(*args: Any) -> Any:
        made.append(len(made))
        time.sleep(0.1)
        return before(*args)

    monkeypatch.setattr(graph_rewriter, "Training", slow)
    session = session_of(amprewrite.rewrite(mlp(), dtype="bf16"))
    assert made == []
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: session.training, range(2))
    assert one is other and made == [0]
