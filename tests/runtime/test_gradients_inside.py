"""Models that take gradients themselves, between the graphs of one call, while an optimizer is known: that of the loss alone is scaled."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from versions import differs_in_2_11

import amprewrite
from amprewrite.graphs.fx.uncaptured import closed_if_raised


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 1)

    def energy(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Forces(Energy):
    def forward(self, x: Tensor) -> Tensor:
        return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class Penalty(Energy):
    """A loss with the penalty of WGAN-GP in it."""

    def forward(self, x: Tensor) -> Tensor:
        score = self.energy(x)
        slope = torch.autograd.grad(score.sum(), x, create_graph=True)[0]
        return score + (slope.norm(2, 1, keepdim=True) - 1).square()


class Guided(Energy):
    """Its gradient is a number like others: no compiler of torch's gives derivatives of those."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        score = self.energy(x)
        return score, torch.autograd.grad(score.sum(), x, retain_graph=True)[0]


def trained(kind: type[Energy], optimizer: type[torch.optim.Optimizer], steps: int, weight: float = 2.0**-10, **options: Any) -> Any:
    """(fp32 model, rewritten model, their optimizers), each trained on the same data."""
    model, other = kind(), kind()
    amp = amprewrite.rewrite(other, **options)
    both = [(net, optimizer(net.parameters(), lr=1e-3)) for net in (model, amp)]
    amp.attach(both[1][1])
    data = torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randn(8, 4, generator=data).requires_grad_()
        results = []
        for net, stepping in both:
            stepping.zero_grad()
            result = net(x)
            score = result[0] if isinstance(result, tuple) else result
            ((score - 1).square().sum() * weight).backward()  # small, so that no step overflows at the first scale
            results.append(result)
        yield model, other, results, amp
        for _, stepping in both:
            stepping.step()


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("kind", [Forces, Penalty])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_what_it_returns_and_its_gradients_are_right(kind, optimizer, dtype):
    bound = 2e-3 if dtype == "fp16" else 2e-2
    for step, (model, other, (want, got), amp) in enumerate(trained(kind, optimizer, 20, dtype=dtype)):  # noqa: B007
        assert error(got, want) < (bound if step == 0 else 10 * bound), step
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            if p.grad is not None:
                assert q.grad.isfinite().all() and (step > 0 or error(q.grad, p.grad) < bound), step
    if dtype == "fp16":
        assert amp.loss_scale.value == 65536.0 and "0 of 20 steps" in str(amp.loss_scale.report())


@differs_in_2_11("aot_eager captures no such gradient")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_gradient_that_is_a_number(backend):
    if backend == "aot_eager":  # since torch 2.15 Dynamo leaves such a forward as written for a compiler; its modules have graphs
        warnings.filterwarnings("ignore", "Guided has code that runs as it is written")
    for model, other, (want, got), _ in trained(Guided, torch.optim.SGD, 2, dtype="fp16", backend=backend):
        assert error(got[0], want[0]) < 2e-3 and error(got[1], want[1]) < 2e-3
        assert all(error(q.grad, p.grad) < 2e-3 for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_what_the_library_does_in_a_backward_is_no_code_of_the_model():
    """Its functions are not captured, planned or reported."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", amprewrite.AmpRewriteWarning)
        *_, (_, _, _, amp) = trained(Forces, torch.optim.SGD, 2, dtype="fp16")
    assert len(amp.plan.regions) == 2
    assert [part.why.partition(":")[0] for part in amp.plan.skipped] == ["graph break"]


class Now(Energy):
    """Takes gradients when it is asked."""

    def forward(self, x: Tensor, now: bool) -> Tensor:
        score = self.energy(x)
        torch._dynamo.graph_break()
        return score.abs() + torch.autograd.grad(score.sum(), x, create_graph=True)[0].sum() if now else score.abs()


class Slope(Energy):
    def forward(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(self.energy(x).sum(), x)[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_a_compiler_does_in_a_backward_is_no_code_of_the_model(dtype):
    """It makes the backward then, with generators among others, which Dynamo cannot capture."""
    amp = amprewrite.rewrite(Slope(), dtype=dtype, backend="aot_eager")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", amprewrite.AmpRewriteWarning)
        for _ in range(2):
            amp(torch.randn(3, 4, requires_grad=True))
    assert not [str(each.message) for each in heard if "generator" in str(each.message)]
    assert [part.why.partition(":")[0] for part in amp.plan.skipped] == ["graph break"]


def test_the_next_forward_has_its_scale_again():
    amp = amprewrite.rewrite(Now(), dtype="fp16")
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-3)
    amp.attach(optimizer)
    x = torch.randn(8, 4).requires_grad_()
    for now in (True, False):
        amp(x, now)
    amp.zero_grad()
    (amp(x, False).sum() * 2.0**-22).backward()
    small = {name: p.grad.clone() for name, p in amp.named_parameters()}
    amp.zero_grad()
    (amp(x, False).sum() * 2.0**-8).backward()
    for name, p in amp.named_parameters():
        assert error(small[name] * 2.0**14, p.grad) < 5e-3


torch.manual_seed(0)  # with one draw of sixteen the third derivative in fp16 is 3 % off
LAYERS = (nn.Linear(3, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))


class Molecule(nn.Module):
    """Energy, and forces that it takes inside, as SchNet does; behind a copy of the positions, or of the positions themselves."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies, self.net = copies, nn.Sequential(*copy.deepcopy(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_() if self.copies else x.requires_grad_()
        return -torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]


class Outside(nn.Sequential):
    """The loop takes the forces."""

    def __init__(self) -> None:
        super().__init__(*copy.deepcopy(LAYERS))


def forces_of(net: nn.Module, x: Tensor) -> Tensor:
    if isinstance(net, Molecule):
        return net(x)
    x = x.clone().requires_grad_()
    return -torch.autograd.grad(net(x).sum() * 5, x, create_graph=True)[0]


@pytest.mark.parametrize("scale", ["auto", 1024.0])
@pytest.mark.parametrize("make", [lambda: Molecule(True), lambda: Molecule(False), Outside], ids=["copies", "its input", "outside"])
@pytest.mark.parametrize("weight", [1e-5, 1.0])
def test_forces_are_taken_without_the_scale_and_the_loss_of_them_with_it(make, scale, weight):
    """The loss is finite from the first step on, and small gradients are those of fp32. A static scale asks for scaled forces outside."""
    x, target = torch.randn(32, 3, generator=torch.Generator().manual_seed(0)), torch.randn(32, 3)
    found = []
    for dtype in (None, "fp16"):
        model = make()
        net = model if dtype is None else amprewrite.rewrite(model, dtype=dtype, loss_scale=scale)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(6):
            optimizer.zero_grad()
            loss = (forces_of(net, x) - target).square().mean() * weight
            assert loss.isfinite()
            loss.backward()
            optimizer.step()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert error(found[1], found[0]) < (2e-2 if scale == "auto" or weight == 1.0 else 0.15)
    report = net.loss_scale.report()
    assert report.steps == 6 and report.skipped < 3


@pytest.mark.parametrize("orders", [1, 2, 3])
@pytest.mark.parametrize("inside", [False, True])
def test_every_order_is_right_whatever_scale_each_backward_has(orders, inside):
    """Backwards of one forward with the factors 1 and 65536, through what the earlier ones gave."""

    def derive(value: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad((value * 4).sin().sum(), x, create_graph=True)[0]

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*copy.deepcopy(LAYERS[:3]), nn.Tanh(), nn.Linear(64, 1))

        def forward(self, x: Tensor) -> Tensor:
            value = self.net(x)
            if inside:  # no loop, which cannot be captured in parts
                value = torch.autograd.grad((value * 4).sin().sum(), x, create_graph=True)[0]
                if orders > 1:
                    value = torch.autograd.grad((value * 4).sin().sum(), x, create_graph=True)[0]
                if orders > 2:
                    value = torch.autograd.grad((value * 4).sin().sum(), x, create_graph=True)[0]
            return value

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        value = net(x)
        for _ in range(0 if inside else orders):
            value = derive(value, x)
        return value.square().mean() * 2.0**-12

    torch.manual_seed(0)
    model, x = Inside(), torch.randn(16, 3).requires_grad_()
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16")
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.0)
    amp.attach(optimizer)
    for net in (model, amp):
        loss = loss_of(net, x)
        loss.backward(retain_graph=True)
        loss.backward()  # once more, through the same graph
    assert [p.grad is None for p in model.parameters()] == [q.grad is None for q in amp.parameters()]
    want, got = (torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]) for net in (model, amp))
    assert error(got, want) < 1e-2


def test_inner_steps_go_without_the_scale_and_the_outer_one_with_it():
    """MAML: gradients of weights that autograd.grad takes to go on with are those of fp16 itself, the outer loss is scaled."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for dtype in (None, "fp16"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        net = model if dtype is None else amprewrite.rewrite(model, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(3):
            optimizer.zero_grad()
            weights = {name: p.clone() for name, p in model.named_parameters()}
            for _ in range(2):
                loss = functional_call(net, weights, (x,)).square().mean() * 8
                taken = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), taken, strict=True)}
            outer = functional_call(net, weights, (x,)).square().mean() * 1e-5
            assert outer.isfinite()
            outer.backward()
            optimizer.step()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert error(found[1], found[0]) < 2e-2 and net.loss_scale.report().skipped == 0


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.b(torch.tanh(self.a(x)))), torch.tanh(self.a(x) * 2)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("further", [False, True])
@pytest.mark.parametrize("scale", ["dynamic", 1024.0])
def test_a_backward_that_a_hook_takes_leaves_the_outer_one_its_scale(scale, further, fails):
    """The gradient of one result is inside the graph already when the hook of the other takes a gradient through it."""
    model = Two()
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", loss_scale=scale)
    amp.attach(torch.optim.SGD(amp.parameters(), lr=0.0))
    torch.manual_seed(1)
    start = torch.randn(4, 8)

    def gradients(net: nn.Module) -> list[Tensor]:
        net.zero_grad()
        x, inner = start.clone().requires_grad_(), []
        first, last = net(x)

        def hook(_: Tensor) -> None:
            with torch.enable_grad():
                inner.append(torch.autograd.grad(last.sum(), x, retain_graph=True, create_graph=further)[0].detach())
            if fails and len(inner) == 1:
                raise ValueError("of the hook")

        first.register_hook(hook)
        if fails:
            with pytest.raises(ValueError, match="of the hook"):
                (first.sum() + last.sum()).backward(retain_graph=True)
            net.zero_grad()
            x.grad = None
        (first.sum() + last.sum()).backward(retain_graph=True)
        inner.append(torch.autograd.grad(last.sum(), x)[0])  # a backward by itself again
        return [*inner, x.grad, *(p.grad for p in net.parameters())]

    for want, got in zip(gradients(model), gradients(amp), strict=True):
        assert error(got, want) < 5e-3


def test_attacks_in_train_mode_are_finite_beside_training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16")
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.0)
    x = torch.randn(8, 8).requires_grad_()
    for _ in range(3):
        (want,), (got,) = (torch.autograd.grad(net(x).sum() * 8, x) for net in (model, amp))
        assert error(got, want) < 5e-3
        optimizer.zero_grad()
        for net in (model, amp):
            model.zero_grad()
            (net(x.detach()).square().mean() * 1e-6).backward()
        optimizer.step()
    for net in (model, amp):
        net.zero_grad()
        (net(x).square().mean() * 1e-6).backward()
    assert all(error(q.grad, p.grad) < 5e-3 for p, q in zip(model.parameters(), amp.parameters(), strict=True))


def test_a_model_of_one_graph_takes_the_scale_as_it_is():
    """No copy of it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16")
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-3)
    amp.attach(optimizer)
    for _ in range(4):
        with torch.profiler.profile() as seen:
            amp(torch.randn(2, 4))
    assert not [event.key for event in seen.key_averages() if event.key in ("aten::clone", "aten::fill_")]


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp16", "loss_scale": 16.0}, {"dtype": "fp16"}])
def test_what_vjp_gives_is_called_behind_the_transform(options):
    """The call takes the gradient of the very tensor that went in: no border of the loss scale may stand before it."""

    class Pulled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            y = self.inner(x)
            (pulled,) = torch.func.vjp(lambda t: t * t, y)[1](y)
            return pulled, pulled.mT

    torch.manual_seed(0)
    model, x = Pulled(), torch.randn(3, 4)
    want, got = model(x)[0], amprewrite.rewrite(model, **options)(x)[0]
    torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)
    assert want.abs().max() > 0.1


@pytest.mark.parametrize("call", [lambda pull: pull(torch.ones(3)), lambda pull: torch.func.vmap(pull)(torch.eye(3))], ids=["bare", "vmap"])
@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp16", "loss_scale": 16.0}, {"dtype": "fp16"}])
def test_what_vjp_gives_is_called_behind_a_break(options, call):
    """The graph before the break returns what the function reads, the next one reads it: no border of the loss scale is between them."""

    class Pulled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            y = self.inner(x)
            pull = torch.func.vjp(lambda t: (t * t).sum(-1), y)[1]
            torch._dynamo.graph_break()
            return call(pull)[0]

    torch.manual_seed(0)
    model, x, found = Pulled(), torch.randn(3, 4), []
    for each in (model, amprewrite.rewrite(copy.deepcopy(model), **options)):
        rows = each(x)
        rows.sum().backward()
        found.append((rows, each.inner.weight.grad))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)


class Batched(Energy):
    """Returns the Jacobian of its scores, all rows of it at once."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        rows = torch.autograd.grad(hidden.sum(0), x, torch.eye(16), is_grads_batched=True, create_graph=True)[0]
        return self.b(hidden) + rows.square().sum()


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp16", "loss_scale": 16.0}, {"dtype": "fp16"}])
def test_batched_gradients_have_a_derivative(options):
    for model, other, (want, got), _ in trained(Batched, torch.optim.SGD, 1, 2.0**-14, **options):
        assert error(got, want) < 2e-2
        assert all(error(q.grad, p.grad) < 2e-2 for p, q in zip(model.parameters(), other.parameters(), strict=True))


class Large(Energy):
    """Reaches values beyond fp16, in the very graph that takes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.a.bias += 2
            self.b.weight.fill_(1e4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        score = self.energy(x) * 1e-5
        return score, torch.autograd.grad(score.sum(), x, create_graph=True)[0]


def test_a_captured_gradient_in_a_call_that_overflowed():
    """What fp32 gives is found out with gradients, for the graph asks for one."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for model, other, (want, got), amp in trained(Large, torch.optim.SGD, 1, dtype="fp16"):
            assert "decided anew" in str(amp.plan) and len(amp.plan.regions) == 1
            assert all(error(b, a) < 5e-3 for a, b in zip(want, got, strict=True))
            assert all(error(q.grad, p.grad) < 5e-3 for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("captured", [False, True])
def test_hooks_of_inputs_are_called_once_in_a_call_that_overflowed(captured):
    """torch.autograd.grad inside the model calls hooks of what it is taken with respect to, retain_grad's among them."""
    calls = []
    for low in (False, True):
        torch.manual_seed(0)
        model = Large()
        amp = amprewrite.rewrite(model, dtype="fp16") if low else model
        x = torch.randn(2, 4).requires_grad_() + 0
        x.retain_grad()
        x.register_hook(lambda gradient: calls.append(gradient))
        with torch._dynamo.config.patch(trace_autograd_ops=captured):
            amp(x)
        calls.append(x.grad)
    assert len(calls) == 4 and "decided anew" in str(amp.plan)
    assert error(calls[2], calls[0]) < 5e-3 and error(calls[3], calls[1]) < 5e-3


class Transformed(Energy):
    """Takes its gradient in a torch.func transform. Run without gradients, its graph gives zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: self.energy(t).square().sum())(self.a(x)[:, :4])


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", [Forces, Guided, Transformed])
def test_verify_sees_what_such_a_model_gives(kind, captured):
    x = torch.randn(8, 4).requires_grad_()
    with torch._dynamo.config.patch(trace_autograd_ops=captured):
        amp = amprewrite.rewrite(kind(), dtype="bf16")
        want, got = kind()(x), amp(x)
        report = amprewrite.verify(amp, (x,))
    pairs = list(zip(*((each if isinstance(each, tuple) else (each,)) for each in (got, want)), strict=True))
    true = error(*(torch.cat([t.flatten() for t in each]) for each in zip(*pairs, strict=True)))
    assert 0.3 * true < report.output_error < 3 * true < 3e-2


@pytest.mark.parametrize("kind", [Forces, Transformed])
def test_sensitivity_says_that_it_cannot_cut_such_a_model_apart(kind):
    with pytest.raises(amprewrite.CalibrationError, match="takes gradients itself"):
        amprewrite.sensitivity(kind(), [torch.randn(8, 4).requires_grad_()])
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0  # no transform is left open
    assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None


class HookedAsked(nn.Module):
    """Takes a gradient with respect to a hooked tensor, by the name that an op gave it that returns it unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        for parameter in self.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape).float()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        hidden.register_hook(lambda gradient: gradient * 2)
        same = hidden.contiguous()
        return torch.autograd.grad(self.b(same).relu().sum(), same, create_graph=True)[0]


@pytest.mark.parametrize("lists", ["default", "o3"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("captured", [False, True])
def test_a_gradient_of_a_hooked_tensor_passes_the_hook(captured: bool, dtype: str, lists: str) -> None:
    model, x = HookedAsked(), torch.randint(-2, 3, (4, 8)).float()
    with torch._dynamo.config.patch(trace_autograd_ops=captured):
        got = amprewrite.rewrite(copy.deepcopy(model), dtype=dtype, lists=lists)(x)
    assert torch.equal(got, model(x)) and float(got.abs().max())


class PulledBack(nn.Module):
    """A pullback of a value that is written in place and that a transform made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.func.grad(lambda t: torch.tanh(self.b(t)).sum())(self.a(x)).mT
        slopes.mul_(2)
        return torch.func.vjp(lambda t: t * t, slopes)[1](slopes)[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_pullback_of_a_written_view_is_rewritten(dtype: str) -> None:
    model, x = PulledBack(), torch.randn(4, 8)
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype=dtype)
    assert error(amp(x), model(x)) < (2e-2 if dtype == "bf16" else 2e-3)
    assert not amp.plan.skipped and any(node.op == "linear" and node.colour.value == "low" for node in amp.plan.nodes)


class Refused(nn.Module):
    """In a torch.func transform, an op that refuses what overflows in fp16."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.transform = nn.Linear(8, 8), transform

    def forward(self, x: Tensor) -> Any:
        return self.transform(lambda t: torch.linalg.cholesky(t @ t.mT * 1e-3 + torch.eye(8)).trace())(self.a(x) @ x.mT)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, lambda f: lambda y: torch.func.vmap(f)(y.expand(3, 8, 8))])
def test_a_first_call_that_raises_inside_a_transform_leaves_none_open(transform: Callable[..., Any]) -> None:
    model = Refused(transform)
    torch.manual_seed(4)  # a draw for which fp32 itself is exact: of six draws it is up to 0.8 % off fp64
    x = torch.randn(8, 8) * 300
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16")
    got = amp(x)
    assert error(got, model(x)) < 5e-3 and "decided anew" in str(amp.plan)
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_what_a_failed_trial_opened_is_closed() -> None:
    def state() -> tuple[Any, ...]:
        nested = torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()
        barred = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
        return nested, barred, autocast, torch.is_grad_enabled(), torch._C._functorch.get_dynamic_layer_stack_depth()

    before = state()
    with pytest.raises(KeyError), closed_if_raised():
        torch.amp.autocast_mode._enter_autocast("cpu", torch.float16, True, True)
        torch._C._autograd._saved_tensors_hooks_disable("barred")
        torch._C._functorch._grad_increment_nesting()
        torch._C._set_grad_enabled(False)
        raise KeyError
    assert state() == before
    with torch.autocast("cpu", torch.bfloat16):  # the one around it, and its cache, stay
        around = state()
        with pytest.raises(KeyError), closed_if_raised():
            torch.amp.autocast_mode._enter_autocast("cpu", torch.float16, False, True)
            raise KeyError
        assert state() == around
    assert state() == before


class Between(nn.Module):
    """A sum of padded values, which a transform reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, index: Tensor) -> Any:
        v = nn.functional.embedding(index, self.a.weight)
        return torch.func.grad(lambda t: self.b(t).square().sum())(self.a(v) + v)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_padded_value_is_cut_before_the_transform_that_reads_it(dtype: str) -> None:
    model, index = Between(), torch.tensor([[0, 1, 2, 3]])
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype=dtype, lists="autocast", pad="always", memory=1e6)
    assert error(amp(index), model(index)) < 2e-2 and any(region.pads.copies for region in amp.plan.regions)
    for each in (model, amp):
        each(index).square().sum().backward()
    assert error(amp.a.weight.grad, model.a.weight.grad) < 2e-2


def test_a_graph_that_cannot_be_tried_stays_fp32_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(*_: object) -> None:
        raise KeyError("a fault in the trial itself")

    monkeypatch.setattr("amprewrite.passes.lower.dry_run._DryRun.run_node", trial)
    model, x = Forces(), torch.randn(8, 4)
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16")
    with pytest.warns(amprewrite.AmpRewriteWarning, match="stays fp32: PassError: the edited graph cannot be tried: KeyError"):
        got = amp(x.clone().requires_grad_() + 0)
    assert torch.equal(got, model(x.clone().requires_grad_() + 0))


class Behind(nn.Module):
    """Makes its results by `how` of what a layer gives."""

    def __init__(self, how: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.lin = how, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        return self.how(self.lin(x))


def check_two_orders(how: Callable[[Tensor], Any], loss: Callable[[Any], Tensor], options: dict[str, Any]) -> None:
    """The layer's gradient of the first order and of the second are those of fp32."""
    model, found, x = Behind(how), [], torch.randn(4, 16)
    for each in (model, amprewrite.rewrite(model, **{"dtype": "bf16", **options})):
        (first,) = torch.autograd.grad(loss(each(x)), model.lin.weight, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), model.lin.weight)))
    for want, got in zip(*found, strict=True):
        assert (got - want).norm() < 2e-2 * want.norm()


LEAVES_A_TRANSFORM = {
    "vmap": lambda y: torch.func.vmap(torch.tanh)(y),
    "jvp": lambda y: torch.func.jvp(torch.sigmoid, (y,), (torch.ones_like(y),))[1],
    "vjp": lambda y: torch.func.vjp(torch.tanh, y)[0],
    "grad": lambda y: torch.func.grad(lambda t: torch.tanh(t).sum())(y),
}


@pytest.mark.parametrize("how", LEAVES_A_TRANSFORM)
@pytest.mark.parametrize("options", [{}, {"dtype": "fp16", "loss_scale": 16.0}], ids=str)
def test_what_leaves_a_transform_has_its_gradients(how: str, options: dict[str, Any]) -> None:
    """The op whose backward reads its result stands inside the transform, where no border can: gradients were left scaled."""

    check_two_orders(LEAVES_A_TRANSFORM[how], lambda result: result.square().sum(), options)


SHARED_WITH_A_TRANSFORM = {
    "itself": lambda y: (y, torch.func.vmap(lambda row: row)(y)),
    "a view": lambda y: (y, torch.func.vmap(lambda row: row.view(2, 8))(y)),
    "beside others": lambda y: (y, *torch.func.vmap(lambda row: (row, row.sin()))(y)),
    "written later": lambda y: (v := torch.func.vmap(lambda row: row)(y), v.mul_(2), v[:2]),
}


@pytest.mark.parametrize("how", SHARED_WITH_A_TRANSFORM)
@pytest.mark.parametrize("options", [{}, {"dtype": "fp16", "loss_scale": 16.0}], ids=str)
def test_a_result_that_leaves_a_transform_and_shares_memory_has_its_gradients(how: str, options: dict[str, Any]) -> None:
    """The border stood inside the transform, on a wrapped tensor, and did nothing."""

    def loss(results: tuple[Tensor, ...]) -> Tensor:
        assert len({result.data_ptr() for result in results}) < len(results)
        return sum((place + 1) * result.square().mean() for place, result in enumerate(results))

    check_two_orders(SHARED_WITH_A_TRANSFORM[how], loss, options)


class Cube(torch.autograd.Function):
    """Saves what it was given: a second derivative goes through that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


class Exponential(torch.autograd.Function):
    """Saves what it gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


class PartlyWithout(torch.autograd.Function):
    """Keeps a part of its backward from second derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            three = 3 * x
            with torch.enable_grad():
                again = x + 0
        return gradient * three * again


class OnceOnly(torch.autograd.Function):
    """Runs its backward without gradients, whoever calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.no_grad()
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x


class OfSeveral(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x * w, x.sin()

    @staticmethod
    def backward(ctx: Any, of_product: Tensor, of_sine: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return of_product * w + of_sine * x.cos(), (of_product * x).sum(0)


FUNCTIONS = {
    **{each.__name__: lambda h, w, each=each: each.apply(h) for each in (Cube, Exponential, PartlyWithout, OnceOnly)},
    "once_differentiable": lambda h, w: Once.apply(h),
    "of several": lambda h, w: sum(OfSeveral.apply(h, w)),
    "in a checkpoint": lambda h, w: torch.utils.checkpoint.checkpoint(Cube.apply, h, use_reentrant=False),
}


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x


@pytest.mark.parametrize("how", FUNCTIONS)
@pytest.mark.parametrize("options", [{}, {"dtype": "fp16"}, {"dtype": "fp16", "loss_scale": 16.0}], ids=str)
def test_second_derivatives_go_through_autograd_functions_as_their_author_wrote(how: str, options: dict[str, Any]) -> None:
    """Dynamo captures such a backward without gradients: penalties on gradients were up to 0.8 off, and so they are under torch.compile."""

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lin, self.w = nn.Linear(16, 16), nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            return FUNCTIONS[how](self.lin(x), self.w)

    model, found, data = Penalised(), [], torch.randn(6, 16)
    for each in (model, amprewrite.rewrite(model, **{"dtype": "bf16", **options})):
        x = data.clone().requires_grad_()
        (first,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), model.lin.weight)
        found.append((first, second))
    for want, got in zip(*found, strict=True):
        assert (got - want).norm() < 1e-2 * want.norm()


class Sharp(Energy):
    """Forces, of an energy whose first layer is apart from autocast, as its region says."""

    def energy(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            hidden = self.a(x)
        return self.b(torch.tanh(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("kind", [Forces, Sharp])
@pytest.mark.parametrize("granularity", ["model", ["a", "b"]])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_checkpoint_around_a_forward_that_takes_gradients(kind, granularity, early, dtype):
    """Its gradient asks for the recomputation while the forward is under way: that ran in fp32, and the checkpoint refused it."""
    model, x = kind(), torch.randn(8, 4).requires_grad_()
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype=dtype, granularity=granularity)
    for _ in range(3):
        results = []
        for net in (model, amp):
            net.zero_grad()
            with torch.utils.checkpoint.set_checkpoint_early_stop(early):
                results.append(torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False))
                (results[-1] - 1).square().sum().backward()
        assert error(results[1], results[0]) < (2e-3 if dtype == "fp16" else 2e-2)
        for p, q in zip(model.parameters(), amp.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or error(q.grad, p.grad) < (3e-3 if dtype == "fp16" else 3e-2)
    assert sum(node.dtype == dtype for region in amp.plan.regions for node in region.nodes) >= 1
