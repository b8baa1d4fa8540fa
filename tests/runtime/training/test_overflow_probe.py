"""Who overflowed: a skipped step names the node, the module and the line, and a stuck run says what it is stuck on."""

from __future__ import annotations

import inspect
import math
import re
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import amprewrite
from amprewrite.runtime.captured.look_ahead import CALLS
from amprewrite.runtime.training.loss_scale import DynamicLossScale, LossScaleError


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("boost", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        hidden = hidden * self.boost.to(hidden.dtype)
        return x + self.down(hidden)


class Net(nn.Module):
    """A mask of infinities inside, as attention has it, is nobody's overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block(), Block()]), nn.Linear(16, 4)
        self.register_buffer("mask", torch.triu(torch.full((16, 16), -math.inf), 1))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.softmax(x.unsqueeze(-1) * x.unsqueeze(-2) + self.mask, -1).sum(-1) * x
        for block in self.blocks:
            x = block(x)
        return self.head(x)


LINE = inspect.getsourcelines(Block.forward)[1] + 2
"""Of the multiplication by `boost`."""


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int = 0) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def boost(model: Net) -> None:
    model.blocks[1].boost.fill_(60000.0)
    model.blocks[1].up.weight.data.mul_(100.0)


def break_weight(model: Net) -> None:
    model.blocks[2].up.weight.data[0, 0] = math.nan


class Case:
    """One way to go wrong, and what must be said: of one step alone, of the next, and when training is stuck on it."""

    def __init__(
        self,
        alone: str,
        then: str,
        stuck: str,
        prepare: Callable[[Net], None] = lambda model: None,
        data: Callable[[Tensor], Tensor] = lambda x: x,
        loss: float = 1.0,
    ) -> None:
        self.alone, self.then, self.stuck, self.prepare, self.data, self.loss = alone, then, stuck, prepare, data, loss


def poisoned(x: Tensor) -> Tensor:
    x[3, 5] = math.nan
    return x


ACTIVATION = rf"the activation of node mul_\d in blocks.1 \(\S*test_overflow_probe.py:{LINE}\): an infinity"
CASES = {
    "activation": Case(ACTIVATION, ACTIVATION, "an activation overflow in the forward", prepare=boost),
    "data": Case("NaN in input x", "NaN in input x", "NaN in the data", data=poisoned),
    "weight": Case("NaN in parameter blocks.2.up.weight", "NaN in parameter", "NaN or an infinity in the model's weights", break_weight),
    "loss": Case("the gradient of head.bias, read by node linear_6 in head", "the loss", "NaN in the loss", loss=math.nan),
    "scale": Case("the gradient of head.bias", "the gradient of node linear_6 in head", "a scale search that has not ended", loss=2.0**90),
}


def step(amp: nn.Module, optimizer: torch.optim.Optimizer, case: Case, index: int) -> None:
    x = case.data(batch(index))
    optimizer.zero_grad()
    (amp(x).square().mean() * case.loss).backward()
    optimizer.step()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("granularity", ["model", "blocks"])
@pytest.mark.long
def test_a_skipped_step_names_what_went_wrong(name, granularity):
    case, model = CASES[name], net()
    scale = DynamicLossScale(init=2.0**16, floor=2.0**-100, growth_interval=10**6)
    amp = amprewrite.rewrite(model, dtype="fp16", granularity=granularity, loss_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(CALLS):  # an activation that overflows in the first calls is put right instead
        amp(batch())
    case.prepare(model)
    step(amp, optimizer, case, 0)
    said = amp.loss_scale.report().overflow_at
    if granularity == "model":  # of several graphs, what ran between them is gone
        assert re.search(case.alone, said), said
    step(amp, optimizer, case, 1)
    then = case.then.replace("linear_6", "linear(_6)?").replace(r"mul_\d", r"mul(_\d)?")
    said = amp.loss_scale.report().overflow_at
    assert re.search(then, said), said
    with pytest.raises(LossScaleError, match=case.stuck):
        for index in range(2, 60):
            step(amp, optimizer, case, index)


def test_a_gradient_that_no_scale_helps_is_told_from_a_search():
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            return self.down(hidden * (hidden - hidden).square().sum(-1, keepdim=True).sqrt())

    torch.manual_seed(0)
    model = Norm()
    amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=DynamicLossScale(init=4.0, floor=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with pytest.raises(LossScaleError, match=r"derivative is infinite.* began at the gradient of node (sum|square|sqrt|sub)"):
        for index in range(60):
            step(amp, optimizer, Case("", "", ""), index)


def test_a_fused_optimizer_is_asked_when_somebody_reads_the_report():
    model = net()
    amp = amprewrite.rewrite(model, dtype="fp16")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for index in range(3):
        step(amp, optimizer, CASES["scale"] if index == 2 else Case("", "", ""), index)
    report = amp.loss_scale.report()
    assert (report.skipped, report.last_overflow_step) == (1, 3)
    assert "the gradient of head.bias" in str(report)
    step(amp, optimizer, CASES["scale"], 3)
    assert "the gradient of node linear_6 in head" in str(amp.loss_scale.report())


def test_nothing_is_watched_while_steps_go_well_and_watching_changes_no_bit(monkeypatch):
    from amprewrite.runtime.training.overflow_probe import OverflowProbe

    watched = []
    run = OverflowProbe.run
    monkeypatch.setattr(OverflowProbe, "run", lambda self, *args: watched.append(1) or run(self, *args))
    results = []
    for overflows in ((), (1,)):
        model = net()
        amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=2.0**8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        watched.clear()
        for index in (0, 1, 2, 3) if overflows else (0, 2, 3):
            step(amp, optimizer, CASES["loss"] if index in overflows else Case("", "", ""), index)
        results.append([p.detach().clone() for p in model.parameters()])
        assert len(watched) == len(overflows)  # the one forward after the overflow
    assert all(map(torch.equal, *results))


def test_looking_again_moves_no_statistic_and_no_random_state():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    amp = amprewrite.rewrite(model, dtype="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = batch()
    (amp(x).sum() * math.inf).backward()
    before, random = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    optimizer.step()
    assert amp.loss_scale.report().overflow_at is not None
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert model[1].num_batches_tracked == 1


def test_inputs_are_not_kept_alive():
    amp = amprewrite.rewrite(net(), dtype="fp16")
    x = batch()
    gone = weakref.ref(x)
    amp(x).sum().backward()
    del x
    assert gone() is None


def skips_once(model: nn.Module) -> nn.Module:
    """`model` in fp16, trained for a step that is skipped, one that is watched, and one more."""
    amp = amprewrite.rewrite(model, dtype="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for index in range(3):
        step(amp, optimizer, CASES["loss"] if index == 0 else Case("", "", ""), index)
    assert amp.loss_scale.report().skipped == 1
    return amp


def test_a_result_that_gets_no_gradient_is_watched_too():
    torch.manual_seed(0)

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            kept, left = self.up(x).split(4, -1)
            return kept.sin() + 0 * left.detach().sum()

    skips_once(Split())


def test_values_that_a_vmap_batches_are_not_looked_at():
    torch.manual_seed(0)

    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x)
            return self.down(torch.vmap(lambda row: row * row.sum().cos())(hidden))

    amp = skips_once(Mapped())
    assert len(amp.plan.regions) == 1
    assert 0 < amprewrite.verify(amp, (batch(),)).output_error < 0.01
    assert not amprewrite.debug(amp, (batch(),), backward=True).findings


def test_batched_gradients_are_not_looked_at():
    torch.manual_seed(0)
    model = nn.Linear(16, 4)
    amp = amprewrite.rewrite(model, dtype="fp16")
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-2)
    amp.attach(optimizer)
    (amp(batch()).sum() * math.inf).backward()
    optimizer.step()
    result = amp(batch()).sum(0)
    (got,) = torch.autograd.grad(result, amp.weight, torch.eye(4), retain_graph=True, is_grads_batched=True)
    (mapped,) = torch.vmap(lambda gradient: torch.autograd.grad(result, amp.weight, gradient))(torch.eye(4))
    (want,) = torch.autograd.grad(model(batch()).sum(0), model.weight, torch.eye(4), is_grads_batched=True)
    assert torch.allclose(got, want, rtol=1e-2, atol=1e-2) and torch.equal(mapped, got)


@pytest.mark.parametrize("style", ["mul", "lerp", "data"])
def test_looking_again_writes_no_parameter(style):
    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(16, 16), nn.Parameter(torch.ones(16, 16), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                if style == "mul":
                    self.key.mul_(0.5)
                elif style == "lerp":
                    self.key.lerp_(torch.zeros_like(self.key), 0.5)
                else:
                    self.key.data.mul_(0.5)
            return (self.query(x) * (x @ self.key)).sum(-1)

    amp = amprewrite.rewrite(Momentum(), dtype="fp16")
    optimizer = torch.optim.SGD(amp.query.parameters(), lr=1e-6)
    x = batch()  # kept alive, so that the graph can run again
    for step, factor in enumerate([1.0, 1e8, 1.0]):
        optimizer.zero_grad()
        (amp(x).mean() * factor).backward()
        optimizer.step()
        assert torch.equal(amp.key, torch.full((16, 16), 0.5 ** (step + 1)))
    assert amp.loss_scale.report().skipped == 1


def test_values_of_float8_are_not_looked_at():
    class Eighth(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            hidden = super().forward(x)
            return hidden + hidden.detach().to(torch.float8_e4m3fn).float() * 0

    amp = amprewrite.rewrite(Eighth(16, 16), dtype="fp16")
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-3)
    for factor in (1.0, 1e8, 1e8, 1.0):
        optimizer.zero_grad()
        (amp(batch()).square().mean() * factor).backward()
        optimizer.step()
    assert amp.loss_scale.report().skipped == 2


@pytest.mark.parametrize("clean_first", [True, False])
def test_training_stops_if_one_of_two_optimizers_never_steps(clean_first):
    """The derivative of the distance at zero is NaN. It reaches one of the layers alone."""

    class Distance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16, bias=False), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.a(x)
            return self.b(hidden + (hidden * hidden).sum(-1, keepdim=True).sqrt())

    amp = amprewrite.rewrite(Distance(), dtype="fp16")
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in ((amp.b, amp.a) if clean_first else (amp.a, amp.b))]
    x = batch()
    x[0] = 0
    with pytest.raises(LossScaleError, match="an op whose derivative is infinite"):
        for _ in range(60):
            for optimizer in optimizers:
                optimizer.zero_grad()
            amp(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
