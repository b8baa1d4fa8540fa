"""Calls and training steps leave nothing behind."""

from __future__ import annotations

import gc
import resource

import pytest
import torch
from torch import nn

import amprewrite

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def kept() -> tuple[int, float]:
    """Tensors alive, and the most memory so far in MiB."""
    gc.collect()
    tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
    return tensors, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def grown(work, times: int) -> tuple[int, float]:
    """What `times` more calls of `work` add, once it is warm."""
    for _ in range(50):
        work()
    before = kept()
    for _ in range(times):
        work()
    after = kept()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("times", [200, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.long
def test_calls_leave_nothing(times, dtype, grad):
    amp = amprewrite.rewrite(net(), dtype=dtype)

    def work() -> None:
        with torch.set_grad_enabled(grad):
            amp(X)

    tensors, memory = grown(work, times)
    assert tensors <= 2 and memory < 8


@pytest.mark.parametrize("times", [100, pytest.param(5_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.long
def test_training_steps_leave_nothing(times, dtype):
    amp = amprewrite.rewrite(net(), dtype=dtype)
    optimizer = torch.optim.Adam(amp.parameters(), 1e-4)
    turn = 0

    def work() -> None:
        nonlocal turn
        turn += 1
        big = 1e6 if dtype == "fp16" and turn % 20 == 0 else 1.0  # some steps overflow and are skipped
        (amp(X).square().mean() * big).backward()
        optimizer.step()
        optimizer.zero_grad()

    tensors, memory = grown(work, times)
    assert tensors <= 2 and memory < 8


@pytest.mark.parametrize("times", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_calls_beyond_the_limit_of_graphs_leave_nothing(times, monkeypatch):
    monkeypatch.setattr("amprewrite.runtime.compiler.dynamo.RECOMPILE_LIMIT", 2)

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, parts):
            return sum(self.fc(part) for part in parts)

    amp, turn = amprewrite.rewrite(Sums(), dtype="bf16"), 0

    def work() -> None:
        nonlocal turn
        turn += 1
        amp([X] * (1 + turn % 6)).sum().backward()

    with pytest.warns(amprewrite.AmpRewriteWarning, match="more than 2 graphs"):
        tensors, memory = grown(work, times)
    assert tensors <= 2 and memory < 8


@torch._dynamo.disable
def outside(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Forces(nn.Module):
    """Code outside of graphs computes with a gradient that the forward took, and another graph reads the result."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.head = net(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return self.head(torch.tanh(outside(force)))


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_forwards_that_take_gradients_leave_nothing(steps: bool, frozen: bool) -> None:
    """A cycle through autograd's C++ nodes, which gc does not see, kept the graph of each forward alive in fp16."""
    model = Forces()
    model.energy.requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    amp = amprewrite.rewrite(model, dtype="fp16", optimizer=optimizer)

    def work() -> None:
        loss = amp(X).square().mean()
        if steps:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    tensors, _ = grown(work, 50)
    assert tensors <= 2
