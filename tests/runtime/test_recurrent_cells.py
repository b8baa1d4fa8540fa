"""Recurrent cells, called step by step in training: gradients err no more than twice as much as torch.autocast's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import amprewrite

FLOOR = {"bf16": 1e-2, "fp16": 2e-3}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Steps(nn.Module):
    """A cell over four steps, and a linear layer on its last state."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.out = cell, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for step in x:
            state = self.cell(step, state)
        return self.out(state[0] if isinstance(state, tuple) else state)  # type: ignore[no-any-return]


def gradients(model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 6, 8, generator=generator), torch.randn(6, 4, generator=generator)
    model.zero_grad()
    (nn.functional.mse_loss(call(x).float(), y) * scale).backward()
    return [p.grad / scale for p in model.parameters() if p.grad is not None]


def errors(got: list[torch.Tensor], want: list[torch.Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]


CELLS = {
    "rnn": lambda: nn.RNNCell(8, 16), "rnn with relu": lambda: nn.RNNCell(8, 16, nonlinearity="relu"),
    "lstm": lambda: nn.LSTMCell(8, 16), "gru": lambda: nn.GRUCell(8, 16),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", CELLS)
def test_gradients_err_no_more_than_twice_autocasts(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    model = Steps(CELLS[name]())
    exact = gradients(model, model)
    twin = copy.deepcopy(model)

    def autocast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=LOW[dtype]):
            return twin(x)  # type: ignore[no-any-return]

    theirs = errors(gradients(twin, autocast, 1024.0 if dtype == "fp16" else 1.0), exact)
    ours = errors(gradients(model, amprewrite.rewrite(model, dtype=dtype)), exact)
    assert len(ours) == 6
    for mine, other in zip(ours, theirs, strict=True):
        assert mine <= max(2 * other, FLOOR[dtype])
