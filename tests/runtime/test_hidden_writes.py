"""Weights, statistics and divisors whose numbers a copy would miss: written by ops whose names do not say so, or flushed in part."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite


class Net(nn.Module):
    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(10, 8, max_norm=0.5)
        self.bags = nn.EmbeddingBag(10, 8, max_norm=0.5, mode="sum")
        self.norm, self.instance = nn.BatchNorm1d(8), nn.InstanceNorm1d(8, track_running_stats=True)
        self.linear, self.run = nn.Linear(8, 8), forward
        self.register_buffer("sizes", torch.tensor([1, 1e-7, 1e-9, 1, 1, 1, 1e-8, 1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def ids(x: Tensor) -> Tensor:
    return torch.arange(x.numel()).view(x.shape) % 10


def around(read: Callable[[nn.Module], Tensor], write: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    """Reads what is written as the weight of a product, before and after."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        before = F.linear(x, read(net))
        made = write(net, x)
        return before + F.linear(net.linear(made).sum() * 0.1 + x, read(net))

    return forward


def outer(statistic: Tensor) -> Tensor:
    return statistic[:, None] * torch.ones(8)


WRITES = {
    "embedding": around(lambda net: net.words.weight, lambda net, x: net.words(ids(x)).sum(1)),
    "embedding, function": around(lambda net: net.words.weight, lambda net, x: F.embedding(ids(x), net.words.weight, max_norm=0.3).sum(1)),
    "embedding_bag": around(lambda net: net.bags.weight, lambda net, x: net.bags(ids(x))),
    "batch_norm": around(lambda net: outer(net.norm.running_var), lambda net, x: net.norm(net.linear(x) * 3)),
    "instance_norm": around(lambda net: outer(net.instance.running_var), lambda net, x: net.instance(net.linear(x)[None].mT * 3)[0].mT),
}


def compared(forward: Callable[[nn.Module, Tensor], Tensor], dtype: str, **options: object) -> None:
    plain, amp, x = Net(forward), amprewrite.rewrite(Net(forward), dtype=dtype, **options), torch.rand(6, 8) + 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amprewrite.AmpRewriteWarning)
        for _ in range(2):
            want, got = plain(x), amp(x)
    bar = 2e-3 if dtype == "fp16" else 1.5e-2
    assert (got - want).norm() <= bar * want.norm()
    for ours, theirs in zip(amp.state_dict().values(), plain.state_dict().values(), strict=True):
        assert (ours.float() - theirs.float()).norm() <= bar * theirs.float().norm() + 1e-6


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"cache_weights": "step"}, {"lists": "o2"}], ids=str)
def test_what_an_op_writes_unsaid_is_read_as_written(how, dtype, options):
    compared(WRITES[how], dtype, **options)


@pytest.mark.parametrize("grad", [True, False])
def test_a_divisor_that_is_flushed_in_part_stays_fp32(grad):
    with torch.set_grad_enabled(grad):
        compared(lambda net, x: net.linear(net.linear(x) * net.sizes / net.sizes), "fp16")


@pytest.mark.parametrize("how", [how for how in WRITES if how.startswith("embedding")])
def test_gradients_of_a_weight_that_an_op_writes_unsaid_are_unscaled_once(how: str) -> None:
    """The readers before and after the write share the weight. Without a scale, gradients of 1e-5 lose a hundredth in fp16."""
    plain, amp, x = Net(WRITES[how]), amprewrite.rewrite(Net(WRITES[how]), dtype="fp16", loss_scale=4096.0), torch.rand(6, 8) + 0.5
    for net in (plain, amp):
        (net(x).square().mean() * 1e-5).backward()
    wanted = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    got = {name: each.grad for name, each in amp.named_parameters() if each.grad is not None}
    assert wanted.keys() == got.keys() and all((got[name] - wanted[name]).norm() <= 2e-3 * wanted[name].norm() for name in wanted)
