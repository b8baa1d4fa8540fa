"""Closures of optimizers that read gradients or move weights before they call: fp16 gives them what fp32 gives."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

import amprewrite
from amprewrite.runtime.training.optimizers.closures import calls_closure_first

HUGE = 2.0**100


class Sam(Optimizer):
    """Sharpness-aware minimisation in its usual form: a backward before the step, and a closure inside, at moved weights."""

    def __init__(self, params: Any, base: type[Optimizer] = torch.optim.SGD, **settings: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base, self.count = base(self.param_groups, **settings), 0
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        self.count += 1
        size = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * 0.05 / (size + 1e-12))
        self.base.zero_grad()
        with torch.enable_grad():
            closure()
        for p in params:
            p.data = self.state[p]["old"]
        self.base.step()
        self.base.zero_grad()


class Spsa(Optimizer):
    """Two evaluations at moved weights, and no backward, as MeZO."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.losses: list[float] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        moves = [0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(place)) for place, p in enumerate(params)]
        for factor in (1, -2):
            for p, move in zip(params, moves, strict=True):
                p.add_(factor * move)
            self.losses.append(float(closure()))
        first, second = self.losses[-2:]
        for p, move in zip(params, moves, strict=True):
            p.add_(move * (1 - (first - second)))


class Extra(Optimizer):
    """Extragradient: takes the gradient at the next point."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.losses: list[float] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        before = [p.clone() for p in params]
        for p in params:
            p.sub_(0.1 * self.state[p].get("last", 0.0))
        with torch.enable_grad():
            self.losses.append(float(closure()))
        for p, start in zip(params, before, strict=True):
            self.state[p]["last"] = p.grad.clone()
            p.copy_(start - 0.1 * p.grad)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 4))


def data(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    return torch.randn(32, 8, generator=draws), torch.randn(32, 4, generator=draws)


def trained(model: nn.Module, make: Callable[[Any], Any], factors: list[float], seen: Callable[[Any], Any] = id) -> Any:
    """Train a step for each factor of the loss; `seen` is called after each."""
    optimizer = make(model.parameters())
    for step, factor in enumerate(factors):

        def closure(step: int = step, factor: float = factor) -> Tensor:
            x, target = data(step)
            loss = (model(x).float() - target).square().mean()
            if torch.is_grad_enabled():
                optimizer.zero_grad()
                (loss * factor).backward()
            return loss

        if isinstance(optimizer, Sam):
            closure()
        optimizer.step(closure)
        seen(optimizer)
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sam": lambda params: Sam(params, lr=0.1, momentum=0.9),
    "sam, fused": lambda params: Sam(params, torch.optim.AdamW, lr=1e-2, fused=True),
    "spsa": Spsa,
    "extragradient": Extra,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"loss_scale": 1024.0}, {"granularity": ["0", "3"]}, {"cache_weights": "step"}], ids=str)
def test_a_closure_runs_when_the_step_calls_it(name, options):
    plain, amp = net(), amprewrite.rewrite(net(), dtype="fp16", **options)
    want = trained(plain, OPTIMIZERS[name], [1.0] * 4)
    got = trained(amp, OPTIMIZERS[name], [1.0] * 4)
    for p, q in zip(amp.parameters(), plain.parameters(), strict=True):
        assert (p - q).norm() <= 3e-3 * q.norm() + 3e-3 * (want.param_groups[0].get("lr", 0.1))
    if name in ("spsa", "extragradient"):
        assert got.losses == pytest.approx(want.losses, rel=2e-3)


@pytest.mark.parametrize("name", ["sam", "sam, fused", "extragradient"])
@pytest.mark.parametrize("hot", [0, 2])
def test_a_step_that_overflows_leaves_all_as_it_was(name, hot):
    amp = amprewrite.rewrite(net(), dtype="fp16", loss_scale=amprewrite.DynamicLossScale(init=256.0))
    history: list[Any] = [[]]

    def state(optimizer: Any) -> list[Any]:
        every = [optimizer, *([optimizer.base] if hasattr(optimizer, "base") else [])]
        held = [[value for entry in each.state.values() for value in entry.values()] for each in every]
        return copy.deepcopy([[p.detach() for p in amp.parameters()], held, getattr(optimizer, "count", 0)])

    trained(amp, OPTIMIZERS[name], [HUGE if step == hot else 1.0 for step in range(5)], lambda each: history.append(state(each)))
    assert str(history[hot + 1]) == str(history[hot]) or hot == 0
    assert hot or not any(history[1][1]), "a first step that is skipped makes no state"
    assert amp.loss_scale.report().skipped == 1
    assert all(t.isfinite().all() for t in amp.state_dict().values())
    assert str(history[5]) != str(history[4])


def test_the_grad_mode_is_that_of_the_step():
    amp, modes = amprewrite.rewrite(net(), dtype="fp16"), []

    class Asks(Spsa):
        @torch.no_grad()
        def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
            self.losses = [float(closure()), 0.0]

    optimizer = Asks(amp.parameters())

    def closure() -> Tensor:
        modes.append(torch.is_grad_enabled())
        return amp(data(0)[0]).sum()

    optimizer.step(closure)
    assert modes == [False]


@pytest.mark.parametrize("name", sorted(n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, Optimizer)))
def test_steps_of_torch_call_their_closure_first(name):
    step = inspect.unwrap(getattr(torch.optim, name).step)
    assert calls_closure_first(step) == (name not in ("LBFGS", "Optimizer"))


def first_of_all(self, closure=None):
    """Says what it does."""
    loss = closure() if closure is not None else None
    self.count += 1
    return loss


def returned(self, closure):
    return closure()


def moves_first(self, closure=None):
    self.move()
    return closure()


def hands_on(self, closure=None):
    return super().step(closure)


def calls_twice(self, closure):
    loss = closure()
    return loss + closure()


def in_a_loop(self, closure):
    for _ in range(2):
        loss = closure()
    return loss


def keeps_it(self, closure):
    loss = closure()
    self.closure = closure
    return loss


def moved_around(self, closure=None):
    with self.moved():
        return closure()


def reads_first(self, closure=None):
    size = self.size()
    loss = closure()
    return loss * size


@pytest.mark.parametrize("step", [first_of_all, returned])
def test_a_step_may_call_its_closure_before_all_else(step):
    assert calls_closure_first(step)


@pytest.mark.parametrize("step", [moves_first, hands_on, calls_twice, in_a_loop, keeps_it, moved_around, reads_first])
def test_a_step_may_do_something_else_before(step):
    assert not calls_closure_first(step)


def test_a_step_without_source_is_not_trusted():
    made: dict[str, Any] = {}
    exec("def step(self, closure):\n    return closure()", made)
    assert not calls_closure_first(made["step"])


def test_a_step_of_lbfgs_that_overflowed_leaves_gradients_that_can_be_read():
    amp, norms = amprewrite.rewrite(net(), dtype="fp16"), []
    make = functools.partial(torch.optim.LBFGS, max_iter=3)
    trained(amp, make, [HUGE, 1.0], lambda optimizer: norms.append(sum(p.grad.norm() for p in amp.parameters()).item()))
    assert norms[0] == 0 < norms[1]
    assert amp.loss_scale.report().skipped == 1
