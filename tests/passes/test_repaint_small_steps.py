"""Sums of many small steps stay fp32; single ones, large ones, and what only looks like one do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiers import long_beyond, long_unless
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from versions import differs_in_2_11

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
    "keywords": lambda net, x: torch.sub(x, other=torch.mul(torch.div(net.inner(x), other=-2.0), other=0.2)),
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


@pytest.mark.parametrize("dtype", long_beyond(1, ["bf16", "fp16"]))
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


WIDE = 64


class Deep(nn.Module):
    """A residual stream with a norm in each branch, or around each sum."""

    def __init__(self, blocks: int, around: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.around, self.start, self.first = around, nn.Parameter(torch.randn(WIDE)), nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDE, elementwise_affine=False), nn.Linear(WIDE, WIDE), nn.GELU(), nn.Linear(WIDE, WIDE))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.start
        for block in self.blocks:
            x = block[0](x + block[1:](x)) if self.around else x + block(x)
        return F.layer_norm(x, (WIDE,))


@pytest.mark.parametrize("blocks", long_beyond(3, [2, 3, 12, 40]))
@pytest.mark.parametrize("around", [False, True])
def test_a_residual_stream_of_four_sums_or_more_is_summed_in_fp32(blocks: int, around: bool) -> None:
    """One of three sums is not. Norms in the branches and norms around the sums make no difference."""
    plan = amprewrite.plan(Deep(blocks, around), (torch.randn(4, WIDE),), dtype="bf16")
    carried = sum(node.reason is Reason.RUNNING_SUM for node in plan.nodes if node.op == "add")
    assert carried == (blocks + 1 if blocks >= 3 else 0)


class Language(nn.Module):
    """Rows of an embedding, blocks with PyTorch's default weights, and a head. `around`: norms stand around the sums, not in the blocks."""

    def __init__(self, blocks: int, width: int, around: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.around = around
        self.rows, self.norm, self.head = nn.Embedding(1000, width), nn.LayerNorm(width), nn.Linear(width, 1000, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(blocks)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.rows(ids)
        for block in self.blocks:
            x = block[0](x + block[1:](x)) if self.around else x + block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("blocks", "dtype", "around"),
    long_beyond(2, [(4, "bf16", False), (4, "fp16", True), (12, "bf16", True), (4, "bf16", True), (4, "fp16", False), (12, "bf16", False)]),
)
def test_a_stream_much_larger_than_its_branches_is_as_exact_as_under_autocast(blocks: int, dtype: str, around: bool) -> None:
    """At 1,024 tokens and width 1,024. Each rounding of the stream is larger than all that autocast rounds in a branch."""
    net, ids = Language(blocks, 1024, around).eval(), torch.randint(0, 1000, (1, 1024))
    with torch.no_grad():
        want = net(ids)
        with torch.autocast("cpu", getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])):
            theirs = error(net(ids), want)
        assert error(amprewrite.rewrite(net, dtype=dtype)(ids), want) <= 1.2 * theirs


def test_gradients_of_a_deep_residual_stream_are_as_exact_as_under_autocast() -> None:
    net, x = Deep(48), torch.randn(64, WIDE)
    weights = torch.randn(64, WIDE)

    def gradients(each: nn.Module) -> Tensor:
        net.zero_grad()
        (each(x) * weights).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])

    want = gradients(net)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = error(gradients(net), want)
    assert error(gradients(amprewrite.rewrite(net, dtype="bf16")), want) <= 1.5 * theirs


class Sampler(nn.Module):
    """Forty steps of one network, each scaled by a schedule."""

    def __init__(self, step: Callable[[Sampler, Tensor, Tensor, int], Tensor], conv: bool = False, steps: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step, self.steps = step, steps
        if conv:
            self.net = nn.Sequential(nn.Conv2d(9, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 8, 3, padding=1))
        else:
            self.net = nn.Sequential(nn.Linear(65, 128), nn.SiLU(), nn.Linear(128, 64))
        self.register_buffer("sigmas", torch.linspace(1.0, 0.0, steps + 1))
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 200), 0))
        self.register_buffer("size", torch.tensor(0.025))
        shape = (8 if conv else 64,) + (1, 1) * conv
        self.scale, self.whole = (nn.Parameter(torch.full(shape, size)) for size in (0.1, 0.8))
        self.rate, self.keep = nn.Parameter(torch.tensor([-3.0])), nn.Parameter(torch.full(shape, 3.0))

    def times(self, i: int) -> tuple[int, int]:
        return 199 - i * (199 // self.steps), max(199 - (i + 1) * (199 // self.steps), 0)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.steps):
            time = torch.full((x.shape[0], 1, *x.shape[2:]), 1 - i / self.steps)
            x = self.step(self, x, self.net(torch.cat([x, time], 1)), i)
        return x


def root(of: Tensor | float) -> Tensor | float:
    return of.sqrt() if isinstance(of, Tensor) else of**0.5


def ddim(x: Tensor, e: Tensor, now: Tensor | float, then: Tensor | float, bound: float = 0.0) -> Tensor:
    start = (x - root(1 - now) * e) / root(now)
    return root(then) * (start.clamp(-bound, bound) if bound else start) + root(1 - then) * e


def ddim_by_sample(net: Sampler, x: Tensor, e: Tensor, i: int) -> Tensor:
    now, then = (net.alphas[torch.full((len(x),), t)].view(-1, *[1] * (x.dim() - 1)) for t in net.times(i))
    return ddim(x, e, now, then)


def towards_start(net: Sampler, x: Tensor, e: Tensor, i: int) -> Tensor:
    return x + (x - e) / net.sigmas[i] * (net.sigmas[i + 1] - net.sigmas[i])


SAMPLERS = {
    "euler": lambda net, x, e, i: x + (net.sigmas[i + 1] - net.sigmas[i]) * e,
    "euler towards a start": towards_start,
    "ddim": lambda net, x, e, i: ddim(x, e, *(net.alphas[t] for t in net.times(i))),
    "ddim, one factor a sample": ddim_by_sample,
    "ddim with numbers": lambda net, x, e, i: ddim(x, e, *(0.999**t for t in net.times(i))),
    "ddim with bounds": lambda net, x, e, i: ddim(x, e, *(net.alphas[t] for t in net.times(i)), bound=4.0),
    "tanh": lambda net, x, e, i: x + torch.tanh(e) * net.size,
    "addcmul": lambda net, x, e, i: torch.addcmul(x, e, net.size),
    "lerp": lambda net, x, e, i: torch.lerp(x, e.float(), net.size),
    "lerp with keywords": lambda net, x, e, i: torch.lerp(x, weight=net.size, end=e.float()),
    "layer scale": lambda net, x, e, i: x + net.scale * e,
    "layer scale of nought": lambda net, x, e, i: x + (net.scale * 0.0 + net.scale.neg() * 0.2) * e,
    "one learnt number": lambda net, x, e, i: x + net.scale.mean().tanh() * e,
    "a learnt step": lambda net, x, e, i: x + F.softplus(net.rate) * e,
    "a learnt average": lambda net, x, e, i: torch.sigmoid(net.keep) * x + (1 - torch.sigmoid(net.keep)) * e,
    "an average by a schedule": lambda net, x, e, i: x + net.size * (e - x),
    "with another force": lambda net, x, e, i: x + net.size * e + net.size * 0.1 * torch.cos(x),
}
STREAMS = {
    "plain": lambda net, x, e, i: x + e,
    "scaled sum": lambda net, x, e, i: (x + e) / 2**0.5,
    "a large layer scale": lambda net, x, e, i: x + net.whole * e,
    "one and a small weight": lambda net, x, e, i: x + (1 + net.scale) * e,
    "made of a parameter": lambda net, x, e, i: x + (net.whole * 3).tanh() * e,
    "a gate of a product": lambda net, x, e, i: x + e.mean(1, keepdim=True) * e,
    "stochastic depth": lambda net, x, e, i: x + e * torch.empty(len(x), 1).bernoulli_(0.9),
    "padding": lambda net, x, e, i: x + e * (x[:, :1] > 0).float(),
    "masked sum": lambda net, x, e, i: (x + e) * net.size,
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("how", "conv"), [*((how, False) for how in SAMPLERS), ("euler", True), ("ddim", True)])
def test_samplers_are_as_exact_as_under_autocast(how, conv, dtype):
    net = Sampler(SAMPLERS[how], conv).eval()
    x = torch.randn(4, 8, 16, 16) if conv else torch.randn(1024, 64)
    with torch.no_grad():
        want = net(x)
        with torch.autocast("cpu", getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])):
            theirs = error(net(x), want)
        assert error(amprewrite.rewrite(net, dtype=dtype)(x), want) <= max(2 * theirs, {"bf16": 1e-2, "fp16": 2e-3}[dtype])


MAIN = {"euler", "ddim with bounds", "addcmul", "lerp with keywords", "layer scale", "a learnt average"}


@pytest.mark.parametrize("how", long_unless(MAIN.__contains__, SAMPLERS))
def test_samplers_keep_the_state_between_their_steps(how):
    plan = amprewrite.plan(Sampler(SAMPLERS[how]).eval(), (torch.randn(1024, 64),), dtype="bf16")
    assert sum(node.reason is Reason.SMALL_STEPS for node in plan.nodes) >= 39
    assert all(node.colour is Colour.LOW for node in plan.nodes if node.op in ("linear", "silu"))


@pytest.mark.parametrize("how", STREAMS)
def test_residual_streams_are_no_samplers(how):
    plan = amprewrite.plan(Sampler(STREAMS[how], steps=12), (torch.randn(64, 64),), dtype="bf16")
    assert not any(node.reason is Reason.SMALL_STEPS for node in plan.nodes)


class Checkpointed(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.scale = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), nn.Parameter(torch.full((64,), scale))

    def step(self, x: Tensor) -> Tensor:
        return x + self.scale * self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body[1](x)
        for _ in range(24):
            x = checkpoint(self.step, x, use_reentrant=False)
        return self.body[1](x)


@pytest.mark.parametrize("scale, kept", [(0.02, 24), (0.8, 0)])
def test_a_graph_inside_another_may_be_one_of_many_steps(scale: float, kept: int) -> None:
    net, x = Checkpointed(scale), torch.randn(64, 64)
    plan = amprewrite.plan(net, (x,), dtype="bf16")
    assert str(plan).count(Reason.SMALL_STEPS.value) == kept
    with torch.autocast("cpu", torch.bfloat16):
        theirs = error(net(x), net.float()(x)) if kept else 1.0
    assert error(amprewrite.rewrite(net, dtype="bf16")(x), net(x)) <= max(2 * theirs, 1e-2)


class Noisy(nn.Module):
    """A stochastic solver: what a network gives is scaled by noise, element by element, or by a mask, which is none."""

    def __init__(self, drawn: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.drawn = nn.Linear(64, 64), nn.Linear(64, 64), drawn

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        for i in range(40):
            force = torch.randn_like(x) * 0.015 if self.drawn else noise[i].to(x.dtype)
            x = x + torch.tanh(self.first(x)) * 0.025 + torch.sigmoid(self.second(x)) * force
        return x


@differs_in_2_11("low formats draw other numbers")
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("dtype", long_beyond(1, ["bf16", "fp16"]))
def test_noise_scales_small_steps(dtype: str, drawn: bool) -> None:
    net, given, found = Noisy(drawn), (torch.randn(64, 64) * 3, torch.randn(40, 64, 64) * 0.015), []
    for low, run in ((False, net), (True, net), (False, amprewrite.rewrite(net, dtype=dtype))):
        torch.manual_seed(1)
        with torch.no_grad(), torch.autocast("cpu", getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype]), enabled=low):
            found.append(run(*given))
    assert error(found[2], found[0]) <= max(2 * error(found[1], found[0]), {"bf16": 1e-2, "fp16": 2e-3}[dtype])


def test_a_mask_is_no_noise() -> None:
    plan = amprewrite.plan(Noisy(False), (torch.randn(64, 64), torch.randint(0, 2, (40, 64, 64))), dtype="bf16")
    assert not any(node.reason is Reason.SMALL_STEPS for node in plan.nodes)


@pytest.mark.parametrize("how", ["an input", "computed", "a whole mask"])
def test_a_padding_mask_of_one_dim_is_no_schedule(how: str) -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            keep = (torch.arange(len(x)) < 100)[:, None] if how == "computed" else keep
            for layer in self.layers:
                x = x + torch.relu(layer(x)) * keep
            return x

    keep = torch.rand(128, 64 if how == "a whole mask" else 1) < 0.9
    plan = amprewrite.plan(Padded(), (torch.randn(128, 64), keep), dtype="bf16", device="h100", lists="o3")
    assert not [node for node in plan.nodes if node.reason is Reason.SMALL_STEPS]
