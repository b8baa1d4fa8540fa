"""A step as CUDA graphs need it, on a CPU: nothing in it waits for the device, and a recorded one goes on as an eager one would."""

from __future__ import annotations

import copy

import pytest
import torch
from graph_help import Training, block, conv, recording, syncs
from runtime_help import data, mlp
from tiers import long_beyond

import amprewrite
import amprewrite.runtime.captured.look_ahead
from amprewrite.graphs.fx.ops.on_device import Recorded
from amprewrite.runtime.training.loss_scale import DynamicLossScale, LossScaleError, StaticLossScale


@pytest.mark.parametrize("made", [block, conv], ids=["transformer", "conv net"])
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"cache_weights": "step"}, {"loss_scale": 128.0}], ids=str)
@pytest.mark.parametrize("attach", long_beyond(1, [True, False]), ids=["attached", "found"])
def test_no_step_waits_for_the_device(made, options, attach):
    training = Training(made(), attach=attach, **options)
    for _ in range(amprewrite.runtime.captured.look_ahead.CALLS):  # fp16 looks at its first results, and the optimizer makes its state
        training.step()
    assert syncs(training.step) == []


def test_no_forward_or_backward_in_bf16_waits_not_even_the_first():
    training = Training(block(), dtype="bf16")
    assert syncs(lambda: training.amp(training.x).sum().backward()) == []


@pytest.mark.parametrize("made", [block, conv], ids=["transformer", "conv net"])
def test_inference_waits_for_nothing(made):
    training = Training(made())
    with torch.no_grad():
        for _ in range(amprewrite.runtime.captured.look_ahead.CALLS):
            training.amp(training.x)
        assert syncs(lambda: training.amp(training.x)) == []


def test_accumulation_waits_for_nothing():
    training = Training(block())
    for _ in range(2):
        training.step()

    def accumulated():
        training.optimizer.zero_grad()
        for _ in range(3):
            training.amp(training.x).sum().backward()
        training.optimizer.step()

    assert syncs(accumulated) == []


def test_an_optimizer_that_is_not_fused_asks_once_a_step():
    training = Training(block(), fused=False)
    for _ in range(3):
        training.step()
    with_guard = syncs(training.step).count("_local_scalar_dense")
    model, x = block()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step():
        plain.zero_grad()
        model(x).square().mean().backward()
        plain.step()

    step()
    assert with_guard == syncs(step).count("_local_scalar_dense") + 1


# recorded steps ---------------------------------------------------------------------------------------------------------------

OVERFLOWS = {2, 3, 7}
PLAN = {"growth_interval": 3, "init": 2.0**10}


@pytest.mark.parametrize(
    "scale",
    [
        lambda: DynamicLossScale(**PLAN),
        lambda: DynamicLossScale(search_interval=2, **PLAN),
        lambda: DynamicLossScale(hysteresis=2, **PLAN),
        lambda: StaticLossScale(64.0),
    ],
    ids=["dynamic", "with a search", "with hysteresis", "static"],
)
@pytest.mark.parametrize("cache", long_beyond(1, [True, "step"]), ids=["casts in the graph", "kept copies"])
def test_a_recorded_step_goes_on_as_eager_steps_do(monkeypatch, scale, cache):
    eager, replayed = (Training(block(), loss_scale=scale(), cache_weights=cache) for _ in range(2))
    for training in (eager, replayed):
        for _ in range(4):
            training.step()
    with recording(monkeypatch) as graph:
        loss = replayed.step()
    eager.step()  # the stand-in runs what it records, a CUDA graph does not
    for turn in range(12):
        batch = data(2, 6, 16, seed=turn)
        for training in (eager, replayed):
            training.x.copy_(batch)
            training.factor.fill_(float("inf") if turn in OVERFLOWS else 1.0)
        want = eager.step()
        graph.replay()
        assert torch.equal(loss, want) or turn in OVERFLOWS
        if turn % 4 == 1:  # a look in between changes nothing
            assert replayed.amp.loss_scale.report() == eager.amp.loss_scale.report()
    assert all(torch.equal(a, b) for a, b in zip(replayed.parameters(), eager.parameters(), strict=True))
    same = ("scale", "steps", "skipped", "last_overflow_step")
    left, right = replayed.amp.loss_scale.report(), eager.amp.loss_scale.report()
    assert all(getattr(left, name) == getattr(right, name) for name in same)
    assert left.skipped == len(OVERFLOWS)


def test_eager_steps_and_replays_take_turns(monkeypatch):
    eager, mixed = (Training(block(), loss_scale=DynamicLossScale(**PLAN)) for _ in range(2))
    for training in (eager, mixed):
        for _ in range(4):
            training.step()
    with recording(monkeypatch) as graph:
        mixed.step()
    eager.step()
    for turn in range(9):
        for training in (eager, mixed):
            training.factor.fill_(float("inf") if turn in OVERFLOWS else 1.0)
        eager.step()
        mixed.step() if turn % 3 == 2 else graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(mixed.parameters(), eager.parameters(), strict=True))
    assert mixed.amp.loss_scale.state_dict() == eager.amp.loss_scale.state_dict()


def test_only_the_forward_and_backward_recorded(monkeypatch):
    eager, mixed = (Training(block(), loss_scale=DynamicLossScale(**PLAN)) for _ in range(2))
    for training in (eager, mixed):
        for _ in range(4):
            training.step()
    mixed.optimizer.zero_grad()
    with recording(monkeypatch) as graph:
        mixed.forward_backward()
    mixed.optimizer.step()
    eager.step()
    for turn in range(9):
        for training in (eager, mixed):
            training.factor.fill_(float("inf") if turn in OVERFLOWS else 1.0)
        eager.step()
        graph.replay()
        mixed.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(mixed.parameters(), eager.parameters(), strict=True))
    assert mixed.amp.loss_scale.state_dict() == eager.amp.loss_scale.state_dict()


def test_a_loss_scale_that_was_just_read_can_be_recorded(monkeypatch):
    training = Training(block(), loss_scale=DynamicLossScale(**PLAN))
    for _ in range(4):
        training.step()
    before = training.amp.loss_scale.report()  # leaves no step open
    with recording(monkeypatch) as graph:
        training.step()
    for _ in range(3):
        graph.replay()
    assert training.amp.loss_scale.report().steps == before.steps + 4


def test_a_recorded_scale_can_be_loaded_copied_and_saved(monkeypatch):
    training = Training(block(), loss_scale=DynamicLossScale(**PLAN))
    for _ in range(4):
        training.step()
    saved = training.amp.loss_scale.state_dict()
    with recording(monkeypatch) as graph:
        loss = training.step()
    graph.replay()
    training.amp.loss_scale.load_state_dict({**saved, "scale": 32.0})
    assert training.amp.loss_scale.value == 32.0
    twin = copy.deepcopy(training.amp.loss_scale)
    graph.replay()
    assert loss.isfinite() and training.amp.loss_scale.report().steps == saved["amprewrite"]["counters"][0] + 1
    assert twin.report().steps == saved["amprewrite"]["counters"][0]


def test_recorded_inference_reads_weights_that_were_written_later(monkeypatch):
    training = Training(block())
    with torch.no_grad():
        for _ in range(amprewrite.runtime.captured.look_ahead.CALLS):
            training.amp(training.x)
        with recording(monkeypatch) as graph:
            out = training.amp(training.x)
        for p in training.model.parameters():
            p.mul_(0.5)
        graph.replay()
        assert torch.equal(out, training.amp(training.x))


def test_recording_the_first_step_is_refused(monkeypatch):
    training = Training((mlp(), data()))
    with pytest.raises(LossScaleError, match="take three steps or more on a side stream first"), recording(monkeypatch):
        training.step()


def test_an_error_inside_leaves_the_recorded_tensors_in_place():
    class Owner:
        scale = torch.ones(())

    owner = Owner()
    kept = owner.scale
    recorded = Recorded(owner, ("scale",), torch.full((), -1.0))
    with pytest.raises(KeyError), recorded.in_place():
        owner.scale = torch.zeros(())
        raise KeyError("scale")
    assert owner.scale is kept and float(kept) == 1
