"""What a model draws from NumPy's global generator is what fp32 draws, at the first call and later, and torch's generator is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import amprewrite

WIDTH = 1024


def seeded(y: Tensor) -> Tensor:
    np.random.seed(3)
    return y[:, torch.from_numpy(np.random.permutation(WIDTH))]


def blocks(y: Tensor) -> Tensor:
    """Random blocks as BigBird draws them."""
    drawn = np.zeros((2, 4), dtype=np.int32)
    np.random.seed(0)
    for row in range(2):
        drawn[row, :] = np.random.permutation(np.arange(WIDTH))[:4]
    return y[:, torch.from_numpy(drawn).long()]


def noise(y: Tensor) -> Tensor:
    return y + torch.from_numpy(np.random.randn(WIDTH)).float()


def number(y: Tensor) -> Tensor:
    return y * float(np.random.uniform(1, 2)) + int(np.random.randint(0, 9))


class Draws(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.linear(x))


def two_calls(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Any, Tensor]:
    np.random.seed(0)
    torch.manual_seed(0)
    return model(x), model(x), np.random.random(), torch.rand(())


@pytest.mark.filterwarnings("ignore:Draws has code that runs as it is written")  # a draw in a loop
@pytest.mark.parametrize("draw", [seeded, blocks, noise, number])
def test_calls_draw_what_fp32_draws(draw: Callable[[Tensor], Tensor]) -> None:
    model, x = Draws(draw), torch.randn(2, WIDTH)
    amp = amprewrite.rewrite(model, dtype="bf16")
    fp32, ours = two_calls(model, x), two_calls(amp, x)
    for wanted, got in zip(fp32[:2], ours[:2], strict=True):
        assert (got - wanted).norm() < 0.01 * wanted.norm()
    assert fp32[2:] == ours[2:]
    assert [node.colour.value for node in amp.plan.nodes if node.op == "linear"] == ["low"]
    assert any("NumPy" in left.why for left in amp.plan.skipped)
