"""Squared distances, `|z|² + |w|² - 2 z·w`: a small difference of sums and a product, in the orders in which people write them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tiers import long_beyond
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite
from amprewrite.tables.vocabulary import Colour

ROWS, CODES, DIM = 512, 64, 128
"""So many that low copies in front save more time than they cost."""
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOOR = {"bf16": 2e-3, "fp16": 5e-4}
Distances = Callable[[Tensor, Tensor], Tensor]


def student(d: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """The loss of deep embedded clustering: shares of a kernel, and the same ones sharpened."""
    q = 1 / (1 + d / 64)
    q = q / q.sum(-1, keepdim=True)
    p = q**2 / q.sum(0)
    p = (p / p.sum(1, keepdim=True)).detach()
    return (p * (p.log() - q.log())).sum(-1).mean()


def residuals(d: Tensor, z: Tensor, w: Tensor) -> Tensor:
    """What is left of rows once their codes are taken away, as in NetVLAD."""
    a = torch.softmax(-d / 16, -1)
    v = a.t() @ z - a.sum(0)[:, None] * w
    return F.normalize(v, dim=-1).square().mean(0).std() + v.square().mean()


DISTANCES: dict[str, Distances] = {
    "product last": lambda z, w: (z * z).sum(-1, keepdim=True) + (w * w).sum(-1) - 2 * z @ w.t(),
    "product second": lambda z, w: (z * z).sum(-1, keepdim=True) - 2 * z @ w.t() + (w * w).sum(-1),
    "differences": lambda z, w: ((z[:, None] - w) ** 2).sum(-1),
}
USES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "shares of them": lambda d, z, w: (torch.softmax(-d, -1) * d).sum(-1).mean(),
    "shares of codes": lambda d, z, w: (torch.softmax(-d, -1) @ w).square().mean(),
    "residuals": residuals,
    "the nearest four": lambda d, z, w: (torch.softmax(-d.topk(4, largest=False)[0] / 8, -1)).square().mean(),
    "the nearest code": lambda d, z, w: (w[d.argmin(-1)] - z).square().mean(),
    "classes": lambda d, z, w: F.cross_entropy(-d / 8, torch.arange(ROWS) % CODES),
    "a logarithm of sums": lambda d, z, w: torch.logsumexp(-d / 4, -1).mean(),
    "clusters": student,
}


class Codebook(nn.Module):
    def __init__(self, distances: Distances, use: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.codes = nn.Linear(DIM, DIM), nn.Parameter(torch.randn(CODES, DIM))
        self.distances, self.use = distances, use

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        z, w = self.enter(x), self.codes if codes is None else codes
        return self.use(self.distances(z, w), z, w)


def learnt(net: nn.Module, *inputs: Tensor) -> list[Tensor]:
    net.zero_grad()
    loss = net(*inputs)
    loss.backward()
    return [loss.detach().double(), *(p.grad.double() for p in net.parameters() if p.grad is not None)]


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize(("dtype", "given"), long_beyond(2, [("bf16", True), ("fp16", False), ("fp16", True), ("bf16", False)]))
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("distances", DISTANCES)
def test_errors_are_at_most_twice_those_of_autocast(distances: str, use: str, dtype: str, given: bool) -> None:
    net = Codebook(DISTANCES[distances], USES[use])
    inputs = [torch.randn(ROWS, DIM), *([torch.randn(CODES, DIM)] if given else [])]
    want = learnt(copy.deepcopy(net).double(), *(each.double() for each in inputs))
    with torch.autocast("cpu", dtype=LOW[dtype]):
        theirs = learnt(net, *inputs)
    ours = learnt(amprewrite.rewrite(copy.deepcopy(net), dtype=dtype), *inputs)
    assert worst(ours, want) <= 2 * worst(theirs, want) + FLOOR[dtype]


@pytest.mark.parametrize("begins, colour", [("input", Colour.HIGH), ("norm", Colour.HIGH), ("product", Colour.LOW)])
def test_a_stream_is_as_exact_as_what_it_begins_with(begins: str, colour: Colour) -> None:
    """A sum is fp32 if it adds a product to an input or to the result of a norm, which are more exact than a product, as under
    torch.autocast. A sum of products alone is rounded."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)) for _ in range(3))
            self.begin = {"input": nn.Identity(), "norm": nn.LayerNorm(DIM), "product": nn.Linear(DIM, DIM)}[begins]

        def forward(self, x: Tensor) -> Tensor:
            x = self.begin(x)
            for branch in self.branches:
                x = x + branch(x)
            return x.relu()

    plan = amprewrite.plan(Stream(), (torch.randn(ROWS, DIM),), dtype="bf16")
    assert [node.colour for node in plan.nodes if node.op == "add"] == [colour] * 3
