"""Sums of many small steps stay fp32; single ones, large ones, and what only looks like one do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite
from amprewrite.tables.vocabulary import Colour, Reason


class Net(nn.Module):
    def __init__(self, step: Callable[[nn.Module, Tensor], Tensor], steps: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step, self.steps = step, steps
        self.first, self.second, self.scale = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.full((16,), 0.1))

    def inner(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = self.step(self, x)
        return self.first(x)


def heun(net: nn.Module, x: Tensor) -> Tensor:
    slope = net.inner(x)
    return x + 0.05 * (slope + net.inner(x + 0.1 * slope))


SMALL = {
    "times": lambda net, x: x + 0.1 * net.inner(x),
    "first": lambda net, x: net.inner(x) * 0.1 + x,
    "minus": lambda net, x: x - net.inner(x) * 0.1,
    "divided": lambda net, x: x + net.inner(x) / 10,
    "alpha": lambda net, x: torch.add(x, net.inner(x), alpha=0.1),
    "in place": lambda net, x: x.clone().add_(net.inner(x) * 0.1),
    "behind an activation": lambda net, x: F.relu(x + 0.1 * net.inner(x)),
    "heun": heun,
}
NOT = {
    "large": lambda net, x: x + net.inner(x),
    "half": lambda net, x: x + 0.5 * net.inner(x),
    "no product": lambda net, x: x + 0.05 * x.pow(3),
    "another value": lambda net, x: net.inner(x) * 0.125 + net.scale * 2.0,
}


def sums(net: nn.Module, dtype: str = "bf16", **options: object) -> list[Reason]:
    plan = amprewrite.plan(net, (torch.randn(4, 16),), dtype=dtype, **options)
    return [node.reason for node in plan.nodes if node.op in ("add", "sub") and node.colour is Colour.HIGH]


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("how", SMALL)
def test_many_small_steps_are_summed_in_fp32(how, dtype):
    net, x = Net(SMALL[how], 16), torch.randn(8, 16)
    assert sums(net, dtype).count(Reason.SMALL_STEPS) >= 16
    want = net(x)
    with torch.autocast("cpu", getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])):
        theirs = error(net(x), want)
    assert error(amprewrite.rewrite(net, dtype=dtype)(x), want) <= 2 * theirs + 1e-3


@pytest.mark.parametrize("how", SMALL)
def test_few_are_not(how):
    assert Reason.SMALL_STEPS not in sums(Net(SMALL[how], 4))


@pytest.mark.parametrize("how", NOT)
def test_other_sums_are_not(how):
    assert Reason.SMALL_STEPS not in sums(Net(NOT[how], 16))


@pytest.mark.parametrize("options", [{"lists": "o2"}, {"overrides": {"add": "low"}}], ids=str)
def test_who_asks_for_low_sums_gets_them(options):
    assert not sums(Net(SMALL["times"], 16), **options)
