"""Overflow that the loop hides between backward and step: GradScaler, which unscales first, sees it; so do rewritten models."""

from __future__ import annotations

import copy
import gc
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_help import Training, block, recording
from tiers import long_unless
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.graphs.fx.ops import scale_ops
from amprewrite.runtime.training.loss_scale import DynamicLossScale
from amprewrite.runtime.training.nonfinite import infinities_to_nan
from amprewrite.runtime.training.step_record import Noted

SCHEDULE = {"growth_interval": 6, "growth_factor": 2.0, "backoff_factor": 0.5}
OVERFLOWS = {2, 3, 9, 17}


class Net(nn.Module):
    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.up, self.norm, self.down, self.head = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 4)
        self.checkpointed = checkpointed

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.norm(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) if self.checkpointed is None else checkpoint(self.body, x, use_reentrant=self.checkpointed))


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=rng), torch.randn(8, 4, generator=rng)


def each_gradient(do: Callable[[Tensor], Any]) -> Callable[[list[Tensor]], None]:
    def hide(params: list[Tensor]) -> None:
        for p in params:
            if p.grad is not None:
                do(p.grad)

    return hide


def replace(params: list[Tensor]) -> None:
    for p in params:
        p.grad = p.grad.nan_to_num(0.0, 0.0, 0.0)


HIDE: dict[str, Callable[[list[Tensor]], Any]] = {
    "clip_grad_value_": lambda params: nn.utils.clip_grad_value_(params, 0.5),
    "clip_grad_value_ one by one": lambda params: nn.utils.clip_grad_value_(params, 0.5, foreach=False),
    "clamp_": each_gradient(lambda g: g.clamp_(-0.5, 0.5)),
    "data.clamp_": each_gradient(lambda g: g.data.clamp_(-0.5, 0.5)),
    "nan_to_num_": each_gradient(lambda g: g.nan_to_num_(0.0, 0.0, 0.0)),
    "sign": each_gradient(lambda g: g.nan_to_num_(0.0).sign_()),
    "a new tensor": replace,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
}


def loss_of(amp: nn.Module, step: int) -> Tensor:
    x, y = batch(step)
    return nn.functional.mse_loss(amp(x), y) * (float("inf") if step in OVERFLOWS else 1.0)


def train(model: nn.Module, amp: nn.Module, optimizer: Any, hide: Any, scaler: Any = None, steps: int = 24, micro: int = 1) -> list[float]:
    """Scales before each step; `scaler` None: the loop of somebody who knows of no scale."""
    scales, params = [], list(model.parameters())
    for step in range(steps):
        scales.append(amp.loss_scale.value if scaler is None else scaler.get_scale())
        optimizer.zero_grad()
        for part in range(micro):
            loss = loss_of(amp, step if part == 0 else 1000 + step)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        hide(params)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return scales


FOUND = ("clip_grad_value_", "adamw", False), ("data.clamp_", "sgd", False)
"""Two ways with an optimizer that nobody attached."""


@pytest.mark.parametrize(
    ("how", "name", "attach"),
    [
        *long_unless(lambda case: case[1] == "sgd" or case[0] == "clamp_", ((how, name, True) for how in HIDE for name in OPTIMIZERS)),
        *FOUND,
    ],
)
def test_hidden_overflow_is_skipped_as_by_grad_scaler_bitwise(how, name, attach):
    ours, theirs = net(), net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=DynamicLossScale(init=1024.0, **SCHEDULE))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, **SCHEDULE)
    optimizer = OPTIMIZERS[name](ours.parameters())
    if attach:
        amp.attach(optimizer)
    mine = train(ours, amp, optimizer, HIDE[how])
    unscaled = amprewrite.rewrite(theirs, dtype="fp16", loss_scale=None)
    yours = train(theirs, unscaled, OPTIMIZERS[name](theirs.parameters()), HIDE[how], scaler)
    assert mine == yours and len(set(mine)) > 2
    assert amp.loss_scale.report().skipped == len(OVERFLOWS)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("options", [{}, {"granularity": ["up", "down"]}, {"cache_weights": "step"}], ids=str)
def test_hidden_overflow_is_skipped_however_the_model_runs(backend, options):
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0, backend=backend, **options)
    train(ours, amp, torch.optim.SGD(ours.parameters(), lr=1e-3), HIDE["nan_to_num_"], micro=2)
    assert amp.loss_scale.report().skipped == len(OVERFLOWS)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("granularity", ["model", ["up", "down"]])
def test_hidden_overflow_under_checkpoints(reentrant, granularity):
    ours = net(checkpointed=reentrant)
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0, granularity=granularity)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    for step in range(5):
        optimizer.zero_grad()
        x = batch(step)[0].requires_grad_()
        (amp(x).square().mean() * (float("inf") if step == 2 else 1.0)).backward()
        HIDE["clip_grad_value_"](list(ours.parameters()))
        optimizer.step()
    assert (amp.loss_scale.report().skipped, amp.loss_scale.report().steps) == (1, 5)


@pytest.mark.parametrize("width", [16, 15])
@pytest.mark.parametrize("where", ["weights", "weights after accumulation", "activations"])
def test_a_hook_that_clips_hides_no_overflow(where, width):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

        def forward(self, x):
            hidden = self.up(x)
            if where == "activations":
                hidden.register_hook(lambda gradient: gradient.clamp(-10.0, 10.0))
            return self.down(hidden)

    def clip(p):
        p.grad.clamp_(-10.0, 10.0)

    torch.manual_seed(0)
    model, x, large = Two(), torch.rand(512, width), 0.02
    if where == "activations":
        x, large = 1e-3 * x[:2], 0.1
        nn.init.constant_(model.down.weight, 3.0)
    else:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(clip) if "after" in where else p.register_hook(lambda g: g.clamp(-10.0, 10.0))
    (model(x).sum() * large).backward()
    right = [p.grad.clone() for p in model.parameters()]
    amp, optimizer = amprewrite.rewrite(model, dtype="fp16"), torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        (amp(x).sum() * large).backward()
        optimizer.step()
    assert amp.loss_scale.report().skipped == 1
    assert all((p.grad - want).norm() < 1e-2 * want.norm() for p, want in zip(model.parameters(), right, strict=True))


def test_no_look_at_gradients_between_parts_without_hooks(monkeypatch):
    looks: list[int] = []
    monkeypatch.setattr(scale_ops, "nan_if_infinite", lambda gradient: looks.append(1) or gradient)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    amp, x = amprewrite.rewrite(model, dtype="fp16", granularity=["0", "1"]), torch.randn(4, 16)
    amp.attach(torch.optim.SGD(model.parameters(), lr=0.0))
    amp(x).sum().backward()
    assert not looks
    hidden = amp[0](x)
    hidden.register_hook(lambda gradient: gradient * 2)
    amp[1](hidden).sum().backward()
    assert looks


def test_a_closure_that_clips_is_skipped():
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    for step in range(5):
        before = [p.detach().clone() for p in ours.parameters()]

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(amp, step)
            loss.backward()
            nn.utils.clip_grad_value_(ours.parameters(), 0.5)
            return loss

        optimizer.step(closure)
        assert all(map(torch.equal, before, ours.parameters())) == (step in OVERFLOWS)


@pytest.mark.parametrize("to_none", [True, False])
def test_what_zero_grad_threw_away_does_not_skip_a_later_step(to_none):
    """A GAN's turn: the loss of one network overflows in the gradients of the other, which are thrown away."""
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    amp.attach(optimizer)
    loss_of(amp, 2).backward()
    optimizer.zero_grad(set_to_none=to_none)
    loss_of(amp, 0).backward()
    optimizer.step()
    assert amp.loss_scale.report().skipped == (0 if to_none else 1), "zeros cannot be told from clamped infinities"


@pytest.mark.parametrize(("parts", "ranks"), [(1, 1), (2, 1), (1, 2)])
def test_a_loop_that_leaves_out_overflows_itself_shrinks_the_scale(parts, ranks, monkeypatch):
    monkeypatch.setattr("amprewrite.runtime.training.nonfinite.several_ranks", lambda: ranks > 1)
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=amprewrite.DynamicLossScale(init=2.0**32))
    params = list(ours.parameters())
    optimizers = [torch.optim.SGD(params[part::parts], lr=1e-3) for part in range(parts)]
    steps = 0
    for _ in range(40):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(amp, 0).backward()
        if nn.utils.clip_grad_norm_(params, 1.0).isfinite():
            steps += 1
            for optimizer in optimizers:
                optimizer.step()
    assert steps > 10
    assert amp.loss_scale.report().steps <= 40


def test_with_several_ranks_gradients_are_looked_at_twice_only_if_no_step_came_between(monkeypatch):
    monkeypatch.setattr("amprewrite.runtime.training.nonfinite.several_ranks", lambda: True)
    params = list(net().parameters())
    for p in params:
        p.grad = torch.ones_like(p)
    note = Noted(torch.optim.SGD(params, lr=1e-3))
    for _ in range(2):
        note.ended(params)
        assert not note.waits and note._apart is None
        note.heard(torch.zeros(()), False, params)
    note.ended(params)
    note.ended(params)
    assert note.waits and note._apart is not None


def test_a_loop_that_leaves_out_every_step_is_stopped():
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16")
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    with pytest.raises(amprewrite.LossScaleError, match="50 optimizer steps in a row"):
        for _ in range(60):
            optimizer.zero_grad()
            (loss_of(amp, 0) * float("nan")).backward()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_an_overflow_that_one_of_two_optimizers_has_read_counts_once(to_none, fused):
    """The same turn with an optimizer for each network, both parts of one model. After its zeros, the judge steps on new gradients."""
    torch.manual_seed(0)
    scale = amprewrite.DynamicLossScale(init=1024.0)
    amp = amprewrite.rewrite(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1)), dtype="fp16", loss_scale=scale)
    maker, judge = (torch.optim.SGD(part.parameters(), lr=1e-3, fused=fused) for part in amp)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    for step in range(5):
        judge.zero_grad(set_to_none=to_none)
        amp[1](x).square().mean().backward()
        assert moves(judge)
        maker.zero_grad(set_to_none=to_none)
        (amp(x).square().mean() * (1e8 if step == 2 else 1.0)).backward()
        assert moves(maker) == (step != 2)
        assert amp.loss_scale.report().skipped == (step >= 2)


def test_an_optimizer_with_parameters_outside_forgets_what_was_thrown_away():
    """The outer head has its new gradient before the backward enters the rewritten model."""
    ours, head = net(), nn.Linear(4, 2)
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    optimizer = torch.optim.SGD([*ours.parameters(), *head.parameters()], lr=1e-3)
    amp.attach(optimizer)
    for step in (2, 0):
        optimizer.zero_grad()
        (head(amp(batch(step)[0])).sum() * (float("inf") if step == 2 else 1.0)).backward()
    optimizer.step()
    assert amp.loss_scale.report().skipped == 0


def clipped(model: nn.Module) -> None:
    """Clip gradients, NaN as well, to values that are finite and not zero."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.nan_to_num_(1.0)
    nn.utils.clip_grad_value_(model.parameters(), 0.5)


def moves(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes any parameter."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    optimizer.step()
    return not all(map(torch.equal, before, params))


@pytest.mark.parametrize("attach", [False, True], ids=["found", "attached"])
@pytest.mark.parametrize("old", ["in use", "gone", "none"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_made_after_an_overflow_is_skipped(name, old, attach):
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    first = OPTIMIZERS[name](ours.parameters()) if old != "none" else None
    loss_of(amp, 2).backward()
    if old == "gone":
        first = None
    elif first is not None:
        assert not moves(first)
    clipped(ours)
    late = OPTIMIZERS[name](ours.parameters())
    if attach:
        amp.attach(late)
    assert not moves(late)
    late.zero_grad()
    loss_of(amp, 0).backward()
    assert moves(late)


def test_an_optimizer_made_after_an_overflow_for_what_no_other_steps():
    """The head alone has an optimizer when the backward overflows in the body, too."""
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    head = torch.optim.SGD(ours.head.parameters(), lr=1e-3)
    amp.attach(head)
    loss_of(amp, 2).backward()
    clipped(ours)
    assert not moves(head)
    assert not moves(torch.optim.SGD([*ours.up.parameters(), *ours.norm.parameters(), *ours.down.parameters()], lr=1e-3))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip_first", [False, True])
def test_steps_are_skipped_until_the_overflow_is_thrown_away(name, clip_first):
    """GradScaler, told to unscale before each clip, finds the infinities at the second step as well."""
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    optimizer = OPTIMIZERS[name](ours.parameters())
    loss_of(amp, 1).backward()
    assert moves(optimizer)
    loss_of(amp, 2).backward()
    for turn in range(3):
        if turn or clip_first:
            clipped(ours)
        assert not moves(optimizer)
    assert amp.loss_scale.report().skipped == 3
    loss_of(amp, 0).backward()  # adds to what was clipped
    assert not moves(optimizer)
    optimizer.zero_grad()
    loss_of(amp, 0).backward()
    assert moves(optimizer)


@pytest.mark.parametrize("moment", ["before the forward", "after the forward"])
@pytest.mark.parametrize("granularity", ["model", ["up", "down"]], ids=["whole", "parts"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.long
def test_a_step_is_due_once_a_skipped_one_is_thrown_away(name, to_none, granularity, moment):
    """In parts the norm and the head run outside the graphs, and have their gradients before a backward gets to one."""
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0, granularity=granularity)
    optimizer = OPTIMIZERS[name](ours.parameters())
    found = []
    for step in (1, 2, 4, 9, 6):
        if moment == "before the forward":
            optimizer.zero_grad(set_to_none=to_none)
        loss = loss_of(amp, step)
        if moment == "after the forward":
            optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        clipped(ours)
        found.append(moves(optimizer))
    assert found == [True, False, True, False, True]
    assert amp.loss_scale.report().skipped == 2


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_penalty_on_the_weights_themselves_hides_no_zeros(name, to_none):
    """Its gradients arrive before the backward gets to the model."""
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    optimizer = OPTIMIZERS[name](ours.parameters())
    found = []
    for step in (1, 2, 4):
        optimizer.zero_grad(set_to_none=to_none)
        (loss_of(amp, step) + sum(p.square().sum() for p in ours.parameters())).backward()
        clipped(ours)
        found.append(moves(optimizer))
    assert found == [True, False, True]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_put_there_by_hand_after_a_skipped_step_are_new(name):
    """As meta-learning does: gradients of `autograd.grad`, or of another model."""
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    optimizer = OPTIMIZERS[name](ours.parameters())
    loss_of(amp, 2).backward()
    clipped(ours)
    assert not moves(optimizer)
    for gradients in (torch.autograd.grad(loss_of(amp, 0), list(ours.parameters())), [torch.ones_like(p) for p in ours.parameters()]):
        for p, g in zip(ours.parameters(), gradients, strict=True):
            p.grad = g
        assert moves(optimizer)


def test_a_backward_of_another_model_throws_nothing_away():
    first, second = net(), net()
    amps = [amprewrite.rewrite(m, dtype="fp16", loss_scale=1024.0) for m in (first, second)]
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3)
    for amp in amps:
        amp.attach(optimizer)
    loss_of(amps[0], 2).backward()
    clipped(first)
    loss_of(amps[1], 0).backward()
    assert not moves(optimizer)


def test_an_overflow_that_is_clipped_before_gradients_go_to_copies():
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    away = [nn.Parameter(p.detach().clone()) for p in ours.parameters()]
    optimizer = torch.optim.SGD(away, lr=1e-3)
    amp.attach(optimizer, copies=True)
    for copied in away:
        copied.grad = torch.zeros_like(copied)
    found = []
    for step in (1, 2, 4, 6):
        ours.zero_grad()
        loss_of(amp, step).backward()
        clipped(ours)
        for copied, p in zip(away, ours.parameters(), strict=True):
            copied.grad.copy_(p.grad)
        found.append(moves(optimizer))
    assert found == [True, False, True, True]


def test_an_overflow_in_one_micro_batch_counts_though_each_is_clipped():
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    for steps in ((0, 2, 1), (0, 1, 4)):
        for step in steps:
            loss_of(amp, step).backward()
            nn.utils.clip_grad_value_(ours.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert (amp.loss_scale.report().skipped, amp.loss_scale.report().steps) == (1, 2)


def test_gradients_taken_by_autograd_grad_do_not_count():
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    amp.attach(optimizer)
    loss_of(amp, 0).backward()
    assert not all(g.isfinite().all() for g in torch.autograd.grad(loss_of(amp, 2), list(ours.parameters())))
    optimizer.step()
    assert (amp.loss_scale.report().skipped, amp.loss_scale.report().steps) == (0, 1)


def test_gradients_with_a_graph_of_their_own_are_not_written():
    """Double backward through `p.grad`: it stays what it was, and its overflow counts."""
    ours, plain = net(), net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=64.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    amp.attach(optimizer)
    for model, run in ((ours, amp), (plain, plain)):
        loss_of(run, 0).backward(create_graph=True)
        first = [p.grad for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        sum(g.square().sum() for g in first).backward()
    got, want = (torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) for model in (ours, plain))
    assert (got - want).norm() < 2e-2 * want.norm()
    optimizer.zero_grad()
    loss_of(amp, 2).backward(create_graph=True)
    with torch.no_grad():
        for p in ours.parameters():
            p.grad = p.grad.clamp(-1, 1).nan_to_num(0.0)
    optimizer.step()
    assert amp.loss_scale.report().skipped == 1


def test_a_graph_kept_for_two_backwards_is_looked_at_twice():
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    amp.attach(optimizer)
    out = amp(batch(0)[0])
    for factor in (float("inf"), 1.0):  # the skipped step leaves the weights that the graph saved
        optimizer.zero_grad()
        (out.sum() * factor).backward(retain_graph=True)
        nn.utils.clip_grad_value_(ours.parameters(), 0.5)
        optimizer.step()
    assert (amp.loss_scale.report().skipped, amp.loss_scale.report().steps) == (1, 2)


def test_a_backward_that_raised_does_not_stop_the_next_ones():
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    amp.attach(optimizer)

    def fail(_: Tensor) -> None:
        raise RuntimeError("out of memory")

    for _ in range(70):
        x = batch(0)[0].requires_grad_()
        x.register_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            amp(x).sum().backward()
        optimizer.zero_grad()
    loss_of(amp, 2).backward()
    nn.utils.clip_grad_value_(ours.parameters(), 0.5)
    optimizer.step()
    assert amp.loss_scale.report().skipped == 1


def test_backwards_in_two_threads_are_both_looked_at():
    """The clean one, in the main thread, ends while the other is still under way."""
    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=1024.0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    amp.attach(optimizer)
    loss_of(amp, 0).backward()
    optimizer.zero_grad()
    entered, done = threading.Event(), threading.Event()
    x = batch(2)[0].requires_grad_()

    def wait(_: Tensor) -> None:
        entered.set()
        assert done.wait(30)

    hidden = amp(x)
    hidden.register_hook(wait)
    other = threading.Thread(target=lambda: (hidden.sum() * float("inf")).backward())
    clean = loss_of(amp, 0)
    other.start()
    assert entered.wait(30)
    clean.backward()
    done.set()
    other.join()
    nn.utils.clip_grad_value_(ours.parameters(), 0.5)
    optimizer.step()
    assert amp.loss_scale.report().skipped == 1


def test_two_models_in_one_step_are_looked_at_once_and_both_told():
    first, second = net(), net()
    amps = [amprewrite.rewrite(m, dtype="fp16", loss_scale=DynamicLossScale(init=2.0**k)) for m, k in ((first, 10), (second, 6))]
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3)
    for amp in amps:
        amp.attach(optimizer)
    (loss_of(amps[0], 2) + loss_of(amps[1], 0)).backward()
    HIDE["nan_to_num_"]([*first.parameters(), *second.parameters()])
    optimizer.step()
    assert [amp.loss_scale.value for amp in amps] == [2.0**9, 2.0**5]


@pytest.mark.parametrize("recorded", ["a whole step", "forward and backward"])
def test_a_recorded_backward_is_looked_at_by_its_replays(monkeypatch, recorded):
    training = Training(block(), loss_scale=DynamicLossScale(init=2.0**10))

    def clip() -> None:
        nn.utils.clip_grad_value_(training.model.parameters(), 0.5)

    def step(run: Callable[[], Any]) -> None:
        run()
        clip()
        training.optimizer.step()

    for _ in range(4):
        training.optimizer.zero_grad()
        step(training.forward_backward)
    training.optimizer.zero_grad()
    with recording(monkeypatch) as graph:
        if recorded == "a whole step":
            step(training.forward_backward)
        else:
            training.forward_backward()
    for turn in range(6):
        training.factor.fill_(float("inf") if turn in (1, 2) else 1.0)
        before = training.parameters()
        graph.replay() if recorded == "a whole step" else step(graph.replay)
        assert all(map(torch.equal, before, training.parameters())) == (turn in (1, 2)), turn
    assert training.amp.loss_scale.report().skipped == 2


@pytest.mark.parametrize("before", [1.0, float("inf")])
def test_a_recorded_step_over_gradients_that_stay_does_not_remember_one_before(monkeypatch, before):
    training = Training(block(), loss_scale=DynamicLossScale(init=2.0**10))

    def step() -> None:
        training.optimizer.zero_grad(set_to_none=False)
        training.forward_backward()
        HIDE["nan_to_num_"](list(training.model.parameters()))
        training.optimizer.step()

    for factor in (1.0, 1.0, 1.0, before):
        training.factor.fill_(factor)
        step()
    with recording(monkeypatch) as graph:
        step()
    moved = []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        training.factor.fill_(factor)
        old = training.parameters()
        graph.replay()
        moved.append(not all(map(torch.equal, old, training.parameters())))
    assert moved == [True, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_infinities_become_nan_and_nothing_else_changes(dtype):
    special = torch.tensor([1.0, -2.5, 3e38, 1e-30, 0.0, float("inf"), -float("inf"), float("nan")], dtype=torch.float64).to(dtype)
    got = special.clone()
    infinities_to_nan([got, torch.empty(0)])
    assert torch.equal(got.isnan(), ~special.isfinite())
    assert torch.equal(got[special.isfinite()], special[special.isfinite()])
    sparse = torch.sparse_coo_tensor([[0, 2, 2]], [[1.0, 2.0], [float("inf"), 3.0], [1.0, 1.0]], (4, 2))
    infinities_to_nan([sparse])
    assert sparse.to_dense().isnan().sum() == 1


def test_infinities_of_a_lazy_conjugate_become_nan_in_its_own_memory():
    stored = torch.tensor([complex(1, 2), complex(math.inf, 0), complex(3, -4)])
    infinities_to_nan([stored.conj()])
    assert stored.isnan().tolist() == [False, True, False] and stored[2] == complex(3, -4)


class Autocorrelation(nn.Module):
    """Correlates two series by Fourier transforms, as Autoformer does: the product with a conjugate has a conjugate as a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (torch.fft.rfft(part(x).transpose(1, 2)) for part in (self.query, self.key))
        return torch.fft.irfft(query * torch.conj(key), n=x.shape[1])


def test_an_overflow_behind_a_conjugate_is_found():
    """The backward after an overflow looks at each gradient."""
    amp = amprewrite.rewrite(Autocorrelation(), dtype="fp16")
    optimizer, x = torch.optim.SGD(amp.parameters(), lr=1e-3), torch.randn(2, 1024, 64)
    for factor in (1e9, 1e9, 1e-6):
        optimizer.zero_grad()
        (amp(x).square().mean() * factor).backward()
        optimizer.step()
    assert amp.loss_scale.report().skipped == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.long
def test_fp16_trains_under_any_default_dtype(dtype, fused):
    plain, ours = net(), net()
    curves = []
    for model, default in ((plain, torch.float32), (ours, dtype)):
        amp = amprewrite.rewrite(model, dtype="fp16")
        batches = [batch(step) for step in range(6)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        torch.set_default_dtype(default)
        try:
            losses = []
            for step, (x, y) in enumerate(batches):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(amp(x), y)
                (loss * (float("inf") if step == 3 else 1.0)).backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.item())
        finally:
            torch.set_default_dtype(torch.float32)
        curves.append((losses, str(amp.loss_scale.report())))
    assert curves[0] == curves[1]


def test_checkpointed_parts_save_the_same_in_every_call():
    """The first calls of fp16 graphs are looked at; a checkpoint counts what forward and recomputation save."""
    parts = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = copy.deepcopy(parts)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint_sequential([self.parts[1], self.parts[2]], 2, self.parts[0](x), use_reentrant=False)

    amp = amprewrite.rewrite(Parts(), dtype="fp16", loss_scale=64.0)
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-3)
    for step in range(6):
        optimizer.zero_grad()
        (amp(torch.randn(2, 3)).sum() * (float("inf") if step in (2, 3) else 1.0)).backward()
        optimizer.step()
    assert amp.loss_scale.report().skipped == 2


class Large(nn.Module):
    """A first call that overflows in fp16 though fp32 does not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.down(self.up(x) * 1e4) * 1e-4, x, use_reentrant=False)


def test_a_first_call_that_overflows_inside_a_checkpoint_is_decided_before_it_runs():
    torch.manual_seed(0)
    model = Large()
    amp, x = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", granularity=["up", "down"]), 100 * torch.randn(2, 4)
    for _ in range(4):
        got, want = amp(x), model(x)
        assert (got - want).norm() < 1e-2 * want.norm()
        got.sum().backward()


# Two ranks


def hide_on_rank(rank: int, kind: str, name: str) -> None:
    """One rank's loss overflows; the loop clips by value. Every rank skips, and all hold the same numbers."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ours = net()
    amp = amprewrite.rewrite(ours, dtype="fp16", loss_scale=DynamicLossScale(init=2.0**10))
    module: nn.Module = amp
    if kind.startswith("ddp"):
        module = nn.parallel.DistributedDataParallel(amp, static_graph="static" in kind, gradient_as_bucket_view="view" in kind)
    elif kind == "fsdp2":
        module = fully_shard(amp, mesh=init_device_mesh("cpu", (2,)))
    optimizer = OPTIMIZERS[name](module.parameters())
    for step in range(6):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in module.parameters()]
        loss = module(batch(10 * step + rank)[0]).square().mean()
        (loss * (float("inf") if step in (2, 4) and rank == 1 else 1.0)).backward()
        nn.utils.clip_grad_value_(module.parameters(), 0.5)
        if kind == "by hand":
            for p in module.parameters():
                dist.all_reduce(p.grad)
        optimizer.step()
        same = all(torch.equal(local(a), local(b)) for a, b in zip(before, module.parameters(), strict=True))
        assert same == (step in (2, 4)), (kind, name, rank, step)
    assert (amp.loss_scale.value, amp.loss_scale.report().skipped) == (2.0**8, 2), (kind, name, amp.loss_scale.report())


def local(p: Tensor) -> Tensor:
    return p.to_local() if hasattr(p, "to_local") else p


def rank_main(rank: int, store: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for kind in ("ddp", "ddp static", "ddp bucket view", "fsdp2", "by hand"):
        for name in ("adamw", "adamw fused"):
            hide_on_rank(rank, kind, name)
    gc.collect()
    dist.barrier()  # gloo aborts if a rank leaves while another still talks
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
@pytest.mark.long
def test_ranks_agree_on_hidden_overflow(tmp_path):
    torch.multiprocessing.spawn(rank_main, (str(tmp_path / "store"),), nprocs=2)
