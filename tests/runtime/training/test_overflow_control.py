"""The step gate, on a hand-written fp16 module that uses the ops as a rewritten one does."""

from __future__ import annotations

import collections
import copy
import gc
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_map_only

import amprewrite
from amprewrite.graphs.fx.ops.scale_ops import cast_in, scale_gradient
from amprewrite.runtime.training.loss_scale import DynamicLossScale, LossScale, LossScaleError, NoLossScale, StaticLossScale
from amprewrite.runtime.training.nonfinite import find_nonfinite, params_of
from amprewrite.runtime.training.optimizers.find_optimizers import sharded_parameters
from amprewrite.runtime.training.optimizers.optimizer_hooks import KEY, guard_of
from amprewrite.runtime.training.step_record import Stuck
from amprewrite.runtime.training.training import StepGate
from amprewrite.tables.errors import PolicyError

LOW = torch.float16
HUGE = 2.0**14
"""A factor on the loss with which its fp16 gradients overflow at any scale used here."""


class Tiny(nn.Module):
    """Two fp16 layers over fp32 parameters: scaled in the graph, or with no scale for use under GradScaler."""

    def __init__(self, loss_scale: LossScale | None = None, **settings: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 4)
        self.gate = None if loss_scale is None else StepGate(loss_scale, self.whole_and_sharded, **settings)

    def whole_and_sharded(self) -> list[Tensor]:
        return [*self.parameters(), *sharded_parameters(self)]

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.a.weight, self.a.bias, self.b.weight, self.b.bias)
        if self.gate is None:
            return self.layers(x.to(LOW), *(w.to(LOW) for w in weights))
        scale, inverse = self.gate.snapshot(x.device)
        low = [cast_in(w, LOW, inverse) for w in weights]
        return scale_gradient(self.layers(cast_in(x, LOW, inverse), *low), scale)

    @staticmethod
    def layers(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return linear(torch.relu(linear(x, w1, b1)), w2, b2).float()

    @property
    def scale(self) -> LossScale:
        return self.gate.loss_scale


def tiny(loss_scale: LossScale | None = None, seed: int = 0, **settings: Any) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(DynamicLossScale(init=2.0**10) if loss_scale is None else loss_scale, **settings)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def backward(model: nn.Module, step: int = 0, factor: float = 1.0) -> None:
    x, target = batch(step)
    ((model(x) - target).square().mean() * factor).backward()


def values(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def same(a: Any, b: Any) -> bool:
    return all(map(torch.equal, a, b))


def frozen(optimizer: torch.optim.Optimizer) -> Any:
    """All that a step could move, settings included, as plain numbers; without the loss scale, which no plain optimizer carries."""
    tensors = [p.detach() for g in optimizer.param_groups for p in g["params"]]
    state = optimizer.state_dict()
    state["param_groups"][0].pop(KEY, None)
    return tree_map_only(Tensor, lambda t: (t.dtype, t.tolist()), (state, tensors))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
    "sgd fused plain": lambda ps: torch.optim.SGD(ps, lr=1e-2, fused=True),
    "adagrad fused": lambda ps: torch.optim.Adagrad(ps, fused=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    "adafactor": lambda ps: torch.optim.Adafactor(ps),
}

# Against GradScaler


@pytest.mark.parametrize("name", ["adamw", "adamw fused", "sgd", "sgd fused"])
@pytest.mark.long
def test_200_clipped_steps_are_grad_scalers_bitwise(name):
    ours = tiny(DynamicLossScale(growth_interval=10))
    theirs = Tiny()
    theirs.load_state_dict(ours.state_dict())
    optimizer, reference = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](theirs.parameters())
    ours.gate.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", growth_interval=10)
    history = []
    for step in range(200):
        factor = HUGE if step % 23 == 11 else 1.0
        optimizer.zero_grad()
        backward(ours, step, factor)
        norm = nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        optimizer.step()

        reference.zero_grad()
        x, target = batch(step)
        scaler.scale((theirs(x) - target).square().mean() * factor).backward()
        scaler.unscale_(reference)
        assert torch.equal(norm.nan_to_num(), nn.utils.clip_grad_norm_(theirs.parameters(), 1.0).nan_to_num())
        scaler.step(reference)
        scaler.update()
        history.append((ours.scale.value, scaler.get_scale()))
    assert all(a == b for a, b in history)
    assert len({a for a, _ in history}) > 2
    assert same(ours.parameters(), theirs.parameters())
    assert ours.scale.report().skipped >= 8
    assert frozen(optimizer) == frozen(reference)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 2], ids=["first step", "third step"])
def test_a_skipped_step_touches_nothing(name, at):
    model, control = tiny(), tiny()
    optimizer, plain = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](control.parameters())
    model.gate.attach(optimizer)
    for step in range(5):
        if step == at:
            optimizer.zero_grad()
            before = frozen(optimizer)
            backward(model, step, HUGE * 2.0**10)
            gradients = values(*(p.grad for p in model.parameters()))
            optimizer.step()
            assert frozen(optimizer) == before
            assert same((p.grad.nan_to_num() for p in model.parameters()), (g.nan_to_num() for g in gradients))
            assert not hasattr(optimizer, "found_inf")
        for each, its in ((model, optimizer), (control, plain)):
            its.zero_grad()
            backward(each, step)
            its.step()
    assert same(model.parameters(), control.parameters())
    assert model.scale.report().skipped == 1


def test_a_fused_step_reads_nothing_back_once_it_has_state(monkeypatch):
    model = tiny()
    optimizer = OPTIMIZERS["adamw fused"](model.parameters())
    model.gate.attach(optimizer)
    backward(model)
    optimizer.step()
    reads = []
    item = Tensor.item
    monkeypatch.setattr(Tensor, "item", lambda self: reads.append(1) or item(self))
    for step in range(1, 9):
        optimizer.zero_grad()
        backward(model, step, HUGE if step % 3 == 0 else 1.0)
        optimizer.step()
    assert not reads
    assert model.scale.report().steps == 9


class Counting(torch.optim.SGD):
    """Counts in its groups, looks a group up by index, and moves weights that have no gradient."""

    def step(self, closure=None):
        assert self.param_groups[0]["lr"] > 0
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                p.data.mul_(0.9)
        return super().step(closure)


def test_an_optimizer_that_acts_without_gradients_is_skipped_too():
    model = tiny()
    optimizer = Counting(model.parameters(), lr=1e-2)
    model.gate.attach(optimizer)
    torch.optim.SGD([torch.zeros(1)])  # so that the step of the parent class has hooks as well
    backward(model, 0, HUGE * 2.0**10)
    before = frozen(optimizer)
    optimizer.step()
    assert frozen(optimizer) == before
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert optimizer.param_groups[0]["k"] == 1
    assert (model.scale.report().steps, model.scale.report().skipped) == (2, 1)


class Asks(torch.optim.Optimizer):
    """Adds what optimizers of other libraries ask of groups, gradients and state to plain SGD with momentum."""

    def __init__(self, params: Any, way: str) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.way, self.calls, self.state["step"] = way, 0, 0
        self.lists = [dict[tuple[int, ...], Any](by_shape={}) for _ in self.param_groups]
        for p in self.param_groups[0]["params"]:
            self.state[p]["momentum"] = torch.zeros_like(p)
            self.lists[0]["by_shape"].setdefault(tuple(p.shape), []).append((p, self.state[p]["momentum"]))

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        self.state["step"] += 1
        groups = self.param_groups
        if self.way == "prodigy":
            assert max(group["lr"] for group in groups) > 0
        elif self.way == "shampoo":
            assert all(lists for lists, _ in zip(self.lists, groups, strict=True))
        elif self.way == "first":
            assert groups[0]["params"][0].device.type == "cpu"
        elif self.way == "lamb":
            torch.stack([p.grad.norm() for group in groups for p in group["params"] if p.grad is not None]).norm()
        for p, momentum in (pair for pairs in self.lists[0]["by_shape"].values() for pair in pairs):
            p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=groups[0]["lr"])


@pytest.mark.parametrize("way", ["prodigy", "shampoo", "first", "lamb", "batched"])
def test_an_optimizer_of_another_library_may_ask_for_its_parameters_in_a_skipped_step(way):
    model, control = tiny(), tiny()
    optimizer, plain = Asks(model.parameters(), way), Asks(control.parameters(), way)
    model.gate.attach(optimizer)
    for step, factor in enumerate([1.0, HUGE * 2.0**10, 1.0]):
        optimizer.zero_grad()
        backward(model, step, factor)
        gradients = [p.grad for p in model.parameters()]
        optimizer.step()
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
        if factor == 1.0:
            plain.zero_grad()
            backward(control, step)
            plain.step()
        assert same(model.parameters(), control.parameters())
        assert (optimizer.calls, optimizer.state["step"]) == (plain.calls, plain.state["step"])
    assert (model.scale.report().steps, model.scale.report().skipped) == (3, 1)


class Remembers(torch.optim.Optimizer):
    """Divides by norms of gradients that it keeps in attributes, some of which its first step makes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.mean: Tensor | None = None
        self.latest = collections.deque[float](maxlen=2)

    @torch.no_grad()
    def step(self, closure=None):
        size = torch.stack([p.grad.norm() for p in self.param_groups[0]["params"]]).norm()
        self.mean = size if self.mean is None else (self.mean + size) / 2
        self.latest.append(float(size))
        if not hasattr(self, "first"):
            self.first = size.clone()
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / (self.mean + self.first + sum(self.latest)), alpha=1e-2)


@pytest.mark.parametrize("hot", [0, 2])
def test_a_skipped_step_leaves_no_attribute_as_it_made_it(hot):
    model, control = tiny(), tiny()
    optimizer, plain = Remembers(model.parameters()), Remembers(control.parameters())
    model.gate.attach(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step, HUGE * 2.0**10 if step == hot else 1.0)
        optimizer.step()
        if step != hot:
            plain.zero_grad()
            backward(control, step)
            plain.step()
        assert vars(optimizer).keys() == vars(plain).keys()
        assert list(optimizer.latest) == pytest.approx(list(plain.latest), rel=1e-3)
    for p, q in zip(model.parameters(), control.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_hook_after_a_skipped_step_finds_what_a_hook_before_it_has_left():
    model, found = tiny(), []
    optimizer = Remembers(model.parameters())
    model.gate.attach(optimizer)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: setattr(optimizer, "began", len(found)))
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: found.append(optimizer.began))
    backward(model, 0, HUGE * 2.0**10)
    optimizer.step()
    assert found == [0]


class LooksAhead(torch.optim.Optimizer):
    """Holds the state of the optimizer inside it by another name, as Lookahead of torch_optimizer does, and one list by two names."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.fast_state = inner, inner.param_groups, inner.state
        self.sizes = self.known = list[float]()

    def step(self, closure=None):
        self.sizes.append(float(self.param_groups[0]["params"][0].grad.norm()))
        self.inner.step()


@pytest.mark.parametrize("hot", [0, 2])
def test_a_container_with_two_names_is_one_after_a_skipped_step(hot):
    model = tiny()
    optimizer = LooksAhead(torch.optim.Adam(model.parameters()))
    model.gate.attach(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step, HUGE * 2.0**10 if step == hot else 1.0)
        optimizer.step()
    assert {float(each["step"]) for each in optimizer.fast_state.values()} == {3.0}
    assert optimizer.fast_state is optimizer.inner.state
    assert len(optimizer.known) == 3


def test_a_step_after_one_that_raised_while_it_was_skipped_is_kept():
    class Refuses(torch.optim.SGD):
        def step(self):
            if not any(p.grad.any() for p in self.param_groups[0]["params"]):
                raise ValueError("zeros")
            return super().step()

    model = tiny()
    optimizer = Refuses(model.parameters(), lr=1e-2)
    model.gate.attach(optimizer)
    backward(model, 0, HUGE * 2.0**10)
    with pytest.raises(ValueError, match="zeros"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert not same(model.parameters(), before)


def test_a_step_that_takes_the_model_is_no_step_with_a_closure():
    class Takes(torch.optim.SGD):
        def step(self, model):
            assert isinstance(model, nn.Module)
            return super().step()

    model = tiny()
    optimizer = Takes(model.parameters(), lr=1e-2)
    model.gate.attach(optimizer)
    for factor in (1.0, HUGE * 2.0**10):
        backward(model, 0, factor)
        optimizer.step(model)
    assert (model.scale.report().steps, model.scale.report().skipped) == (2, 1)


@pytest.mark.parametrize("way", ["a checkpoint of another kind", "one group of two"])
def test_groups_of_a_fused_optimizer_that_are_not_fused(way):
    model = tiny()
    plain = torch.optim.AdamW(model.parameters())
    backward(model)
    plain.step()
    groups = [{"params": model.a.parameters()}, {"params": model.b.parameters(), "fused": False}]
    optimizer = torch.optim.AdamW(groups if way == "one group of two" else model.parameters(), fused=True)
    if way != "one group of two":
        optimizer.load_state_dict(plain.state_dict())
    model.gate.attach(optimizer)
    for step, factor in enumerate([1.0, 1.0, HUGE * 2.0**10, 1.0]):
        optimizer.zero_grad()
        before = frozen(optimizer)
        backward(model, step, factor)
        optimizer.step()
        assert (frozen(optimizer) == before) == (step == 2)
    assert model.scale.report().skipped == 1


def test_schedulers_do_not_complain():
    model = tiny()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    model.gate.attach(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor in (HUGE * 2.0**10, 1.0):
            backward(model, 0, factor)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert scheduler.get_last_lr() == [0.0025]
    assert model.scale.report().skipped == 1


# Closures


@pytest.mark.parametrize("name", ["sgd", "adamw fused"])
@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_is_evaluated_once_and_checked_after(name, keyword):
    model, control = tiny(), tiny()
    optimizer, plain = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](control.parameters())
    model.gate.attach(optimizer)
    calls = []
    for step, factor in enumerate([1.0, HUGE * 2.0**10, 1.0]):

        def closure(step: int = step, factor: float = factor) -> Tensor:
            calls.append(step)
            optimizer.zero_grad()
            x, target = batch(step)
            loss = (model(x) - target).square().mean() * factor
            loss.backward()
            return loss

        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert loss.item() > 0
        if factor == 1.0:
            plain.zero_grad()
            backward(control, step)
            plain.step()
        assert same(model.parameters(), control.parameters())
    assert calls == [0, 1, 2]
    assert model.scale.report().skipped == 1


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("overflow_at", [0, 1, 3], ids="evaluation {}".format)
def test_lbfgs_goes_back_to_its_start(overflow_at, line_search):
    model = tiny(DynamicLossScale(init=4.0))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6, line_search_fn=line_search)
    model.gate.attach(optimizer)
    evaluations = 0
    factor_at: dict[int, float] = {}

    def closure() -> Tensor:
        nonlocal evaluations
        optimizer.zero_grad()
        x, target = batch(0)
        loss = (model(x) - target).square().mean()
        (loss * factor_at.get(evaluations, 1.0)).backward()
        evaluations += 1
        return loss

    first = optimizer.step(closure).item()
    before = frozen(optimizer)
    evaluations, factor_at = 0, {overflow_at: HUGE * 2.0**10}
    optimizer.step(closure)
    assert evaluations == overflow_at + 1
    assert frozen(optimizer) == before
    assert model.scale.report().skipped == 1
    factor_at = {}
    assert optimizer.step(closure).item() < first
    assert model.scale.report().steps == 3


# Gradients of every kind


def test_sparse_gradients():
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(10, 4))
            self.gate = StepGate(StaticLossScale(2.0**12), self.parameters)

        def forward(self, index: Tensor) -> Tensor:
            scale, inverse = self.gate.snapshot("cpu")
            table = cast_in(self.table, LOW, inverse)
            return scale_gradient(nn.functional.embedding(index, table, sparse=True).float(), scale)

    model = Lookup()
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    model.gate.attach(optimizer)
    for factor in (1.0, HUGE):
        optimizer.zero_grad()
        (model(torch.tensor([3, 3, 5])).sum() * factor).backward()
        assert model.table.grad.is_sparse
        before = values(model.table)
        optimizer.step()
        assert same(before, [model.table]) == (factor == HUGE)
    assert model.gate.loss_scale.report().skipped == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_non_finite_values_of_any_dtype_are_found(dtype, bad):
    parameters = [torch.zeros(5, requires_grad=True), torch.zeros(3, dtype=dtype, requires_grad=True)]
    optimizer = torch.optim.SGD(parameters)
    assert find_nonfinite(params_of(optimizer)) is None
    for p in parameters:
        p.grad = torch.ones_like(p)
    assert find_nonfinite(params_of(optimizer)).item() == 0
    parameters[1].grad[1] = bad
    assert find_nonfinite(params_of(optimizer)).item() > 0


@pytest.mark.parametrize("bad", [1.0, math.inf, math.nan])
def test_gradients_that_are_lazy_conjugates_are_judged(bad):
    """Autograd leaves such a gradient at a complex weight that the model conjugates."""
    weight = torch.zeros(5, dtype=torch.complex64, requires_grad=True)
    (torch.view_as_real(weight.conj().resolve_conj()) * torch.tensor([[1.0], [bad], [1.0], [1.0], [1.0]])).sum().backward()
    assert weight.grad.is_conj()
    assert (find_nonfinite(params_of(torch.optim.SGD([weight]))).item() > 0) == (bad != 1.0)


def test_a_step_without_gradients_counts_nothing():
    model = tiny()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model.gate.attach(optimizer)
    optimizer.step()
    assert model.scale.report().steps == 0


# Sets of steps


def test_two_optimizers_are_one_set_and_each_is_judged_by_its_own_gradients():
    model = tiny(StaticLossScale(4.0))
    body = torch.optim.SGD(model.a.parameters(), lr=0.1)
    head = torch.optim.SGD(model.b.parameters(), lr=0.1)
    for optimizer in (body, head):
        model.gate.attach(optimizer)
    before = values(*model.parameters())
    backward(model)
    model.a.bias.grad[0] = math.nan
    body.step()
    head.step()
    after = values(*model.parameters())
    assert same(before[:2], after[:2]) and not same(before[2:], after[2:])
    report = model.scale.report()
    assert (report.steps, report.skipped) == (1, 1)


def test_several_losses_and_accumulation_are_one_step():
    model, control = tiny(), tiny(StaticLossScale(1.0))
    optimizer, plain = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, control))
    model.gate.attach(optimizer)
    for step in range(4):
        for micro in range(3):
            if micro == 1:  # the scale changes inside the window: gradients are unscaled, so it does not show
                model.scale.load_state_dict({**model.scale.state_dict(), "scale": 2.0 ** (6 + step)})
            backward(model, 10 * step + micro, 0.5)
            backward(control, 10 * step + micro, 0.5)
        for p, q in zip(model.parameters(), control.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-3, atol=1e-6)
            q.grad.copy_(p.grad)
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
        assert same(model.parameters(), control.parameters())
    assert model.scale.report().steps == 4


def test_two_models_in_one_step_share_the_decision_and_keep_their_scales():
    first, second = tiny(), tiny(DynamicLossScale(init=2.0**5), seed=1)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9, fused=True)
    first.gate.attach(optimizer)
    second.gate.attach(optimizer)
    for step, factor in enumerate([1.0, HUGE, 1.0]):
        optimizer.zero_grad()
        before = values(*first.parameters(), *second.parameters())
        x, target = batch(step)
        ((second(x) - target).square().mean() + (first(x) - target).square().mean() * factor).backward()
        optimizer.step()
        assert same(before, [*first.parameters(), *second.parameters()]) == (factor == HUGE)
    assert (first.scale.value, second.scale.value) == (2.0**9, 2.0**4)
    assert first.scale.report().steps == second.scale.report().steps == 3


def test_blocks_may_share_one_scale():
    scale = DynamicLossScale(init=2.0**10)
    blocks = nn.ModuleList([tiny(scale), tiny(scale, seed=1)])
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for block in blocks:
            backward(block, step)
        optimizer.step()
    assert scale.report().steps == 3


def test_penalties_on_gradients_train_through_the_gate():
    model, control = tiny(DynamicLossScale(init=2.0**8)), tiny(NoLossScale())
    low, high = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, control))
    for step in range(5):
        for each, optimizer in ((model, low), (control, high)):
            optimizer.zero_grad()
            x, target = batch(step)
            x.requires_grad_()
            out = each(x) if each is model else each.b(torch.relu(each.a(x)))
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            ((out - target).square().mean() + gradient.square().sum(1).mean()).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), control.parameters(), strict=True):
        assert ((p - q).norm() / q.norm()).item() < 2e-3


# Optimizers that come and go


def test_an_optimizer_that_nobody_attached_is_found():
    model, stranger = tiny(), torch.nn.Parameter(torch.ones(2))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    other = torch.optim.SGD([stranger], lr=1.0)
    backward(model, 0, HUGE * 2.0**10)
    before = values(*model.parameters())
    stranger.grad = torch.full((2,), math.nan)
    other.step()
    optimizer.step()
    assert same(before, model.parameters())
    assert stranger.isnan().all()
    assert model.gate.guards(optimizer) and not model.gate.guards(other)
    model.gate.attach(optimizer)  # says so explicitly; it is guarded once
    optimizer.step()
    assert model.scale.report().steps == 2
    other.add_param_group({"params": [model.a.weight]})  # now it owns one
    other.step()
    assert model.gate.guards(other)


def test_a_tensor_that_takes_the_number_of_a_lost_parameter_makes_no_optimizer_ours():
    """Ids are used again: a step of another model was skipped for an overflow in one that had lost a layer."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gate = StepGate(DynamicLossScale(), layers.parameters)
    lost = layers[1].weight
    del layers[1]
    assert id(lost) not in {id(p) for p in layers.parameters()}
    assert not gate._owns(torch.optim.SGD([lost])), "an id alone says nothing: this tensor might be any other"
    lost._fsdp_flattened = True
    assert not gate._owns(torch.optim.SGD([lost])), "fully_shard replaces parameters, and their ids may go to those of another model"


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
def test_a_copied_model_guards_the_copied_optimizer(how):
    amp = amprewrite.rewrite(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), dtype="fp16", loss_scale=256.0)
    optimizer = OPTIMIZERS["adamw"](amp.parameters())

    def train(model: nn.Module, by: torch.optim.Optimizer, factor: float) -> None:
        by.zero_grad()
        (model(torch.ones(2, 16)).square().mean() * factor).backward()
        by.step()

    train(amp, optimizer, 1.0)
    other, copied = how((amp, optimizer))
    assert copied.param_groups[0]["params"][0] is other[0].weight
    before, original = values(*other.parameters()), frozen(optimizer)
    train(other, copied, 1e30)
    assert same(before, other.parameters())
    assert (other.loss_scale.report().skipped, amp.loss_scale.report().skipped) == (1, 0)
    assert frozen(optimizer) == original
    train(other, copied, 1.0)
    assert not same(before, other.parameters())


def test_optimizer_state_goes_where_it_always_did():
    model = tiny()
    optimizer = OPTIMIZERS["adamw fused"](model.parameters())
    model.gate.attach(optimizer)
    backward(model)
    optimizer.step()
    plain = OPTIMIZERS["adamw fused"](tiny().parameters())
    plain.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    again = pickle.loads(pickle.dumps(optimizer))
    assert type(again) is type(optimizer) and again.state_dict().keys() == optimizer.state_dict().keys()
    optimizer.load_state_dict(plain.state_dict())
    before = frozen(optimizer)
    optimizer.zero_grad()
    backward(model, 0, HUGE * 2.0**10)
    optimizer.step()
    assert frozen(optimizer) == before


def test_a_gate_holds_neither_optimizer_nor_model():
    model = tiny()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model.gate.attach(optimizer)
    backward(model, 0, HUGE * 2.0**10)
    parameter = model.a.bias
    del model
    gc.collect()
    optimizer.step()  # the model is gone, and so is its gate
    assert parameter.isnan().any() or parameter.isinf().any()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_no_loss_scale_checks_nothing():
    model = tiny(NoLossScale())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model.gate.attach(optimizer)
    backward(model)
    model.a.bias.grad[0] = math.nan
    optimizer.step()
    assert model.a.bias.isnan().any()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.zero_grad()
    scaler.scale(model.b.weight.sum()).backward()
    scaler.step(optimizer)


# Bad input


def test_bad_optimizers_are_refused():
    model = tiny()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model.gate.attach(optimizer)
    with pytest.raises(PolicyError, match="attached already"):
        model.gate.attach(optimizer)
    with pytest.raises(PolicyError, match="none of the model's parameters"):
        model.gate.attach(torch.optim.SGD([torch.zeros(1)]))
    with pytest.raises(PolicyError, match=r"no torch\.optim\.Optimizer"):
        model.gate.attach("adam")
    half = tiny().half()
    with pytest.raises(PolicyError, match="fp16"):
        half.gate.attach(OPTIMIZERS["sgd"](half.parameters()))


def test_fp16_gradients_are_refused():
    model = tiny()
    extra = torch.nn.Parameter(torch.ones(2, dtype=LOW))
    optimizer = OPTIMIZERS["sgd"]([*model.parameters(), extra])
    model.gate.attach(optimizer)
    backward(model)
    extra.grad = torch.ones_like(extra)
    with pytest.raises(PolicyError, match="fp16"):
        optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "adamw fused"])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("schedule", [False, True])
def test_a_grad_scaler_left_in_the_loop_is_an_error(name, unscale, schedule):
    model = tiny(StaticLossScale(1.0))
    optimizer = OPTIMIZERS[name](model.parameters())
    if schedule:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.gate.attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, target = batch(0)
    scaler.scale((model(x) - target).square().mean()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(LossScaleError, match="GradScaler"):
        scaler.step(optimizer)
    optimizer.__dict__.pop("found_inf", None)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)  # one that does nothing is welcome


# Stuck


@pytest.mark.parametrize("name", ["sgd", "adamw fused"])
def test_training_stops_after_so_many_skips_in_a_row(name):
    model = tiny(DynamicLossScale(init=2.0**10), max_consecutive_skips=5)
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(7):  # good ones, and gaps: no run is long enough
        optimizer.zero_grad()
        backward(model, step, 1.0 if step % 3 == 0 else math.nan)
        optimizer.step()
    with pytest.raises(LossScaleError, match="5 optimizer steps in a row"):
        for step in range(5):
            assert step < 5
            optimizer.zero_grad()
            backward(model, step, math.nan)
            optimizer.step()
    assert model.scale.report().consecutive_skips == 5
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def test_deepspeeds_preset_stops_at_its_floor():
    model = tiny(DynamicLossScale(init=1.0, floor=1.0, raise_at_floor=True))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    backward(model, 0, math.nan)
    with pytest.raises(LossScaleError, match="floor 1"):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        pytest.param({"inputs_finite": False}, "NaN in the data", id="inputs"),
        pytest.param({"inputs_finite": True, "outputs_finite": False}, "activation overflow in the forward", id="outputs"),
        pytest.param({"outputs_finite": True, "loss_finite": False}, "NaN in the loss", id="loss"),
        pytest.param({"scale": 2.0**3}, "scale search that has not ended", id="still falling"),
        pytest.param({"dynamic": False, "scale": 2.0**20}, "static scale is too large", id="static"),
        pytest.param({}, "no scale search", id="at the floor"),
    ],
)
def test_the_diagnosis_follows_from_what_is_known(settings, says):
    known = {"scale": 2.0**-14, "floor": 2.0**-14, "dynamic": True, "nonfinite": 3, "gradients": 4}
    assert says in Stuck(**{**known, **settings}).diagnosis()


def test_notes_and_callbacks_reach_the_error():
    model = tiny(max_consecutive_skips=1, on_overflow=lambda: "layer a (matmul)")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    model.gate.note(inputs=torch.tensor(True), outputs=False)
    backward(model, 0, math.nan)
    with pytest.raises(LossScaleError, match=r"\(4 of 4 now\).*activation overflow .*layer a \(matmul\)"):
        optimizer.step()
    assert model.scale.report().overflow_at == "layer a (matmul)"
    with pytest.raises(TypeError):
        model.gate.note(weather=True)


# Compilers and ranks


@pytest.mark.parametrize("name", ["adamw", "adamw fused"])
def test_a_compiled_step_is_skipped(name):
    torch._dynamo.reset()
    model = tiny()
    optimizer = OPTIMIZERS[name](model.parameters())
    model.gate.attach(optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for index, factor in enumerate([HUGE, 1.0, HUGE, 1.0]):
        optimizer.zero_grad()
        backward(model, index, factor)
        before = frozen(optimizer)
        step()
        assert (frozen(optimizer) == before) == (factor == HUGE)
    assert model.scale.report().skipped == 2


class Blocks(nn.Module):
    """Two blocks that were rewritten each by itself, with one shared scale."""

    def __init__(self, loss_scale: LossScale) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Tiny(loss_scale), Tiny(loss_scale)])

    def forward(self, x: Tensor) -> Tensor:
        return sum(block(x) for block in self.blocks)


def wrapped(kind: str, loss_scale: LossScale) -> nn.Module:
    """The model under one of PyTorch's ways to spread it over ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    torch.manual_seed(0)
    model: nn.Module = Blocks(loss_scale) if kind == "fsdp2 blocks" else Tiny(loss_scale)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks if kind == "fsdp2 blocks" else ():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shards(module: nn.Module) -> list[Tensor]:
    return values(*(p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()))


def train_on_rank(rank: int, kind: str, name: str) -> None:
    """Steps 0, 3 and 4 overflow, on rank 1 only; both ranks must skip exactly those, and agree on the scale."""
    import torch.distributed as dist

    loss_scale = DynamicLossScale(init=2.0**10)
    module = wrapped(kind, loss_scale)
    optimizer = OPTIMIZERS[name](module.parameters())
    for step in range(6):
        overflows = step in (0, 3, 4)
        optimizer.zero_grad()
        before = shards(module)
        backward(module, 10 * step + rank, HUGE * 2.0**10 if overflows and rank == 1 else 1.0)
        optimizer.step()
        assert same(before, shards(module)) == overflows, (kind, name, rank, step)
    scales: list[Any] = [None, None]
    dist.all_gather_object(scales, loss_scale.state_dict())
    assert scales[0] == scales[1]
    assert (loss_scale.value, loss_scale.report().skipped, loss_scale.report().steps) == (2.0**7, 3, 6)
    assert all(state["step"] == 3 for state in optimizer.state.values() if "step" in state)

    optimizer.zero_grad()
    backward(module, rank)
    assert find_nonfinite(params_of(optimizer)).item() == 0
    if kind != "ddp":
        if rank == 1:  # after the reduction, in one shard: nobody else can see it
            shard = next(g for p in module.parameters() if (g := p.grad) is not None and p.numel())
            (shard.to_local() if hasattr(shard, "to_local") else shard).view(-1)[-1] = math.nan
        assert find_nonfinite(params_of(optimizer)).item() > 0


def rank_main(rank: int, store: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for kind in ("ddp", "fsdp2", "fsdp2 blocks", "fsdp1"):
        for name in ("adamw", "adamw fused", "sgd", "sgd fused"):
            if not (kind.startswith("fsdp2") and name == "sgd fused"):  # torch has no fused SGD for DTensors
                train_on_rank(rank, kind, name)
    gc.collect()
    dist.barrier()  # gloo aborts if a rank leaves while another still talks
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.long
def test_ranks_agree_though_only_one_overflows(tmp_path):
    torch.multiprocessing.spawn(rank_main, (str(tmp_path / "store"),), nprocs=2)


def test_a_fused_optimizer_whose_parameters_take_turns_skips_their_first_step_without_state():
    """torch's fused SGD makes momentum with `empty_like`, and a step that it skips itself leaves it so."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    amp = amprewrite.rewrite(nn.ModuleDict({"first": first, "second": second}), dtype="fp16", loss_scale="dynamic")
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.1, momentum=0.9, fused=True)
    x = torch.randn(4, 8)
    for _ in range(2):
        amp["first"](x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = second.weight.detach().clone()
    guard = guard_of(optimizer)
    for p in second.parameters():
        p.grad = torch.full_like(p, math.inf)
    assert not guard._skips_by_itself(optimizer)
    optimizer.step()
    assert torch.equal(second.weight, before) and second.weight not in optimizer.state
