"""Gradients that no optimizer steps on, in fp16: the scale is 1, so they are finite and right wherever autocast's are."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict

import pytest
import torch
from tiers import long_beyond
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import amprewrite


class Net(nn.Module):
    """Logits, and a loss that is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor, inside: bool = False) -> Tensor:
        logits = self.body(x)
        return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)) if inside else logits


def pair(**options: object) -> tuple[Net, Net, Tensor]:
    model = Net()
    return model, amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", **options), torch.randn(4, 16, requires_grad=True)


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("size", [1e-2, 1.0, 1e3])
@pytest.mark.parametrize("loss_scale", ["auto", "torch", "megatron"])
def test_gradients_of_inputs_are_finite_where_fp16_holds_them(size, loss_scale):
    model, amp, x = pair(loss_scale=loss_scale)
    before = amp.loss_scale.state_dict()
    for _ in range(3):
        (got,) = torch.autograd.grad((amp(x) * size).sum(), x)
        (want,) = torch.autograd.grad((model(x) * size).sum(), x)
        assert error(got, want) < 3e-3
    assert amp.loss_scale.state_dict() == before, "the state itself is left alone"
    report = amp.loss_scale.report()
    assert amp.loss_scale.value == report.scale == 1.0 and report.withheld == before["scale"] and "not applied" in str(report)


@pytest.mark.parametrize("size", [2.0**-16, 1.0, 2.0**20])
def test_the_bits_are_those_of_a_graph_without_a_scale(size):
    """As under torch.autocast without a GradScaler: what fp16 cannot hold overflows or vanishes alike."""
    _, amp, x = pair()
    plain = amprewrite.rewrite(Net(), dtype="fp16", loss_scale=None)
    (got,), (same,) = (torch.autograd.grad((net(x) * size).sum(), x) for net in (amp, plain))
    assert torch.equal(got.nan_to_num(), same.nan_to_num())


def test_a_static_scale_is_used_as_asked():
    _, amp, x = pair(loss_scale=2.0**12)
    plain = amprewrite.rewrite(Net(), dtype="fp16", loss_scale=None)
    (got,), (small,) = (torch.autograd.grad((net(x) * 2.0**-26).sum(), x) for net in (amp, plain))
    assert got.any() and error(got, torch.autograd.grad((Net()(x) * 2.0**-26).sum(), x)[0]) < 2e-3
    assert error(small, got) > 0.1


class Results(nn.Module):
    """Results behind a low op, behind fp32 ops, and of no low op at all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.w, self.kind = nn.Linear(6, 6), nn.Parameter(torch.ones(6)), kind

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x)
        many = {
            "residual": (x + y,),
            "exp": (torch.exp(y),),
            "squares": (y.square().sum(),),
            "flat": (y.flatten(),),
            "two": (y, torch.cumsum(self.w * x, -1)),
            "two the other way": (torch.cumsum(self.w * x, -1), y),
            "three": (y, y.exp(), self.w * y),
        }
        return many[self.kind]


@pytest.mark.parametrize("kind", ["residual", "exp", "squares", "flat", "two", "two the other way", "three"])
@pytest.mark.parametrize(
    ("factor", "backend"), long_beyond(3, [(1.0, "eager"), (2.0**8, "eager"), (2.0**8, "aot_eager"), (1.0, "aot_eager")])
)
def test_all_gradients_of_one_forward_are_right_whatever_enters_where(kind, backend, factor):
    model, other, x = Results(kind), Results(kind), torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    amp = amprewrite.rewrite(other, dtype="fp16", backend=backend)
    for net in (model, amp):
        results = net(x)
        (results[0].sum() * factor + sum(result.sum() for result in results[1:])).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or error(q.grad, p.grad) < 5e-3, kind


class Bare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT


@pytest.mark.parametrize("loss_scale", ["auto", 64.0])
def test_a_module_without_parameters_runs(loss_scale):
    amp, x = amprewrite.rewrite(Bare(), dtype="fp16", loss_scale=loss_scale), torch.randn(2, 3, 3, requires_grad=True)
    out = amp(x)
    assert out.dtype == torch.float32 and error(out, Bare()(x)) < 2e-3
    (got,), (want,) = (torch.autograd.grad(net(x).sum(), x) for net in (amp, Bare()))
    assert error(got, want) < 2e-3


def test_a_second_backward_through_one_forward_gives_the_same():
    _, amp, x = pair()
    out = amp(x).sum()
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    (second,) = torch.autograd.grad(out, x)
    assert torch.equal(first, second) and first.isfinite().all()


def test_a_gradient_penalty_before_any_step():
    model, amp, x = pair()
    for net in (model, amp):
        (g,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        (g.norm(2, 1) - 1).square().mean().backward()
    for p, q in zip(model.parameters(), amp.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or error(q.grad, p.grad) < 5e-3


def test_a_frozen_network_that_another_learns_through():
    """A perceptual loss: no optimizer ever owns the frozen weights."""
    curves = []
    for dtype in (None, "fp16"):
        frozen = Net().requires_grad_(False)
        judge = frozen if dtype is None else amprewrite.rewrite(frozen, dtype=dtype)
        learner, x = nn.Linear(16, 16), torch.randn(4, 16)
        optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = judge(learner(x)).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        curves.append(torch.tensor(losses))
    exact, got = curves
    assert exact[-1] < 0.7 * exact[0]
    torch.testing.assert_close(got, exact, rtol=5e-3, atol=0)


def test_once_an_optimizer_is_guarded_the_scale_is_the_schedules():
    """GradScaler's behaviour from there on: the step is skipped, the scale falls."""
    _, amp, x = pair()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.0)
    amp.attach(optimizer)
    (amp(x) * 1e3).sum().backward()
    optimizer.step()
    assert amp.loss_scale.report().skipped == 1 and amp.loss_scale.value < 65536


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad):
    _, amp, x = pair()
    (got,) = torch.autograd.grad((amp(x) * bad).sum(), x)
    assert not got.isfinite().any()


# Optimizers that are known late


def train(amp: nn.Module, optimizer: torch.optim.Optimizer, steps: int, factor: float = 1.0) -> list[float]:
    """Scales before each step."""
    scales = []
    for step in range(steps):
        scales.append(amp.loss_scale.value)
        optimizer.zero_grad()
        (amp(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean() * factor).backward()
        optimizer.step()
    return scales


@pytest.mark.parametrize("factor", [1.0, 1e4], ids=["clean", "a scale search"])
def test_an_optimizer_that_exists_is_found_by_the_first_forward(factor):
    """Found and attached are the same from the first step on."""
    curves = []
    for attach in (True, False):
        amp = amprewrite.rewrite(Net(), dtype="fp16")
        optimizer = torch.optim.SGD(amp.parameters(), lr=1e-6)
        if attach:
            amp.attach(optimizer)
        curves.append((train(amp, optimizer, 12, factor), amp.loss_scale.state_dict()))
    assert curves[0] == curves[1]
    assert (curves[0][1]["amprewrite"]["counters"][1] > 0) == (factor > 1.0)


def test_a_first_step_on_unscaled_gradients_does_not_move_the_scale():
    """The optimizer is made between the forward and its step: what the step finds says nothing about the scale."""
    amp = amprewrite.rewrite(Net(), dtype="fp16")
    attached = amprewrite.rewrite(Net(), dtype="fp16")
    loss = amp(torch.randn(4, 16)).square().mean() * 1e4
    loss.backward()
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-6)
    optimizer.step()
    assert amp.loss_scale.report().steps == 0
    reference = torch.optim.SGD(attached.parameters(), lr=1e-6)
    attached.attach(reference)
    assert train(amp, optimizer, 12, 1e4) == train(attached, reference, 12, 1e4)
    assert amp.loss_scale.report().skipped == attached.loss_scale.report().skipped > 0


def test_a_first_step_on_unscaled_gradients_is_skipped_if_they_overflowed():
    amp = amprewrite.rewrite(Net(), dtype="fp16")
    (amp(torch.randn(4, 16)).sum() * float("inf")).backward()
    nn.utils.clip_grad_value_(amp.parameters(), 1.0)
    optimizer = torch.optim.SGD(amp.parameters(), lr=1.0)
    before = [p.detach().clone() for p in amp.parameters()]
    optimizer.step()
    assert all(map(torch.equal, before, amp.parameters()))
    assert amp.loss_scale.value == 65536.0


def test_the_scale_is_one_again_when_the_last_optimizer_is_gone():
    _, amp, x = pair()
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-3)
    amp.attach(optimizer)
    weight = amp.body[0].weight
    assert not torch.autograd.grad(2.0**9 * amp(x).sum(), weight)[0].isfinite().all(), "65536 * 512 is beyond fp16"
    del optimizer
    gc.collect()
    assert torch.autograd.grad(2.0**9 * amp(x).sum(), weight)[0].isfinite().all()


@pytest.mark.parametrize("loss_scale", ["auto", "torch", "megatron", 2.0**16])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_first_step_of_a_closure_loop_is_guarded(loss_scale, backend):
    """As Lightning and LBFGS step: the first forward runs inside the first step."""
    torch.manual_seed(0)
    model = Net()
    amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=loss_scale, backend=backend)
    optimizer, x, y = torch.optim.AdamW(amp.parameters(), 1e-3), torch.randn(8, 16) * 1000, torch.randint(0, 8, (8,))
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(amp(x), y) * 1e3
        loss.backward()
        return loss

    optimizer.step(closure)
    assert all(map(torch.equal, before, model.parameters())), "this step overflowed"
    assert amp.loss_scale.report().skipped == 1
    for _ in range(30):
        optimizer.step(closure)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_is_guarded_from_its_first_evaluation(line_search):
    amp = amprewrite.rewrite(Net(), dtype="fp16", loss_scale="torch")
    optimizer, x = torch.optim.LBFGS(amp.parameters(), max_iter=4, line_search_fn=line_search), torch.randn(8, 16)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = amp(x).square().sum()
        loss.backward()
        return loss

    for _ in range(30):
        optimizer.step(closure)
    assert all(p.isfinite().all() for p in amp.parameters())
    assert 0 < amp.loss_scale.report().skipped < 25


# What is left behind


def test_the_hook_on_all_optimizers_goes_with_the_last_model():
    gc.collect()
    before = len(_global_optimizer_pre_hooks)
    amps = [amprewrite.rewrite(Net(), dtype="fp16") for _ in range(2)]
    assert len(_global_optimizer_pre_hooks) == max(before, 1), "one hook for all models"
    optimizer = torch.optim.SGD(amps[0].parameters(), lr=0.1)
    amps[0].attach(optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1
    del amps
    gc.collect()
    assert len(_global_optimizer_pre_hooks) == before
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_a_model_that_dies_inside_a_step_does_not_disturb_it():
    """Hooks stay while PyTorch goes over them; they do nothing."""
    keep = amprewrite.rewrite(Net(), dtype="fp16")
    dying = [keep]
    optimizer = torch.optim.SGD(keep.parameters(), lr=0.1)
    keep.attach(optimizer)
    del keep

    def die(*_: object) -> None:
        dying.clear()
        gc.collect()

    handles = [optimizer.register_step_pre_hook(die), optimizer.register_step_pre_hook(lambda *_: None)]
    handles.append(register_optimizer_step_pre_hook(die))
    optimizer.step()
    optimizer.step()
    for handle in handles:
        handle.remove()


def test_a_bf16_model_hangs_no_hook_on_optimizers():
    gc.collect()
    before = len(_global_optimizer_pre_hooks)
    amp = amprewrite.rewrite(Net(), dtype="bf16")
    amp(torch.randn(2, 16)).sum().backward()
    assert len(_global_optimizer_pre_hooks) == before


def test_a_wrapper_around_an_optimizer_is_seen_through():
    """As accelerate wraps them: an Optimizer by class, without hooks of its own."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> list[dict[str, object]]:
            return self.optimizer.param_groups

    amp = amprewrite.rewrite(Net(), dtype="fp16")
    inner = torch.optim.SGD(amp.parameters(), lr=0.1)
    amp.attach(Wrapper(inner))
    with pytest.raises(amprewrite.PolicyError, match="attached already"):
        amp.attach(inner)


def test_batched_gradients_pass():
    model, amp, x = pair()
    out, want = amp(x)[0], model(x)[0]
    got = torch.autograd.grad(out, x, torch.eye(8) * 2.0**-12, is_grads_batched=True)[0]
    assert error(got, torch.autograd.grad(want, x, torch.eye(8) * 2.0**-12, is_grads_batched=True)[0]) < 2e-3


def test_a_model_that_is_frozen_again_goes_without_the_scale_of_its_optimizer():
    """Another network learns through it: no step of the model's own optimizer would bring the scale down for that."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    amp = amprewrite.rewrite(model, dtype="fp16")
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-3)
    amp.attach(optimizer)
    amp(x).square().mean().backward()
    optimizer.step()
    assert amp.loss_scale.value > 1000
    amp.requires_grad_(False)
    gradients = []
    for each in (amp, model):
        stem = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            stem.weight.copy_(torch.eye(8))
        (100 * each(stem(x)).square().sum()).backward()
        gradients.append(stem.weight.grad)
    assert torch.isfinite(gradients[0]).all()
    torch.testing.assert_close(*gradients, rtol=0.02, atol=0.02 * float(gradients[1].abs().max()))


def trained(mode: bool, steps: int = 3, **options: object) -> tuple[Net, nn.Module, torch.optim.Optimizer]:
    """A model after a few steps in one mode, the same in fp32, and the optimizer, which lives on."""
    model, amp, _ = pair(**options)
    optimizer = torch.optim.SGD(amp.train(mode).parameters(), 0.0)
    for _ in range(steps):
        learn(amp, optimizer)
    optimizer.zero_grad()
    return model.eval(), amp, optimizer


def learn(amp: nn.Module, optimizer: torch.optim.Optimizer, size: float = 0.1) -> None:
    optimizer.zero_grad()
    (amp(torch.randn(4, 16)).square().mean() * size).backward()
    optimizer.step()


def test_eval_mode_goes_without_the_scale_of_training():
    """Saliency, forces, attacks, importance of weights: no step follows that would bring the scale down."""
    model, amp, optimizer = trained(True)
    amp.eval()
    x = torch.randn(4, 16, requires_grad=True)
    for _ in range(3):
        (want,), (got,) = (torch.autograd.grad(net(x).sum() * 4, x) for net in (model, amp))
        assert error(got, want) < 3e-3
        for net in (model, amp):
            net.zero_grad()
            net(x).sum().backward()
        assert error(amp.body[0].weight.grad, model.body[0].weight.grad) < 3e-3
    assert amp.loss_scale.value == 2.0**16
    optimizer.zero_grad()
    learn(amp.train(), optimizer, 1e9)
    assert amp.loss_scale.value == 2.0**15, "a step in train mode moves the scale"


def test_a_model_that_is_trained_in_eval_mode_has_the_scale_from_its_second_step():
    _, amp, optimizer = trained(False, 0, loss_scale="torch")
    for step in range(4):
        learn(amp, optimizer, 1e9)  # too large for fp16 even without a scale
        assert amp.loss_scale.value == 2.0 ** (16 - step), "the first step ran without the scale, and does not move it"


def test_eval_mode_for_a_part_alone_is_training():
    _, amp, optimizer = trained(True)
    amp.eval()
    amp.body[2].train()
    learn(amp, optimizer, 1e9)
    assert amp.loss_scale.value == 2.0**15


@pytest.mark.parametrize("first", [True, False])
def test_gradients_in_eval_mode_in_every_step_do_not_hold_the_scale(first):
    _, amp, optimizer = trained(True)
    for step in range(3):
        x = torch.randn(4, 16, requires_grad=True)
        if first:
            torch.autograd.grad(amp.eval()(x).sum(), x)
        optimizer.zero_grad()
        (amp.train()(x).square().mean() * 1e9).backward()
        if not first:
            torch.autograd.grad(amp.eval()(x).sum(), x)
        optimizer.step()
        assert amp.loss_scale.value == 2.0 ** (15 - step)


def test_a_static_scale_is_used_in_eval_mode():
    _, amp, _ = trained(True, loss_scale=2.0**16)
    x = torch.randn(4, 16, requires_grad=True)
    assert not torch.autograd.grad(amp.eval()(x).sum() * 4, x)[0].isfinite().all()


# Optimizers that are made otherwise


class NoHooks(torch.optim.Optimizer):
    """Wraps another optimizer and never calls `Optimizer.__init__`; some such have the hooks of steps, others none."""

    def __init__(self, base: torch.optim.Optimizer, some: bool) -> None:
        self.base, self.defaults, self.param_groups, self.state = base, base.defaults, base.param_groups, base.state
        if some:
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure=None):
        return self.base.step(closure)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


class Inherits(torch.optim.SGD):
    """Steps as its parent does, with state of its own and no hooks but those of steps."""

    def __init__(self, params) -> None:
        self.state, self.defaults = {}, {"lr": 0.1, "differentiable": False}
        self.param_groups = [dict(torch.optim.SGD([*params], lr=0.1).param_groups[0])]
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._zero_grad_profile_name = ""


WITHOUT = [lambda p: NoHooks(torch.optim.AdamW(p, 0.1), True), lambda p: NoHooks(torch.optim.AdamW(p, 0.1), False), Inherits]


@pytest.mark.parametrize("attach", [False, True])
@pytest.mark.parametrize("make", WITHOUT)
def test_an_optimizer_without_the_hooks_of_its_class_is_guarded(make, attach):
    _, amp, _ = pair(loss_scale="torch")
    optimizer = make(list(amp.parameters()))
    if attach:
        amp.attach(optimizer)
    before = [p.detach().clone() for p in amp.parameters()]
    learn(amp, optimizer, 1e9)
    assert amp.loss_scale.report().skipped == 1 and all(map(torch.equal, before, amp.parameters()))
    for _ in range(40):
        learn(amp, optimizer)
    assert not any(map(torch.equal, before, amp.parameters())) and amp.loss_scale.report().steps == 41


def test_one_that_cannot_be_guarded_says_why():
    class Alone(torch.optim.Optimizer):
        def __init__(self, params):
            self.param_groups = [{"params": list(params)}]

        def step(self, closure=None):
            return None

    _, amp, _ = pair()
    for optimizer, why in (
        (Alone(amp.parameters()), "never called Optimizer.__init__"),
        (torch.optim.SGD([p.clone() for p in amp.parameters()], lr=0.1, differentiable=True), "differentiable=True"),
        (object(), "no torch.optim.Optimizer"),
    ):
        with pytest.raises(amprewrite.PolicyError, match=why):
            amp.attach(optimizer)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_steps_that_are_differentiated_are_none_of_ours(dtype):
    """A learnt learning rate: the optimizer steps clones of the weights, and its step is part of the next loss."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for rewritten in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(16, 1)
        run = amprewrite.rewrite(net, dtype=dtype) if rewritten else net
        rate = torch.tensor(0.1, requires_grad=True)
        weights = {name: p.detach().clone().requires_grad_().clone() for name, p in net.named_parameters()}
        optimizer = torch.optim.SGD(list(weights.values()), lr=rate, differentiable=True)
        loss = nn.functional.mse_loss(functional_call(run, weights, (x,)), x[:, :1] * 2)
        for weight, gradient in zip(weights.values(), torch.autograd.grad(loss, list(weights.values()), create_graph=True), strict=True):
            weight.grad = gradient
        optimizer.step()
        after = nn.functional.mse_loss(functional_call(run, weights, (x,)), x[:, :1] * 2)
        after.backward()
        found.append((after.detach(), rate.grad))
    assert all(error(got, want) < 2e-2 for want, got in zip(*found, strict=True))


@pytest.mark.parametrize("learner", ["generator", "input"])
def test_weights_may_be_frozen_between_forward_and_backward(learner):
    torch.manual_seed(0)
    plain, generator, x = nn.Linear(16, 16), nn.Linear(16, 16), torch.randn(8, 16)
    judge = amprewrite.rewrite(copy.deepcopy(plain), dtype="fp16")
    optimizer = torch.optim.SGD([*judge.parameters()], lr=1e-2)
    gradients = []
    for model in (plain, judge):
        fed = generator(x) if learner == "generator" else x.clone().requires_grad_()
        loss = model(fed).square().mean()
        model.requires_grad_(False)
        loss.backward()
        assert all(p.grad is None for p in model.parameters())
        gradients.append(generator.weight.grad if learner == "generator" else fed.grad)
        generator.zero_grad()
    assert (gradients[1] - gradients[0]).norm() < 3e-3 * gradients[0].norm()
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("known", [False, True], ids=["no optimizer of the model is known", "one is known"])
def test_an_optimizer_of_a_module_that_joins_the_model_is_guarded(known):
    torch.manual_seed(0)
    amp, x = amprewrite.rewrite(nn.Sequential(nn.Linear(16, 16), nn.Identity()), dtype="fp16"), torch.randn(8, 16)
    head = nn.Linear(16, 4)
    optimizers = [torch.optim.SGD(head.parameters(), lr=1e-3)]
    if known:
        optimizers.append(torch.optim.SGD(amp[0].parameters(), lr=1e-3))
        head(x).square().mean().backward()
        optimizers[0].step()  # a step of its own, at which it belongs to no part of the model
    amp(x)
    amp[1] = head
    for factor in (1.0, 1.0, 1.0, float("inf"), 1.0):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (amp(x).square().mean() * factor).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert all(p.isfinite().all() for p in amp.parameters())
    assert amp.loss_scale.report().skipped == 1
