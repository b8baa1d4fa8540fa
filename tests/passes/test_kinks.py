"""Ops whose slope jumps or fades get the gradients of fp32, as long as no product has rounded their operands by as much."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tiers import long_beyond
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite
from amprewrite.tables.vocabulary import Reason

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLOOR = {"bf16": 2e-3, "fp16": 5e-4}
DIM, LENGTH, BATCH = 64, 32, 64
"""So large that low copies in front save more time than they cost."""


class Net(nn.Module):
    def __init__(self, made: Callable[[Net, Tensor, Tensor], Tensor], chosen: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(500, DIM), nn.Parameter(torch.randn(LENGTH, DIM))
        self.scale, self.leave = nn.Parameter(torch.randn(DIM)), nn.Linear(DIM, DIM)
        self.made, self.chosen = made, chosen

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        chosen = self.chosen(self.made(self, tokens, x), self.made(self, (tokens * 7 + 3) % 500, x.flip(0)))
        return self.leave(chosen).square().mean()


MADE: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "rows": lambda net, tokens, x: net.table(tokens),
    "rows and places": lambda net, tokens, x: net.table(tokens) + net.places,
    "rows scaled": lambda net, tokens, x: net.table(tokens) * net.scale,
    "normed rows": lambda net, tokens, x: F.layer_norm(net.table(tokens), (DIM,)),
    "an input": lambda net, tokens, x: x * net.scale,
}
CHOSEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sort": lambda t, u: t.sort(1)[0] * torch.arange(LENGTH)[:, None],
    "max": lambda t, u: t.max(1)[0],
    "amax": lambda t, u: t.amax(1),
    "median": lambda t, u: t.median(1)[0],
    "topk": lambda t, u: t.topk(4, 1)[0],
    "cummax": lambda t, u: t.cummax(1)[0],
    "maximum": torch.maximum,
    "fmax": torch.fmax,
    "max_pool1d": lambda t, u: F.max_pool1d(t.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "max_pool2d": lambda t, u: F.max_pool2d(t, 3, 1, 1),
    "where": lambda t, u: torch.where(t > u, t, u),
    "argmax": lambda t, u: t.gather(1, t.argmax(1, keepdim=True)),
    "clamp": lambda t, u: (t * u).clamp(-0.5, 0.5),
    "relu": lambda t, u: F.relu(t + u),
    "abs": lambda t, u: (t - u).abs(),
}


def gradients(net: nn.Module, tokens: Tensor, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    x = x.clone().requires_grad_()
    net(tokens, x).backward()
    return [grad.double() for grad in (x.grad, *(p.grad for p in net.parameters())) if grad is not None and grad.any()]


def worst(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", long_beyond(1, LOW))
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("made", MADE)
def test_gradients_are_at_most_twice_as_far_off_as_under_autocast(made: str, chosen: str, dtype: str) -> None:
    net = Net(MADE[made], CHOSEN[chosen])
    tokens, x = torch.randint(0, 500, (BATCH, LENGTH)), torch.randn(BATCH, LENGTH, DIM)
    want = gradients(copy.deepcopy(net).double(), tokens, x.double())
    with torch.autocast("cpu", dtype=LOW[dtype]):
        theirs = gradients(net, tokens, x)
    ours = gradients(amprewrite.rewrite(copy.deepcopy(net), dtype=dtype), tokens, x)
    assert worst(ours, want) <= 2 * worst(theirs, want) + FLOOR[dtype]


def assert_as_exact_as_autocast(net: nn.Module, tokens: Tensor, x: Tensor, dtype: str) -> None:
    """Each gradient is at most 1.5 times as far from fp64's as under torch.autocast."""
    want = gradients(copy.deepcopy(net).double(), tokens, x.double())
    with torch.autocast("cpu", dtype=LOW[dtype]):
        theirs = gradients(net, tokens, x)
    ours = gradients(amprewrite.rewrite(copy.deepcopy(net), dtype=dtype), tokens, x)
    for mine, other, exact in zip(ours, theirs, want, strict=True):
        assert (mine - exact).norm() <= 1.5 * (other - exact).norm() + 1e-9


@pytest.mark.parametrize("dtype", long_beyond(1, LOW))
@pytest.mark.parametrize("fades", [torch.tanh, torch.sigmoid, torch.erf, torch.erfc, F.softsign], ids=lambda fades: fades.__name__)
def test_a_slope_that_fades_is_as_exact_as_under_autocast(fades: Callable[[Tensor], Tensor], dtype: str) -> None:
    """The slope of tanh is 1 - y², a difference: if y is rounded where |y| is near one, most of the slope is noise."""
    net = Net(MADE["rows and places"], lambda t, u: fades(2 * (t + u)))
    tokens, x = torch.randint(0, 500, (BATCH, LENGTH)), torch.randn(BATCH, LENGTH, DIM)
    assert_as_exact_as_autocast(net, tokens, x, dtype)


class Sums(nn.Module):
    """Reads the sum of a product and of a value that is about twice as large."""

    def __init__(self, added: str, read: Callable[[Tensor], Tensor], length: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(100, width), nn.Parameter(torch.randn(length, width))
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, width)
        self.added, self.read = ADDED[added], read

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        return self.leave(self.read(self.enter(x) + self.added(self, tokens))).square().sum()  # type: ignore[no-any-return]


ADDED: dict[str, Callable[[Sums, Tensor], Tensor]] = {
    "rows": lambda net, tokens: net.table(tokens),
    "rows turned": lambda net, tokens: net.table(tokens).transpose(1, 2).contiguous().transpose(1, 2),
    "places": lambda net, tokens: net.places,
    "a norm": lambda net, tokens: F.layer_norm(net.table(tokens), net.table.weight.shape[1:]),
}


@pytest.mark.parametrize("dtype", long_beyond(1, LOW))
@pytest.mark.parametrize("read", [lambda s: s.softmax(-1), F.hardswish, torch.sigmoid], ids=["softmax", "hardswish", "sigmoid"])
@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize(("batch", "length", "width"), [(4, 128, 256), pytest.param(1, 1024, 1024, marks=pytest.mark.long)])
def test_a_sum_of_a_product_and_a_larger_value_is_as_exact_as_under_autocast(
    added: str, read: Callable[[Tensor], Tensor], dtype: str, batch: int, length: int, width: int
) -> None:
    net = Sums(added, read, length, width)
    tokens, x = torch.randint(0, 100, (batch, length)), torch.randn(batch, length, width)
    assert_as_exact_as_autocast(net, tokens, x, dtype)


class Scores(nn.Module):
    """Attention with a table of relative positions, as trained: its numbers are larger than the products they are added to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.positions = nn.Embedding(32, 8)
        nn.init.normal_(self.positions.weight, std=8)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (8, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1], device=x.device)
        table = self.positions((places[:, None] - places).clamp(-15, 16) + 15).permute(2, 0, 1)
        return ((q @ k.mT / q.shape[-1] ** 0.5 + table).softmax(-1) @ v).square().sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("length", "width"), [(128, 256), pytest.param(1024, 1024, marks=pytest.mark.long)])
def test_scores_and_a_table_of_relative_positions_are_as_exact_as_under_autocast(dtype: str, length: int, width: int) -> None:
    assert_as_exact_as_autocast(Scores(width), torch.zeros(()), torch.randn(1, length, width), dtype)


def test_what_has_no_gradients_costs_nothing() -> None:
    """The greatest of rounded values is the greatest value rounded."""
    net = Net(MADE["rows and places"], CHOSEN["amax"]).requires_grad_(False)
    plan = amprewrite.plan(net, (torch.randint(0, 500, (BATCH, LENGTH)), torch.randn(BATCH, LENGTH, DIM)), dtype="bf16")
    kept = [node.op for node in plan.nodes if node.reason in (Reason.UNROUNDED, Reason.MAGNIFIED)]
    assert set(kept) <= {"flip"}, "that of the second input is read by nothing"
