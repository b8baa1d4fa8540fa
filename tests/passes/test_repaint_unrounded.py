"""What no product has rounded yet stays fp32 in front of what would magnify a rounding, and costs nothing elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from chains import decided, letters
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.tables.vocabulary import Colour, Reason

ROWS = 2048
"""So many that low copies in front save more time than they cost."""
KEPT = (Reason.UNROUNDED, Reason.MAGNIFIED, Reason.TOLD_APART)
FLOOR = {"bf16": 1e-2, "fp16": 2e-3}


class Net(nn.Module):
    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.how = forward
        self.register_buffer("schedule", torch.linspace(0.9999, 0.98, ROWS))
        self.register_buffer("mean", torch.full((1, 16), 1000.0))
        self.shift = nn.Parameter(torch.full((16,), 50.0))
        self.offset = nn.Parameter(torch.randn(16, 16) + 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def small(x: Tensor) -> Tensor:
    """Values around nought, of inputs that lie between 1000 and 1001."""
    return x - 1000


CASES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a number is taken away": lambda net, x: net.a((x - 1000) / 0.5),
    "from least to greatest": lambda net, x: net.a((x - x.amin(0)) / (x.amax(0) - x.amin(0))),
    "a batch norm first": lambda net, x: net.a(net.norm(x)),
    "a prior of scores": lambda net, x: net.b(F.softmax(net.a(x) + net.mean, -1)),
    "a layer norm first": lambda net, x: net.a(F.layer_norm(x, (16,))),
    "a softmax first": lambda net, x: net.a(F.softmax(x, -1)),
    "differences along a dim": lambda net, x: net.a(F.relu(x[1:] - x[:-1])),
    "an average is taken away": lambda net, x: net.a(x - F.avg_pool1d(x, 3, 1, 1)),
    "what is left of a number": lambda net, x: net.a(x - x.floor()),
    "one less a value near one": lambda net, x: net.b(net.a(small(x)) / (1 - net.schedule[:, None]).sqrt() * 1e-2),
    "a threshold": lambda net, x: net.a(torch.where(x > 1000.5, small(x), -small(x))),
    "pairs": lambda net, x: net.a((x[:128, None] - x[None, :16]).abs().sqrt()),
    "a power": lambda net, x: net.a(((x - 999) / 2).pow(3)),
    "weights less their mean": lambda net, x: F.linear(small(x), net.offset - net.offset.mean(1, keepdim=True)),
    "mean and deviation come back": lambda net, x: net.a((x - net.mean) * 0.5) * 0.5 + net.mean - 1000,
    "an input is added and taken away": lambda net, x: net.b((net.a(small(x)) + x) - x),
    "a norm of a shifted product": lambda net, x: F.layer_norm(net.a(small(x)) + net.shift, (16,)),
    "a norm of a product seen otherwise": lambda net, x: F.layer_norm((net.a(small(x)) + net.shift).view(-1, 4, 16), (16,)),
    "a norm of a product and an input": lambda net, x: F.layer_norm(net.a(small(x)) + x, (16,)),
    "a batch norm of a product and an input": lambda net, x: net.norm(net.a(small(x)) + x),
    "in a checkpoint": lambda net, x: net.b(checkpoint(lambda t: net.a((t - 1000) / 0.5), x, use_reentrant=False)),
    "a small correction": lambda net, x: (x + 1e-3 * net.a(small(x))).clamp(0, 2000),
}


def worst(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_errors_are_no_larger_than_those_of_autocast(name, dtype):
    net, x = Net(CASES[name]), torch.rand(ROWS, 16) + 1000
    amp = amprewrite.rewrite(net, dtype=dtype)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.simplefilter("error", amprewrite.AmpRewriteWarning)
            want, got = net(x), amp(x)
            with torch.autocast("cpu", dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]):
                other = net(x)
        taken = 1000.0 if name == "a small correction" else 0.0
        limit = max(FLOOR[dtype], 2 * worst(other.float() - taken, want - taken))
        assert worst(got - taken, want - taken) <= limit


def test_a_loss_in_the_model_sees_small_differences() -> None:
    """What a product gave is added to a large mean, and compared with a large target: the gradient is their difference."""
    net, x = Net(lambda net, x: F.mse_loss(net.a(small(x)) * 0.5 + net.mean, x)), torch.rand(ROWS, 16) + 1000
    amp = amprewrite.rewrite(net, dtype="bf16")
    net(x).backward()
    want, net.a.weight.grad = net.a.weight.grad, None
    amp(x).backward()
    assert worst(net.a.weight.grad, want) < 1e-2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_logarithm_tells_small_shares_apart(dtype: str) -> None:
    """torch.autocast on a CPU makes shares in fp16, and gives infinities here."""
    net, x = Net(lambda net, x: (F.softmax(net.a(small(x)) * 20, -1) + 1e-9).log()), torch.rand(ROWS, 16) + 1000
    assert worst(amprewrite.rewrite(net, dtype=dtype)(x), net(x)) < FLOOR[dtype]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "Gumbel": lambda like: -torch.log(-torch.log(torch.rand_like(like) + 1e-20)),
    "exponential": lambda like: -torch.log(1 - torch.rand_like(like)),
    "exponential in place": lambda like: -torch.log1p(-torch.empty_like(like).uniform_()),
    "a bounded draw": lambda like: torch.log(1 - torch.rand_like(like).clamp(1e-6, 1 - 1e-6).view(-1, 16)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("of", ["a product", "an input"])
def test_a_uniform_draw_before_a_logarithm_is_exact(name: str, of: str) -> None:
    """bf16 rounds one draw in five hundred up to one, where the logarithm is infinite. torch.autocast draws so for a low tensor."""
    net = Net(lambda net, x: net.b(net.a(x) + DRAWS[name](net.a(x) if of == "a product" else x)))
    x = torch.randn(ROWS, 16)
    amp = amprewrite.rewrite(net, dtype="bf16")
    for _ in range(2):
        torch.manual_seed(3)
        want = net(x)
        torch.manual_seed(3)
        assert worst(amp(x), want) < FLOOR["bf16"]


NOISES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "router jitter": lambda net, x: net.b(net.a(x) * torch.empty_like(x).uniform_(0.99, 1.01)),
    "jitter of a stream": lambda net, x: net.b(F.layer_norm(x + net.a(x), (16,)) * torch.empty_like(x).uniform_(0.99, 1.01)),
    "a latent": lambda net, x: net.b(F.relu(net.a(torch.empty_like(x).uniform_(-1, 1)))),
    "rand": lambda net, x: net.b(F.relu(net.a(torch.rand_like(x)))),
    "whole numbers": lambda net, x: net.b(net.a(x) * torch.randint_like(net.a(x), 0, 1000) / 1000),
}


@pytest.mark.parametrize("name", NOISES)
def test_a_uniform_draw_is_that_of_fp32(name: str) -> None:
    """PyTorch turns a draw that rounds up to the upper bound into the lower bound: 30 % of (0.99, 1.01) in bf16."""
    net, x = Net(NOISES[name]), torch.randn(ROWS, 16)
    amp = amprewrite.rewrite(net, dtype="bf16")
    torch.manual_seed(3)
    want = net(x)
    torch.manual_seed(3)
    assert worst(amp(x), want) < FLOOR["bf16"]
    assert Reason.DRAWN in {node.reason for node in amp.plan.nodes}


NEAREST: dict[str, Callable[[Tensor], Tensor]] = {
    "argmin": lambda distances: distances.argmin(1),
    "the places of min": lambda distances: distances.min(1).indices,
    "the last of topk": lambda distances: distances.topk(3, largest=False)[1][:, 0],
    "all that are near": lambda distances: distances < 12.0,
}


@pytest.mark.parametrize("name", NEAREST)
def test_the_nearest_code_is_found_as_often_as_under_autocast(name: str) -> None:
    """Distances are one small number left of three larger ones, of which the products are rounded, and the codes' squares are not."""

    def quantized(net: nn.Module, x: Tensor) -> Tensor:
        found = net.a(x)
        distances = found.square().sum(1, keepdim=True) - 2 * found @ net.codes.t() + net.codes.square().sum(1)
        return NEAREST[name](distances)

    torch.manual_seed(1)
    net, x = Net(quantized), torch.randn(ROWS, 16)
    net.register_buffer("codes", torch.randn(64, 16))
    amp = amprewrite.rewrite(net, dtype="bf16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        other = net(x)
    want, got = net(x), amp(x)
    assert int((got != want).sum()) <= 2 * int((other != want).sum()) + 4


def reasons(how: Callable[[nn.Module, Tensor], Tensor], **options: object) -> list[str]:
    plan = amprewrite.plan(Net(how), (torch.randn(ROWS, 16),), dtype="bf16", **options)
    return [node.op for node in plan.nodes if node.reason in KEPT]


@pytest.mark.parametrize(
    "how",
    [
        lambda net, x: net.a(x.view(16, -1).t().contiguous().abs() * 3.0),
        lambda net, x: net.b(F.layer_norm(net.a(x), (16,)) * 2 + net.a.bias),
        lambda net, x: net.b((net.a(x) * net.a.bias).relu()),
        lambda net, x: net.b(F.softmax(net.a(x) + net.a.bias, -1)),
    ],
    ids=["relative errors are handed on", "a bias apart from its product", "a factor", "a bias of scores"],
)
def test_the_rest_is_left_to_its_price(how):
    assert reasons(how) == []


def test_an_override_is_followed() -> None:
    assert reasons(CASES["a number is taken away"], overrides={"sub": "low"}) == []


def test_bodies_know_what_products_made() -> None:
    """The input of the first checkpoint is as exact as it came, that of the second is not."""

    def twice(net: nn.Module, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda t: net.a(F.layer_norm(t, (16,))), x, use_reentrant=False)
        return x

    plan = amprewrite.plan(Net(twice), (torch.randn(ROWS, 16),), dtype="bf16")
    assert [node.colour for node in plan.nodes if node.op == "layer_norm"] == [Colour.HIGH, Colour.LOW]


@pytest.mark.parametrize(
    "text, colours",
    [
        pytest.param("m=matmul l=log(m) a=mean(l) d=sub(l,a) matmul(d)", "L H H H L", id="less its mean"),
        pytest.param("m=matmul l=log2(m) n=layer_norm(l) matmul(n)", "L H H L", id="normed"),
        pytest.param("m=matmul l=log10(m) s=std(l) d=div(l,s) matmul(d)", "L H H H L", id="by its deviation"),
        pytest.param("m=matmul l=log(m) matmul(l)", "L L L", id="read by a product"),
    ],
)
def test_a_logarithm_of_a_product_has_an_offset(text, colours):
    """Its mean is the logarithm of a scale, and may dwarf the differences that a norm enlarges. torch.autocast holds it in fp32 on CUDA."""
    assert letters(decided(text, "default", device="cuda")) == colours


class OfWeights(nn.Module):
    """A product with a weight that two ops make of parameters."""

    def __init__(self, make: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.other, self.make = nn.Parameter(torch.randn(512, 512)), nn.Parameter(torch.randn(512, 512)), make

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.make(self.weight, self.other))


MADE_OF_WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "standardized": lambda w, v: (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5),
    "divided by its norm": lambda w, v: w / torch.vdot(v.sum(0), torch.mv(w, v.sum(1))).abs().sqrt(),
    "a drawn weight": lambda w, v: w + v * v.abs(),
    "two factors": lambda w, v: w * v + w,
}


@pytest.mark.parametrize("made", MADE_OF_WEIGHTS)
def test_arithmetic_on_weights_alone_rounds_once(made: str) -> None:
    """Each low op of it would round a whole weight once more, and cast each weight that it reads."""
    net, x = OfWeights(MADE_OF_WEIGHTS[made]), torch.randn(1024, 512)
    amp = amprewrite.rewrite(net, dtype="bf16", example_inputs=(x,))
    amp(x).square().mean().backward()
    ours = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = net(x)
    theirs.float().square().mean().backward()
    for mine, parameter in zip(ours, net.parameters(), strict=True):
        assert (mine is None) == (parameter.grad is None)
        if mine is not None:
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-6 * float(parameter.grad.abs().max()))
    assert len(amp.plan.casts) == 3, [str(cast) for cast in amp.plan.casts]  # of the input, of the weight that is made, of the result
