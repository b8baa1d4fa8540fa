"""One computation has many spellings: operands by keyword or in a list, writes through views, dtypes in between. All are exact."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite
from amprewrite.tables.vocabulary import Colour

Body = Callable[["Net", Tensor], Tensor]
WIDE = torch.float32


class Net(nn.Module):
    """A product, a body, and a product."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.body = nn.Linear(64, 64), nn.Linear(64, 64), body
        self.weight = nn.Parameter(torch.rand(64) + 0.5)
        self.register_buffer("sign", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def written_by_keyword(write: Callable[[Tensor], object]) -> Body:
    def body(net: Net, x: Tensor) -> Tensor:
        h = net.first(x)
        total = h.detach().float().abs().mean()
        write(h)
        return net.last(h) + h + total

    return body


def rotated_in_place(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    torch.view_as_complex(h.view(-1, 32, 2)).mul_(torch.polar(torch.ones(32), torch.arange(32.0)))
    return net.last(h)


def bits_cleared_in_place(net: Net, x: Tensor) -> Tensor:
    h = net.first(x)
    h.detach().view(torch.int32).bitwise_and_(-(2**22))
    return net.last(h)


BODIES: dict[str, Body] = {
    "F.relu(input=, inplace=True)": written_by_keyword(lambda h: F.relu(input=h, inplace=True)),
    "torch.sigmoid_(input=)": written_by_keyword(lambda h: torch.sigmoid_(input=h)),
    "torch.exp_(input=)": written_by_keyword(lambda h: torch.exp_(input=h)),
    "_foreach_mul_(self=)": written_by_keyword(lambda h: torch._foreach_mul_(self=[h], scalar=0.5)),
    "a complex view": rotated_in_place,
    "a view as integers": bits_cleared_in_place,
    "binary_cross_entropy(target=, input=)": lambda net, x: F.binary_cross_entropy(
        target=(x > 0).float(), input=torch.sigmoid(4 * net.first(x)), reduction="none"),
    "group_norm(weight=, num_groups=, input=)": lambda net, x: net.last(
        F.group_norm(weight=net.weight, num_groups=4, input=net.weight * x + 300)),
    "torch.sum(input=)": lambda net, x: net.last((e := torch.exp(input=net.first(x))) / torch.sum(input=e, dim=-1, keepdim=True) * 64),
    "torch.rsqrt(input=)": lambda net, x: net.last(
        (h := net.first(x)) * torch.rsqrt(input=torch.mean(input=h * h, dim=-1, keepdim=True) + 1e-5) * net.weight),
    "torch.gru_cell(hx=, input=)": lambda net, x: torch.gru_cell(
        hx=net.first(x), input=x, w_ih=net.last.weight.repeat(3, 1), w_hh=net.first.weight.repeat(3, 1)),
}  # fmt: skip


def found(net: nn.Module, x: Tensor, around: contextlib.AbstractContextManager[object]) -> list[Tensor]:
    net.zero_grad()
    with around:
        result = net(x)
    result.float().square().mean().backward()
    return [result.detach().float(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize(("dtype", "bar"), [("bf16", 2e-2), ("fp16", 3e-3)])
def test_each_spelling_gives_the_numbers_of_fp32(name: str, dtype: str, bar: float) -> None:
    net, x = Net(BODIES[name]), torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    want = found(net, x, contextlib.nullcontext())
    got = found(amprewrite.rewrite(net, dtype=dtype, strict=True), x, contextlib.nullcontext())
    assert len(got) == len(want)
    for ours, exact in zip(got, want, strict=True):
        assert (ours - exact).norm() <= bar * exact.norm()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_buffer_that_is_written_by_keyword_is_written_once_a_call(dtype: str) -> None:
    net = Net(lambda net, x: net.first(x) * torch.neg_(input=net.sign))
    amp = amprewrite.rewrite(net, dtype=dtype)
    signs = []
    for _ in range(4):
        amp(torch.ones(4, 64))
        signs.append(float(net.sign[0]))
    assert signs == [-1, 1, -1, 1]


class AddsConstant(torch.autograd.Function):
    """Its backward adds zeros that were written through a view: it is not linear, and must not get scaled gradients."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        added = torch.zeros(gradient.shape)
        added[:, :8].fill_(0.5)
        return gradient + added


def test_zeros_that_are_written_through_a_view_are_no_zeros() -> None:
    net = Net(lambda net, x: net.last(AddsConstant.apply(net.first(x)).relu()))
    x = torch.randn(128, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    amp = amprewrite.rewrite(net, dtype="fp16", optimizer=optimizer)
    for _ in range(4):  # the first steps may overflow
        got = found(amp, x, contextlib.nullcontext())
        optimizer.step()
    want = found(net, x, contextlib.nullcontext())
    for ours, exact in zip(got, want, strict=True):
        assert (ours - exact).norm() <= 5e-3 * exact.norm()


@pytest.mark.parametrize("how", ["watches", "writes"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_hook_may_return_nothing(how: str, dtype: str) -> None:
    def hook(gradient: Tensor) -> None:
        if how == "writes":
            gradient.mul_(0.1)

    def body(net: Net, x: Tensor) -> Tensor:
        h = net.first(x)
        if h.requires_grad:
            h.register_hook(hook)
        return net.last(h.relu())

    net, x = Net(body), torch.randn(128, 64)
    want = found(net, x, contextlib.nullcontext())
    got = found(amprewrite.rewrite(net, dtype=dtype), x, contextlib.nullcontext())
    for ours, exact in zip(got, want, strict=True):
        assert (ours - exact).norm() <= 2e-2 * exact.norm()


def low_products(net: nn.Module, x: Tensor) -> list[bool]:
    amp = amprewrite.rewrite(net, dtype="bf16", strict=True)
    amp(x).sum().backward()
    return [node.colour is Colour.LOW for node in amp.plan.nodes if node.op in ("linear", "matmul")]


@pytest.mark.parametrize(
    "write", [lambda scores: scores.div_(0.7), lambda scores: scores.masked_fill_(scores < -1, -1e4), lambda scores: scores.add_(1.0)]
)
def test_a_product_runs_low_if_its_fp32_copy_is_written(write: Callable[[Tensor], object]) -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        scores = net.first(x).float()
        write(scores)
        return scores.softmax(-1)

    assert low_products(Net(body), torch.randn(128, 64)) == [True]


def test_fp32_by_the_name_of_a_constant_is_fp32() -> None:
    net = Net(lambda net, x: net.first(x).to(WIDE).softmax(-1) + net.last(x).to(x.dtype))
    plan = amprewrite.plan(net, (torch.randn(64, 64),), dtype="bf16", device="h100")
    assert [node.colour for node in plan.nodes if node.op == "softmax"] == [Colour.HIGH]


def test_weights_in_fp8_that_are_buffers_do_not_keep_a_graph_in_fp32() -> None:
    net = Net(lambda net, x: net.last(F.linear(x, net.low.to(x.dtype) * net.weight[:, None])))
    net.register_buffer("low", torch.randn(64, 64).to(torch.float8_e4m3fn))
    assert low_products(net, torch.randn(128, 64)) == [True, True]


def test_a_region_of_another_device_has_no_effect() -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=False):
            return net.last(net.first(x).relu())

    assert low_products(Net(body), torch.randn(128, 64)) == [True, True]


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_result_in_fp32_that_the_graph_writes_is_returned_as_written(backend: str, written: bool) -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        h = torch.tanh(net.first(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = net.last(h)
        logits = logits.float()
        if written:
            logits[:, 50:] = -5.0
        return logits

    net, x = Net(body), torch.randn(128, 64)
    want = found(net, x, contextlib.nullcontext())
    got = found(amprewrite.rewrite(net, dtype="bf16", backend=backend), x, contextlib.nullcontext())
    for ours, exact in zip(got, want, strict=True):
        assert (ours - exact).norm() <= 2e-2 * exact.norm()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_copy_made_without_gradients_takes_none(backend: str) -> None:
    def body(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            teacher = net.last(torch.tanh(net.first(x)))
        with torch.no_grad():
            target = teacher.float()
        return net.first(x), target

    result, target = amprewrite.rewrite(Net(body), dtype="bf16", backend=backend)(torch.randn(128, 64))
    assert result.requires_grad and not target.requires_grad


@pytest.mark.parametrize("pole", [torch.rsqrt, torch.reciprocal, lambda p: p**-0.5, lambda p: p.pow(-1)], ids=["rsqrt", "1/x", "**", "pow"])
def test_values_before_a_pole_that_runs_in_fp32_are_not_flushed(pole: Callable[[Tensor], Tensor]) -> None:
    def body(net: Net, x: Tensor) -> Tensor:
        return pole(torch.softmax(8 * net.first(x), -1)).clamp(max=1e12).sum(-1)

    net, x = Net(body), torch.randn(256, 64)
    want, got = net(x), amprewrite.rewrite(net, dtype="fp16")(x)
    assert (got - want).norm() <= 5e-2 * want.norm()


SLOPES = (2.0 ** -torch.arange(1, 9.0)).view(1, 8, 1, 1) * torch.arange(512.0)
BLOCKED = torch.triu(torch.full((512, 512), -1e9), 1)
TABLES = {
    "ALiBi": (SLOPES, Colour.HIGH), "ALiBi and a mask": (SLOPES + BLOCKED, Colour.HIGH),
    "relative positions": (2 * torch.randn(1, 8, 512, 512, generator=torch.Generator().manual_seed(0)), Colour.HIGH),
    "a mask": (BLOCKED, Colour.LOW), "a mask of -100": (BLOCKED.clip(-100), Colour.LOW),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_table_of_positions_is_added_to_scores_in_fp32(dtype: str, name: str) -> None:
    table, colour = TABLES[name]

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.key = nn.Linear(64, 64, bias=False)
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            k = self.key(x)
            return torch.softmax(x @ k.mT * 0.125 + self.table[..., : x.shape[-2]], -1) @ k

    net, x = Attention(), torch.randn(1, 8, 512, 64)
    with torch.no_grad():
        amp = amprewrite.rewrite(net, dtype=dtype)
        want, got = net(x), amp(x)
    assert (got - want).norm() <= {"bf16": 8e-3, "fp16": 1e-3}[dtype] * want.norm()
    assert [node.colour for node in amp.plan.nodes if node.op == "add"] == [colour]
