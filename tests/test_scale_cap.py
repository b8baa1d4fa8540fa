"""Gradients that no optimizer steps on, in fp16: finite whatever their size, and as accurate as fp16 is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

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


@pytest.mark.parametrize("size", [1e-8, 1e-4, 1.0, 1e3, 1e8])
def test_gradients_of_inputs_are_finite_at_any_size(size):
    model, amp, x = pair()
    for _ in range(3):
        (got,) = torch.autograd.grad((amp(x) * size).sum(), x)
        (want,) = torch.autograd.grad((model(x) * size).sum(), x)
        assert error(got, want) < 2e-3
    assert amp.loss_scale.value == 65536, "the state itself is left alone"


def test_small_gradients_keep_the_whole_scale():
    """What fits is not touched: the same bits as with a scale that stays."""
    model, amp, x = pair()
    fixed = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", loss_scale=65536.0)
    (got,), (same,) = (torch.autograd.grad((net(x) * 2.0**-10).sum(), x) for net in (amp, fixed))
    assert torch.equal(got, same)


def test_a_loss_inside_keeps_the_whole_scale():
    """Its gradient goes on in fp32, so 1 times the scale overflows nothing."""
    model, amp, x = pair()
    fixed = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", loss_scale=65536.0)
    (got,), (same,) = (torch.autograd.grad(net(x, inside=True), x) for net in (amp, fixed))
    assert torch.equal(got, same) and error(got, torch.autograd.grad(model(x, inside=True), x)[0]) < 2e-3


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


def test_batched_gradients_pass():
    model, amp, x = pair()
    out, want = amp(x)[0], model(x)[0]
    got = torch.autograd.grad(out, x, torch.eye(8) * 2.0**-12, is_grads_batched=True)[0]
    assert error(got, torch.autograd.grad(want, x, torch.eye(8) * 2.0**-12, is_grads_batched=True)[0]) < 2e-3
