"""A value that many ops read has gradients as exact as under torch.autocast, which adds them up in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite

FLOOR = {"bf16": 1e-2, "fp16": 2e-3}


class Markov(nn.Module):
    """The scaled forward algorithm: one matrix of transitions in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        moves, state, total = self.table.softmax(-1), x[:, 0], torch.zeros(())
        for step in range(1, x.shape[1]):
            state = (state @ moves) * x[:, step]
            size = state.sum(-1, keepdim=True)
            total, state = total + size.log()[:, 0], state / size
        return -total.mean()


class Memory(nn.Module):
    """Layers that all read one normed memory, and one bias of their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)
        self.keys = nn.ModuleList(nn.Linear(32, 32) for _ in range(40))
        self.bias = nn.Parameter(torch.randn(1, 64, 64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        memory, state, bias = self.norm(self.first(x)), x, self.bias * 2
        for layer in self.keys:
            state = state + F.softmax(state @ layer(memory).mT * 0.1 + bias, -1) @ memory
        return state.square().mean()


@pytest.mark.long
@pytest.mark.parametrize("dtype", FLOOR)
@pytest.mark.parametrize("make", [Markov, Memory])
def test_gradients_of_a_value_that_many_read(make: Callable[[], nn.Module], dtype: str) -> None:
    torch.manual_seed(0)
    net = make()
    x = torch.randn(64, 64, 32).softmax(-1)

    def gradients(model: nn.Module, scale: float, low: torch.dtype | None = None) -> dict[str, Tensor]:
        net.zero_grad()
        with torch.autocast("cpu", dtype=low, enabled=low is not None):
            (model(x) * scale).backward()
        return {name: p.grad / scale for name, p in net.named_parameters()}

    want = gradients(net, 1.0)
    other = gradients(net, 1024.0 if dtype == "fp16" else 1.0, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    found = gradients(amprewrite.rewrite(net, dtype=dtype, **({"loss_scale": 1024.0} if dtype == "fp16" else {})), 1.0)
    behind = {name: gradient for name, gradient in want.items() if not name.startswith("keys")}  # what many read is made of these
    for name, gradient in behind.items():
        off, others = ((each[name] - gradient).norm() / gradient.norm() for each in (found, other))
        assert off <= max(FLOOR[dtype], 2 * others), name


def test_the_plan_names_the_copies() -> None:
    plan = amprewrite.plan(Memory(), (torch.randn(64, 64, 32),), dtype="bf16")
    assert "has a low copy for every two that read one" in str(plan)
