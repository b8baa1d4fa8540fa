"""Loss scaling inside rewritten models: the training loop does not change, and does what GradScaler's does."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from runtime_help import Sink
from torch import nn
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.runtime.training.loss_scale import DynamicLossScale, StaticLossScale


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, 2 * width), nn.LayerNorm(2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.norm(self.up(x))))


class Net(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(16, 4)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def net(**options: bool) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(8, 16, generator=rng), torch.randn(8, 4, generator=rng)


OVERFLOWS = {3, 4, 20, 77, 120, 150}


def train(model: nn.Module, amp: nn.Module, scaler: torch.amp.GradScaler | None, steps: int = 200) -> list[float]:
    """AdamW with clipping; the scale before each step. `scaler` None: the unchanged loop."""
    optimizer, scales = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(amp(x), y) * (float("inf") if step in OVERFLOWS else 1.0)
        if scaler is None:
            scales.append(amp.loss_scale.value)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        else:
            scaled = scaler.scale(loss)
            scales.append(scaler.get_scale())
            scaled.backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return scales


def test_200_clipped_steps_are_bitwise_those_of_grad_scaler_on_the_same_graph() -> None:
    ours, theirs = net(), net()
    schedule = {"growth_interval": 25, "growth_factor": 2.0, "backoff_factor": 0.5}
    mine = train(ours, amprewrite.rewrite(ours, dtype="fp16", loss_scale=DynamicLossScale(init=1024.0, **schedule)), None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, **schedule)
    yours = train(theirs, amprewrite.rewrite(theirs, dtype="fp16", loss_scale=None), scaler)
    assert mine == yours
    assert len(set(mine)) >= 4
    for (name, ours_p), theirs_p in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours_p, theirs_p), name


def test_gradients_arrive_unscaled_in_fp32() -> None:
    model = net()
    amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=2.0**12)
    x, y = batch(0)
    x.requires_grad_()
    nn.functional.mse_loss(amp(x), y).backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()} | {"x": x.grad.clone()}
    model.zero_grad()
    x.grad = None
    nn.functional.mse_loss(model(x), y).backward()
    for name, want in [*((n, p.grad) for n, p in model.named_parameters()), ("x", x.grad)]:
        assert got[name].dtype is torch.float32
        assert torch.linalg.vector_norm(got[name] - want) < 5e-3 * torch.linalg.vector_norm(want), name


class Broken(nn.Module):
    """A graph that ends at an op whose shape depends on data: capture forgets there that a gradient is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x)).view(-1, 16)
        return self.down(hidden[hidden[:, 0] > 0]).float().square().mean()


def test_gradients_are_true_across_graph_breaks_and_data_dependent_shapes() -> None:
    torch.manual_seed(0)
    model = Broken()
    x, _ = batch(4)
    model(x).backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=256.0)
    amp(x).backward()
    assert len(amp.plan.regions) > 1
    for name, p in model.named_parameters():
        assert torch.linalg.vector_norm(p.grad - want[name]) < 1e-2 * torch.linalg.vector_norm(want[name]), name


@pytest.mark.parametrize("exponent", [6, 10, 14])
def test_a_gradient_penalty_is_that_of_fp32(exponent: int) -> None:
    def penalty(model: nn.Module, of: nn.Module) -> dict[str, torch.Tensor]:
        x, _ = batch(1)
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        of.zero_grad()
        gradient.square().sum().backward()
        return {name: p.grad.clone() for name, p in of.named_parameters() if p.grad is not None}

    model = net()
    got = penalty(amprewrite.rewrite(model, dtype="fp16", loss_scale=2.0**exponent), model)
    want = penalty(model, model)
    error = sum(float((got[n] - want[n]).square().sum()) for n in want) ** 0.5
    assert error < 2e-3 * sum(float(g.square().sum()) for g in want.values()) ** 0.5


def test_gradients_below_the_smallest_fp16_number_survive_only_when_scaled() -> None:
    def weight_gradient(scale: object) -> torch.Tensor:
        model = net()
        amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=scale)
        x, y = batch(2)
        (nn.functional.mse_loss(amp(x), y) * 2.0**-26).backward()
        return model.blocks[0].up.weight.grad

    model = net()
    x, y = batch(2)
    (nn.functional.mse_loss(model(x), y) * 2.0**-26).backward()
    want = model.blocks[0].up.weight.grad
    assert not weight_gradient(None).any()
    assert torch.linalg.vector_norm(weight_gradient(2.0**20) - want) < 1e-2 * torch.linalg.vector_norm(want)


def test_a_change_of_scale_compiles_nothing_anew() -> None:
    model = net()
    amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=DynamicLossScale(init=256.0, growth_interval=1))
    train(model, amp, None, steps=6)
    assert amp.loss_scale.value != 256.0
    assert len(amp.plans) == len(amp.plan.regions) == 1


def test_a_skipped_step_leaves_everything_where_it_was() -> None:
    model = net()
    amp = amprewrite.rewrite(model, dtype="fp16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp.attach(optimizer)
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(amp(x), y).backward()
        optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    (amp(batch(5)[0]).sum() * float("inf")).backward()
    optimizer.step()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    now = optimizer.state_dict()["state"]
    assert all(torch.equal(now[key]["step"], kept["step"]) for key, kept in state["state"].items())
    amp(batch(6)[0])
    assert amp.loss_scale.report().skipped == 1
    assert "head" in str(amp.loss_scale.report())


def test_checkpointed_blocks_train_as_plain_ones() -> None:
    plain, checkpointed = net(), net(checkpointed=True)
    for model in (plain, checkpointed):
        train(model, amprewrite.rewrite(model, dtype="fp16", loss_scale=256.0), None, steps=3)
    for p, q in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-4)


def test_a_loss_over_two_models_and_a_penalty_outside_both_stays_right() -> None:
    first, second = net(), net()
    a, b = amprewrite.rewrite(first, dtype="fp16", loss_scale=64.0), amprewrite.rewrite(second, dtype="fp16", loss_scale=2.0**12)
    outside = nn.Parameter(torch.ones(4))
    x, _ = batch(3)
    loss = (a(x) * b(x)).mean() + outside.square().sum() + first.head.weight.square().sum()
    loss.backward()
    assert torch.equal(outside.grad, torch.full((4,), 2.0))
    got = first.head.weight.grad.clone()
    first.zero_grad()
    ((first(x) * second(x)).mean() + first.head.weight.square().sum()).backward()
    torch.testing.assert_close(got, first.head.weight.grad, rtol=5e-3, atol=5e-3)


def test_copies_and_checkpoints_carry_the_scale() -> None:
    model = net()
    amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=DynamicLossScale(init=256.0, growth_interval=2))
    train(model, amp, None, steps=3)
    saved = amp.loss_scale.state_dict()
    buffer = io.BytesIO()
    torch.save(amp, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(amp), torch.load(buffer, weights_only=False)):
        assert other.loss_scale is not amp.loss_scale
        assert other.loss_scale.state_dict() == saved
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(saved)
    scaler.scale(torch.ones(()))
    assert scaler.get_scale() == amp.loss_scale.value


def test_bf16_has_no_loss_scale_and_fp16_has_one() -> None:
    assert not amprewrite.rewrite(net(), dtype="bf16").loss_scale.enabled
    assert amprewrite.rewrite(net(), dtype="fp16").loss_scale.enabled
    shared = StaticLossScale(128.0)
    assert amprewrite.rewrite(net(), dtype="fp16", loss_scale=shared).loss_scale is shared


def test_aot_autograd_compiles_scaling_into_one_graph() -> None:
    model = net()
    amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=DynamicLossScale(init=256.0, growth_interval=1), backend="aot_eager")
    scales = train(model, amp, None, steps=4)
    assert scales[1] == 512.0
    assert len(amp.plans) == len(amp.plan.regions) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param({"loss_scale": -1.0}, "value=-1.0 must be a positive number", id="a negative scale"),
        pytest.param({"loss_scale": 0}, "value=0 must be a positive number", id="a scale of zero"),
        pytest.param({"loss_scale": "often"}, "auto", id="an unknown word"),
    ],
)
def test_scales_that_make_no_sense_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(amprewrite.PolicyError, match=says):
        amprewrite.rewrite(net(), dtype="fp16", **options)


def test_optimizers_that_cannot_be_guarded_are_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = amprewrite.rewrite(model, dtype="fp16", optimizer=optimizer)
    with pytest.raises(amprewrite.PolicyError, match="attached already"):
        amp.attach(optimizer)
    with pytest.raises(amprewrite.PolicyError, match="owns none"):
        amp.attach(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def test_what_is_in_fp16_already_is_refused() -> None:
    with pytest.raises(amprewrite.PolicyError, match=r"parameters such as .* are fp16 already.*upcast=True.*model\.float\(\)"):
        amprewrite.rewrite(net().half(), dtype="fp16")
    model = net()
    amp = amprewrite.rewrite(model, dtype="fp16")
    model.head.weight.data = model.head.weight.data.half()
    with pytest.raises(amprewrite.PolicyError, match="fp16, in which small updates are lost"):
        amp.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_state_of_something_else_is_refused() -> None:
    model = net()
    amp = amprewrite.rewrite(model, dtype="fp16")
    for state, says in ((model.state_dict(), "it lacks scale"), ({}, "empty"), (torch.ones(1), "Tensor")):
        with pytest.raises(amprewrite.PolicyError, match=says):
            amp.loss_scale.load_state_dict(state)


def test_a_grad_scaler_left_in_the_loop_is_found() -> None:
    model = net()
    amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=2.0)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(amp(batch(0)[0]).sum()).backward()
    with pytest.raises(amprewrite.LossScaleError, match=r"a torch\.amp\.GradScaler steps this optimizer"):
        scaler.step(optimizer)


def test_batch_norm_moves_on_a_skipped_step_as_under_autocast() -> None:
    """Its statistics belong to the forward, which took place: once, also while the step after it is looked at closely."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    other = copy.deepcopy(model)
    amp, scaler = amprewrite.rewrite(model, dtype="fp16"), torch.amp.GradScaler("cpu")
    ours, theirs = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(4):
        factor = float("inf") if step in (1, 2) else 1.0
        ours.zero_grad()
        (amp(batch(step)[0]).square().mean() * factor).backward()
        ours.step()
        theirs.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = other(batch(step)[0]).float().square().mean() * factor
        scaler.scale(loss).backward()
        scaler.step(theirs)
        scaler.update()
        assert model[1].num_batches_tracked == other[1].num_batches_tracked == step + 1
        torch.testing.assert_close(model[1].running_var, other[1].running_var, rtol=5e-3, atol=1e-5)
    assert amp.loss_scale.value == scaler.get_scale()


class Detector(nn.Module):
    """A head over many anchors, as in SSD: the mean over all of them makes every gradient of an activation tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 128)

    def forward(self, anchors: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(anchors)))


def test_a_detector_whose_gradients_lie_below_fp16_trains_only_with_scaling() -> None:
    rng = torch.Generator().manual_seed(0)
    anchors = torch.randn(2048, 16, generator=rng)
    target = 0.001 * torch.tanh(anchors @ torch.randn(16, 128, generator=rng))

    def losses(loss_scale: object) -> list[float]:
        torch.manual_seed(0)
        model = Detector()
        nn.init.normal_(model.head.weight, std=5e-5)
        nn.init.zeros_(model.head.bias)
        amp = model if loss_scale == "fp32" else amprewrite.rewrite(model, dtype="fp16", loss_scale=loss_scale)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-15, weight_decay=0.0)
        seen = []
        for _ in range(40):
            optimizer.zero_grad()
            out = amp(anchors)
            out.retain_grad()
            loss = nn.functional.mse_loss(out, target)
            loss.backward()
            assert out.grad.abs().max() < 2.0**-25  # rounds to nothing in fp16
            optimizer.step()
            seen.append(loss.item())
        return seen

    fp32, scaled, unscaled = losses("fp32"), losses("auto"), losses(None)
    assert fp32[-1] < 0.5 * fp32[0]
    assert scaled[-1] == pytest.approx(fp32[-1], rel=2e-2)
    assert unscaled[-1] > 0.9 * unscaled[0]


@pytest.mark.parametrize("cache_weights", [True, "step"])
def test_a_head_on_a_backbone_under_no_grad_trains(cache_weights):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(8, 2)

        def forward(self, x):
            with torch.no_grad():
                x = self.backbone(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Net()
    amp = amprewrite.rewrite(model, dtype="fp16", cache_weights=cache_weights, loss_scale=64.0)
    x = torch.randn(4, 8)
    amp(x).square().sum().backward()
    got = model.head.weight.grad
    assert got is not None and model.backbone[0].weight.grad is None
    (want,) = torch.autograd.grad(model(x).square().sum(), model.head.weight)
    assert torch.allclose(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("options", [{"dtype": "fp16", "loss_scale": 64.0}, {"dtype": "bf16"}], ids=["fp16", "bf16"])
@pytest.mark.parametrize("way", ["plain", "hook", "loss"])
def test_a_head_whose_result_gets_none_gets_no_gradient(way, options, monkeypatch):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.read, self.unread = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x):
            hidden = torch.tanh(self.body(x))
            unread = self.unread(hidden)
            if way == "hook":
                unread.register_hook(lambda gradient: gradient * 0.5)
            if way == "loss":
                return self.read(hidden), nn.functional.cross_entropy(unread, torch.arange(4))
            return self.read(hidden), torch.tanh(unread)

    monkeypatch.setattr("amprewrite.passes.lower.split_losses.FROM_BYTES", 1)
    amp = amprewrite.rewrite(Heads(), **options)
    Sink.apply(*amp(torch.randn(4, 8)))[0].sum().backward()
    assert [name for name, p in amp.named_parameters() if p.grad is None] == ["unread.weight", "unread.bias"]


def test_a_graph_with_nothing_differentiable_is_rewritten_too():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 2)

        def forward(self, x, lengths):
            mask = torch.arange(4) < lengths.unsqueeze(-1)
            torch._dynamo.graph_break()
            return self.up(x) * mask.unsqueeze(-1)

    amp = amprewrite.rewrite(Masked(), dtype="fp16", loss_scale=64.0)
    amp(torch.randn(3, 4, 8), torch.tensor([1, 2, 4])).sum().backward()
    assert len(amp.plan.regions) == 2 and not [part for part in amp.plan.skipped if "stays fp32" in str(part)]
    assert amp.up.weight.grad is not None


class Scaler(torch.amp.GradScaler):
    """One of the classes that libraries derive."""


@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, Scaler])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("attach", [False, True])
def test_a_grad_scaler_that_skips_is_told_of_at_the_next_backward(scaler, clips, attach):
    """Two scales overflow, so the scaler calls no step; the loss stands still."""
    amp = amprewrite.rewrite(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), dtype="fp16")
    optimizer, scales = torch.optim.SGD(amp.parameters(), lr=0.1), scaler("cpu")
    if attach:
        amp.attach(optimizer)
    x = torch.randn(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        scales.scale(amp(x).square().mean()).backward()
        if clips:
            scales.unscale_(optimizer)
            nn.utils.clip_grad_norm_(amp.parameters(), 1.0)
        scales.step(optimizer)
        scales.update()

    step()
    with pytest.raises(amprewrite.LossScaleError, match=r"a torch\.amp\.GradScaler steps this optimizer"):
        step()


@pytest.mark.parametrize("options", [{"loss_scale": "none"}, {"dtype": "bf16"}, {}], ids=str)
def test_a_grad_scaler_that_does_no_harm_is_left_alone(options):
    """One that is asked for, one in bf16, one that is disabled, and one for another model of the same loop."""
    amp = amprewrite.rewrite(nn.Linear(8, 4), **{"dtype": "fp16", **options})
    other, x = nn.Linear(8, 4), torch.randn(4, 8)
    own, others = torch.optim.SGD(amp.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    scaler, beside = torch.amp.GradScaler("cpu", enabled=bool(options), init_scale=2.0), torch.amp.GradScaler("cpu", init_scale=2.0**120)
    for _ in range(4):
        own.zero_grad()
        others.zero_grad()
        scaler.scale(amp(x).square().mean() * 1e-3).backward()
        beside.scale(other(x).square().mean() * 1e30).backward()  # overflows
        scaler.step(own)
        scaler.update()
        beside.step(others)
        beside.update()
    assert beside.get_scale() < 2.0**120
