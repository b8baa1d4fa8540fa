"""Autograd graphs live as long as somebody can reach them: what a call saved for backward goes with its result.

A graph that stays alive is a leak of all activations of its call, and PyTorch swaps no weight that a live graph reads.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amprewrite import rewrite

pytestmark = pytest.mark.filterwarnings("ignore:.*in fp32")


class Witness(torch.autograd.Function):
    """Give the operand. The node is in `alive` as long as its graph exists."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Witness.alive.add(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@torch._dynamo.disable
def between(x: Tensor) -> Tensor:
    """Code that capture leaves out."""
    return x.sin() * 2


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor], width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.first, self.second, self.last = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def forces(self: Any, x: Tensor) -> Tensor:
    x = x + 0
    energy = self.second(between(self.first(x).tanh())).sum()
    return self.last(torch.autograd.grad(energy, x, create_graph=True)[0])


BODIES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "whole": lambda self, x: self.last(self.second(self.first(x).tanh())),
    "parts": lambda self, x: self.last(between(self.second(between(self.first(x))))),
    "weights that are computed": lambda self, x: F.linear(self.second(x), between(self.first(x))[:16]),
    "forces": forces,
}


def drop(out: Tensor, x: Tensor) -> None:
    """Use the result for nothing."""


def learn(out: Tensor, x: Tensor) -> None:
    out.square().mean().backward()


def look(out: Tensor, x: Tensor) -> None:
    torch.autograd.grad(out.square().mean(), x)


def penalise(out: Tensor, x: Tensor) -> None:
    (gradient,) = torch.autograd.grad(out.square().mean(), x, create_graph=True)
    gradient.square().sum().backward()


def left(net: nn.Module, use: Callable[[Tensor, Tensor], None], shape: tuple[int, ...] = (16, 16)) -> int:
    """How many graphs are alive after three calls."""
    Witness.alive.clear()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    for _ in range(3):
        x = Witness.apply(torch.randn(shape).requires_grad_())
        use(net(x), x)
        optimizer.step()
        optimizer.zero_grad()
        del x
    gc.collect()
    return len(Witness.alive)


@pytest.mark.parametrize("use", [drop, learn, look, penalise], ids=lambda use: use.__name__)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("options", [{"dtype": "fp16"}, {"dtype": "fp16", "loss_scale": 8}, {"dtype": "bf16"}], ids=str)
def test_a_call_leaves_no_graph(options: dict[str, Any], body: str, use: Callable[[Tensor, Tensor], None]) -> None:
    assert left(rewrite(Net(BODIES[body]), **options), use) == 0


def test_nor_does_one_behind_a_backward_hook() -> None:
    """Capture leaves out a module with a backward hook."""
    net = rewrite(Net(BODIES["whole"]), dtype="fp16")
    net.get_submodule("second").register_full_backward_hook(lambda module, given, taken: (given[0] * 0.5,))
    assert left(net, drop) == 0
    new = nn.Parameter(torch.zeros(16, 16))
    torch.utils.swap_tensors(net.get_parameter("last.weight"), new)
    assert not net.get_parameter("last.weight").any()


def test_at_a_real_size() -> None:
    """1,024 rows of width 1,024: a call that is dropped leaves none of its 4 MB tensors."""
    net = rewrite(Net(BODIES["parts"], 1024), dtype="fp16")
    assert left(net, drop, (1024, 1024)) == 0
    gc.collect()
    large = [each for each in gc.get_objects() if isinstance(each, Tensor) and type(each) is Tensor and each.shape == (1024, 1024)]
    assert not any(each.grad_fn is not None for each in large)
