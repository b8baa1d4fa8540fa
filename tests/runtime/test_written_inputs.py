"""Behind a compiler: what a forward computed from a buffer before it wrote the buffer is what backward uses.

AOTAutograd alone computes such values anew in the backward, from the buffer as it is then: torch.compile gives wrong gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import amprewrite
from amprewrite.tables.ops.op_lists import op_name

KINDS: dict[str, Callable[[Any, Tensor], Tensor]] = {}


def kind(forward: Callable[[Any, Tensor], Tensor]) -> None:
    KINDS[forward.__name__] = forward


class Net(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor], width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm, self.run = nn.Linear(width, width), nn.Linear(width, width), nn.BatchNorm1d(width), forward
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.linspace(-1, 1, width))
        self.register_buffer("low", torch.linspace(-1, 1, width).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor) -> Tensor:
        doubled = by * 2
        ctx.save_for_backward(doubled)
        return x * doubled

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


@kind
def counted(net: Any, x: Tensor) -> Tensor:
    net.calls += 1
    return net.a(x) / net.calls


@kind
def computed_before(net: Any, x: Tensor) -> Tensor:
    y = net.a(x) * (net.mean * 2)
    net.mean.mul_(0.5)
    return net.b(y)


@kind
def copied_before(net: Any, x: Tensor) -> Tensor:
    factor = net.mean.clone()
    net.mean.add_(3)
    return net.b(net.a(x) * factor)


@kind
def indexed_before(net: Any, x: Tensor) -> Tensor:
    factor = net.mean[torch.arange(len(net.mean))]
    net.mean[3] += 7
    return net.b(net.a(x) * factor)


@kind
def widened_before(net: Any, x: Tensor) -> Tensor:
    y = net.b(net.a(x) * net.low.float())
    net.low.mul_(0.5)
    return y


@kind
def chosen(net: Any, x: Tensor) -> Tensor:
    net.mean.neg_()
    return net.b(torch.where(net.mean > 0, net.a(x), net.a(x) * 0.1))


@kind
def written_by_out(net: Any, x: Tensor) -> Tensor:
    torch.add(net.mean, 1, out=net.mean)
    return net.b(net.a(x) * net.mean.square())


@kind
def in_a_function(net: Any, x: Tensor) -> Tensor:
    y = Doubled.apply(net.a(x), net.mean)
    net.mean.mul_(0.5)
    return net.b(y)


@kind
def in_a_checkpoint(net: Any, x: Tensor) -> Tensor:
    net.mean += 1
    return net.b(checkpoint(lambda t: net.a(t).relu() + net.mean, x, use_reentrant=False))


@kind
def of_a_norm(net: Any, x: Tensor) -> Tensor:
    y = net.b(net.a(x)) * (net.norm.running_var * 2)
    return y + 0 * net.norm(x)


def learnt(net: nn.Module, width: int) -> list[Tensor]:
    """Results and gradients of two calls, and the buffers."""
    found = []
    for call in range(2):
        x = torch.randn(16, width, generator=torch.Generator().manual_seed(call)).requires_grad_()
        y = net(x)
        y.float().square().mean().backward()
        found += [y.detach().float(), x.grad]
    return [*found, *(p.grad for p in net.parameters() if p.grad is not None), *(each.float() for each in net.buffers())]


def agree(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).norm() <= 0.03 * other.norm() + 1e-4


@pytest.mark.parametrize(
    "options", [{"dtype": "bf16"}, {"dtype": "fp16", "loss_scale": 8.0}, {"cache_weights": False}, {"granularity": ["a", "b"]}]
)
@pytest.mark.parametrize("name", KINDS)
def test_backward_uses_what_the_forward_read(name: str, options: dict[str, Any]) -> None:
    plain, amp = (Net(KINDS[name], 16) for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amprewrite.AmpRewriteWarning)
        got = learnt(amprewrite.rewrite(amp, backend="aot_eager", **options), 16)
    agree(got, learnt(plain, 16))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["counted", "chosen", "copied_before", "in_a_function"])
def test_backward_uses_what_the_forward_read_at_a_real_width(name: str, backend: str) -> None:
    plain, amp = (Net(KINDS[name], 1024) for _ in range(2))
    agree(learnt(amprewrite.rewrite(amp, dtype="bf16", backend=backend), 1024), learnt(plain, 1024))


def test_running_statistics_force_nothing_to_be_saved() -> None:
    """A batch norm updates its statistics; what it computes besides is not marked, and inductor may compute it again."""
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    marked: dict[str, bool] = {}

    def look(module: torch.fx.GraphModule, inputs: Any) -> Any:
        marked.update({op_name(node.target): node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE for node in module.graph.nodes})
        return module

    amprewrite.rewrite(net, dtype="bf16", backend=look)(torch.randn(16, 16))
    assert marked["add"] and not marked["batch_norm"], "the count of batches is marked, the norm is not"
