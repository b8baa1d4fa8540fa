"""Products inside loops, conditions, scans, maps and autograd Functions run low, with fp32 at the border of the graph that holds them."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from runtime_help import data
from tiers import long_beyond
from torch import nn
from torch._higher_order_ops import map as map_op
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.associative_scan import associative_scan
from torch.utils.checkpoint import checkpoint
from versions import differs_in_2_11

import amprewrite
from amprewrite.tables.errors import AmpRewriteWarning, CaptureError
from amprewrite.tables.vocabulary import Colour, Reason


class Product(torch.autograd.Function):
    """A product with a backward of its own."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        assert g.dtype == torch.float32
        return gradients(g, *ctx.saved_tensors)


def gradients(g, x, w):
    return g @ w.t(), x.t() @ g


class Bounded(Product):
    """The same, with a backward that is not linear."""

    @staticmethod
    def backward(ctx, g):
        return gradients(g.clamp(-1, 1), *ctx.saved_tensors)


class Filled(Product):
    """The same; what its backward fills in, where a value is NaN, is no gradient times a factor."""

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return gradients(torch.masked_fill(g, (x @ w).isnan(), value=1.0), x, w)


class Half(Product):
    """The same, computed in fp16 by its author, as quantised layers do."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return (x.half() @ w.half()).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        return in_half(g, *ctx.saved_tensors)


def in_half(g, x, w):
    return tuple(each.float() for each in gradients(g.to(torch.float16), x.half(), w.half()))


class BoundedHalf(Half):
    @staticmethod
    def backward(ctx, g):
        return in_half(g.clamp(-1, 1), *ctx.saved_tensors)


class Inside(nn.Module):
    """Products in inner graphs alone."""

    def __init__(self, kind: str, product: type[Product] = Product) -> None:
        super().__init__()
        self.kind, self.linear, self.product = kind, nn.Linear(8, 8), product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.kind)(x)

    def cond(self, x):
        return torch.cond(x.sum() > 100, lambda x: torch.relu(x), lambda x: torch.tanh(self.linear(x)), (x,))

    def loop(self, x):
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.tanh(self.linear(x))), (torch.tensor(0), x))[1]

    def scan(self, x):
        return scan(lambda c, y: (torch.tanh(c @ self.linear.weight + y), c.clone()), torch.zeros(8), x)[1]

    def map(self, x):
        return map_op(lambda row, w: torch.tanh(row @ w), x, self.linear.weight)

    def nested(self, x):
        def body(i, x):
            return i + 1, torch.cond(x.sum() > 100, lambda x: x.sin(), lambda x: torch.tanh(self.linear(x)), (x,))

        return while_loop(lambda i, x: i < 2, body, (torch.tensor(0), x))[1]

    def function(self, x):
        return self.product.apply(x, self.linear.weight)

    def associative(self, x):
        return associative_scan(lambda a, b: torch.tanh(a @ self.linear.weight) + b, x, 0, combine_mode="generic")


KINDS = ("cond", "loop", "scan", "map", "nested", "function")


def heavy(plan: amprewrite.CastPlan) -> list[str]:
    return [node.colour.value for region in plan.regions for node in region.nodes if node.flops]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).detach().norm() / want.detach().norm())


@differs_in_2_11("scan gives its weights no gradient")
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", KINDS)
def test_bodies_run_low_and_gradients_stay_right(kind, grad):
    torch.manual_seed(0)
    model, x = Inside(kind), data(6, 8)
    amp = amprewrite.rewrite(model, dtype="bf16")
    with warnings.catch_warnings(), torch.set_grad_enabled(grad):
        warnings.simplefilter("error", AmpRewriteWarning)
        got, want = amp(x), model(x)
    assert set(heavy(amp.plan)) == {"low"} and "100.0 % of matmul" in str(amp.plan)
    assert 1e-4 < error(got, want) < 1e-2 and got.dtype == torch.float32
    if grad:
        for each in (got, want):
            each.square().sum().backward()
            if each is got:
                grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
                model.zero_grad()
        assert grads
        for name, p in model.named_parameters():
            if p.grad is not None:
                assert error(grads[name], p.grad) < 2e-2, name


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("kind", ["associative", "function"])
def test_fp16_gradients_of_bodies_are_finite_and_unscaled(kind, optimizer):
    """The loss scale never reaches what is read after the first forward, with an optimizer or none."""
    torch.manual_seed(0)
    model, x = Inside(kind), data(6, 8)
    model(x).square().sum().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.0)} if optimizer else {}
    amp = amprewrite.rewrite(model, dtype="fp16", **options)
    for _ in range(2):
        model.zero_grad()
        amp(x).square().sum().backward()
        assert want
        for name, exact in want.items():
            assert error(model.get_parameter(name).grad, exact) < 2e-3, name


class Between(nn.Module):
    """An inner graph between two layers; `kind` says which."""

    def __init__(self, kind: str, product: type[Product]) -> None:
        super().__init__()
        self.kind, self.first, self.inside, self.last = kind, nn.Linear(8, 8), Inside("function", product), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "function in a condition":
            weight, product = self.inside.linear.weight, self.inside.product
            x = torch.cond(x.sum() > 100, lambda x: torch.relu(x), lambda x: torch.tanh(product.apply(x @ weight, weight)), (x,))
        elif self.kind.startswith("function in a"):
            x = checkpoint(self.inside, x, use_reentrant="reentrant" in self.kind)
        else:
            x = self.inside(x)
        return self.last(x)


BACKWARDS = ((Product, Reason.UNSEEN), (Half, Reason.HALF), (Bounded, Reason.UNSCALED), (Filled, Reason.UNSCALED))


@pytest.mark.parametrize("product, reason", BACKWARDS)
@pytest.mark.parametrize(
    "kind", long_beyond(3, ["function", "function in a condition", "function in a checkpoint", "function in a reentrant checkpoint"])
)
def test_gradients_below_fp16_are_not_lost_in_a_backward_of_the_user(kind, product, reason):
    """A linear one gets them scaled. Another sees them as they are: fp16 would flush those of a loss of 1e-7, and the plan says so."""
    torch.manual_seed(0)
    plain, x = Between(kind, Product), data(6, 8)
    (plain(x).square().mean() * 1e-7).backward()
    want = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    model = Between(kind, product)
    model.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp = amprewrite.rewrite(model, dtype="fp16", optimizer=optimizer)
    (amp(x).square().mean() * 1e-7).backward()
    assert len(want) == 5
    for name, exact in want.items():
        assert error(model.get_parameter(name).grad, exact) < 5e-3, name
    assert any(node.reason is reason and node.flops for region in amp.plan.regions for node in every(region))
    low = amprewrite.plan(model, (x,), dtype="bf16")
    assert set(heavy(low)) <= {"low", "plain"}, "bf16 flushes nothing"


class Wide(nn.Module):
    """A Function that reads a value beyond fp16, times a weight of zero, so that its result does not show it."""

    def __init__(self, product: type[Product]) -> None:
        super().__init__()
        self.product, self.weight = product, nn.Parameter(torch.cat([torch.zeros(1, 8), data(7, 8)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.apply(torch.cat([x[:, :1] * 131070.0, x[:, 1:]], 1), self.weight)


@pytest.mark.parametrize("scale", [None, 1.0, "dynamic"])
@pytest.mark.parametrize("product", [Product, Bounded])
def test_what_a_backward_of_the_user_reads_may_be_beyond_fp16(product, scale):
    """No sample run shows what it reads: without a loss scale it read this in fp16, and gave an infinite gradient."""
    torch.manual_seed(0)
    model, x = Wide(product), data(6, 8)
    model(x).mean().backward()
    want = model.weight.grad.clone()
    model.zero_grad()
    amprewrite.rewrite(model, dtype="fp16", loss_scale=scale)(x).mean().backward()
    assert error(model.weight.grad, want) < 2e-3


def test_the_forward_of_a_function_runs_low_in_fp16():
    """Its results were taken for unread: they stand in a tuple of their own, before what it saves."""
    plan = amprewrite.plan(Inside("function", Product), (data(6, 8),), dtype="fp16")
    colours = [node.colour for region in plan.regions if "fwd_body" in region.name for node in region.nodes if node.flops]
    assert colours == [Colour.LOW]


def test_a_backward_that_flushes_gradients_and_is_not_linear_is_told():
    torch.manual_seed(0)
    model = Between("function", BoundedHalf)
    amp = amprewrite.rewrite(model, dtype="fp16")
    with pytest.warns(AmpRewriteWarning, match="bwd_body_0 of graph0 computes in the low format itself.*; compute in fp32 or bf16 there"):
        amp(data(6, 8)).square().mean().backward()


def every(region):
    yield from region.nodes
    for body in region.bodies:
        yield from every(body)


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_is_explained_overridden_and_followed(kind):
    torch.manual_seed(0)
    model, x = Inside(kind), data(6, 8)
    with torch.no_grad():
        plan = amprewrite.plan(model, (x,), dtype="bf16")
        op = next(node.op for region in plan.regions for node in region.nodes if node.flops)
        assert heavy(amprewrite.plan(model, (x,), dtype="bf16", overrides={op: "deny"})) == ["high"] * len(heavy(plan))
        again = amprewrite.rewrite(model, plan=amprewrite.CastPlan.from_json(plan.to_json()))
        again(x)
    assert heavy(again.plan) == heavy(plan)


def test_a_weight_beyond_fp16_stays_high_in_a_body():
    model, x = Inside("loop"), data(6, 8) / 1e6
    with torch.no_grad():
        model.linear.weight[0, 0] = 1e5
        amp = amprewrite.rewrite(model, dtype="fp16")
        assert torch.allclose(amp(x), model(x), rtol=1e-2, atol=1e-2)
    assert heavy(amp.plan) == ["high"]


@pytest.mark.parametrize("kind", ["cond", "loop", "scan", "map", "nested"])
def test_a_weight_beyond_fp16_stays_high_in_an_exported_body(kind):
    """A program is exported before any call: nothing but the weights tells what fits."""
    model, x = Inside(kind).eval(), data(6, 8) / 1e6
    with torch.no_grad():
        model.linear.weight[0, 0] = 1e5
        exported = amprewrite.rewrite(model, dtype="fp16").export_program((x,))
        assert torch.equal(exported.module()(x), model(x))


def test_what_cannot_be_rewritten_is_counted_listed_and_said(monkeypatch):
    monkeypatch.setattr("amprewrite.passes.driver.KEPT", {"while_loop": "it stays for this test"})
    model, x = Inside("loop"), data(6, 8)
    amp = amprewrite.rewrite(model, dtype="bf16")
    with torch.no_grad():
        with pytest.warns(AmpRewriteWarning, match="body_fn_0 of graph0 stays fp32: it stays for this test"):
            got = amp(x)
        assert torch.equal(got, model(x))
        assert heavy(amp.plan) == ["high"] and any("stays for this test" in part.why for part in amp.plan.skipped)
        with pytest.raises(CaptureError, match="stays for this test"):
            amprewrite.rewrite(model, dtype="bf16", strict=True)(x)


@pytest.mark.parametrize("kind", ["cond", "loop", "scan"])
def test_exported(kind):
    torch.manual_seed(0)
    model, x = Inside(kind).eval(), data(6, 8)
    with torch.no_grad():
        exported = amprewrite.rewrite(model, dtype="bf16").export_program((x,))
        assert 1e-4 < error(exported.module()(x), model(x)) < 1e-2


@pytest.mark.parametrize("asked", [None, torch.float32])
def test_what_custom_fwd_asks_for_is_kept(asked):
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=asked)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w.t(), x.t() @ g

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            return Product.apply(self.a(x), self.a.weight)

    amp = amprewrite.rewrite(Net(), dtype="bf16")
    amp(torch.randn(4, 8)).sum().backward()
    (product,) = [node for region in amp.plan.regions if "fwd_body" in region.name for node in region.nodes if node.op == "matmul"]
    assert product.dtype == ("fp32" if asked else "bf16")
    assert ("torch.amp.custom_fwd" in product.detail) is (asked is not None)


def large_scan(x, w):
    """Sums, and products that overflow in fp16 on their way."""
    return scan(lambda c, row: (c + row, F.linear((c + row) * 2.0**17, w) * 2.0**-17), torch.zeros(8), x)


def unread_scan(x, w):
    return large_scan(x, w)[0]


def unread_cond(x, w):
    def body(x):
        return torch.tanh(x @ w), F.linear(x * 2.0**17, w) * 2.0**-17

    return torch.cond(x.sum() > 1e9, lambda x: (x.sin(), x.cos()), body, (x,))[0]


def unread_map(x, w):
    return map_op(lambda row, w: (torch.tanh(w @ row), (w @ (row * 2.0**17)) * 2.0**-17), x, w)[0]


def read_in_vain(x, w):
    """Its reader is unread itself."""
    result, large = large_scan(x, w)
    torch.tanh(large)
    return result


def compared_scan(x, w):
    result, large = large_scan(x, w)
    return result * (large > 0)


def step_of_scan(x, w):
    result, large = large_scan(x, w)
    return result * torch.sign(large)


@pytest.mark.parametrize("scale", long_beyond(1, ["dynamic", None]))
@pytest.mark.parametrize("function", [unread_scan, unread_cond, unread_map, read_in_vain, compared_scan, step_of_scan])
def test_a_result_that_nobody_reads_spoils_no_gradient(function, scale):
    """Autograd gives it a gradient of zeros, and zero times an infinity in a body is NaN."""
    torch.manual_seed(0)
    linear = nn.Linear(8, 8)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return function(self.linear(x), self.linear.weight)

    x = data(6, 8)
    amp = amprewrite.rewrite(Model(), dtype="fp16", loss_scale=scale)
    amp(x).sum().backward()
    assert linear.weight.grad.isfinite().all()
    assert any(node.reason is Reason.UNREAD for region in amp.plan.regions for node in region.nodes)


class _Hooked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t + 1

    @staticmethod
    def backward(ctx, g):
        return g


def test_symbols_that_capture_adds_late_are_inputs_all_the_same():
    """Dynamo of torch 2.11 puts them behind an autograd Function that reads them, where a hook is."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(_Hooked.apply(x))
            y.register_hook(lambda g: g * 2)
            return y.contiguous(), len(x)

    model = Model()
    amp = amprewrite.rewrite(model, dtype="bf16")
    for rows in (2, 3, 5):
        result, length = amp(torch.ones(rows, 4, 4))
        model.zero_grad()
        result.sum().backward()
        assert length == rows
        assert torch.equal(model.linear.bias.grad, torch.full((4,), 8.0 * rows))
