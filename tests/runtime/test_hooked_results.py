"""A hook on a result, or on what an op made of it, takes the whole gradient of the tensor that the model hooks, also behind a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import long_beyond
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amprewrite

SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda v: v,
    "contiguous": Tensor.contiguous,
    "to": lambda v: v.to(torch.float32),
    "float": Tensor.float,
    "type_as": lambda v: v.type_as(v),
    "dropout of nothing": lambda v: F.dropout(v, 0.0, training=True),
    "dropout in evaluation": lambda v: F.dropout(v, 0.3, training=False),
    "contiguous after dropout": lambda v: F.dropout(v, 0.0, training=True).contiguous(),
    "dropout after contiguous": lambda v: F.dropout(v.contiguous(), 0.0, training=True),
}
"""Ways to name a tensor anew: each gives the tensor itself."""
OTHER: dict[str, Callable[[Tensor], Tensor]] = {"view": lambda v: v.view(v.shape), "clone": Tensor.clone, "product": lambda v: v * 1}
"""Ways that give another tensor: the hook takes only what flows back through it."""


class Net(nn.Module):
    def __init__(self, same: Callable[[Tensor], Tensor], width: int, kept: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.same, self.kept = nn.Linear(width, width), nn.Linear(width, width), same, kept

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        v = checkpoint(self.a, x, use_reentrant=False) if self.kept else self.a(x)
        w = self.same(v)
        w.register_hook(lambda gradient: gradient * 2)
        return v, self.b(w) + v


def gradients(model: nn.Module, call: Callable[..., Any], x: Tensor) -> list[Tensor]:
    model.zero_grad()
    v, y = call(x)
    (v.square().mean() - 3 * y.square().mean()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def error(model: nn.Module, width: int, **options: Any) -> float:
    x = torch.randn(32, width)
    wanted = [each.clone() for each in gradients(model, model, x)]
    found = gradients(model, amprewrite.rewrite(model, **options), x)
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", [*SAME, *OTHER])
def test_a_hook_takes_the_whole_gradient_of_its_tensor(kind: str, dtype: str) -> None:
    scale = {"loss_scale": 256.0} if dtype == "fp16" else {}
    for kept in (False, True):
        assert error(Net((SAME | OTHER)[kind], 64, kept), 64, dtype=dtype, backend="aot_eager", **scale) < 0.01
    assert error(Net((SAME | OTHER)[kind], 64, kept=False), 64, dtype=dtype, **scale) < 0.01


@pytest.mark.parametrize("backend", long_beyond(1, ["aot_eager", "inductor"]))
@pytest.mark.parametrize("kind", ["contiguous", "dropout of nothing"])
def test_at_a_width_of_a_thousand(kind: str, backend: str) -> None:
    assert error(Net(SAME[kind], 1024, kept=False), 1024, dtype="bf16", backend=backend) < 0.01
