"""accelerate, on the real library: schedules stand still for skipped steps, checkpoints have the scale, with and without the helper."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_help import data, mlp

import amprewrite
from amprewrite import DynamicLossScale, PolicyError

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'amprewrite[accelerate]'")
helper = pytest.importorskip("amprewrite.integrations.accelerate")


def prepared(way: str, optimizer: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any, Any, Any]:
    accelerator = accelerate.Accelerator(cpu=True)
    model = mlp()
    stepped = optimizer(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(stepped, lambda step: 0.5**step)
    options = {"dtype": "fp16", "loss_scale": DynamicLossScale(init=2.0**22), **options}
    if way == "helper":
        return (accelerator, *helper.prepare(accelerator, model, stepped, schedule, **options))
    return (accelerator, *accelerator.prepare(amprewrite.rewrite(model, **options), stepped, schedule))


def train(accelerator: Any, model: Any, optimizer: Any, schedule: Any, steps: int = 12) -> list[tuple[bool, float]]:
    seen = []
    for step in range(steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(data(seed=step)).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen.append((accelerator.optimizer_step_was_skipped, schedule.get_last_lr()[0]))
    return seen


def fused(*args: Any, **kwargs: Any) -> Any:
    return torch.optim.AdamW(*args, **kwargs, fused=True)


@pytest.mark.parametrize("way", ["helper", "alone"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, fused], ids=["AdamW", "fused"])
def test_schedules_stand_still_for_skipped_steps(way: str, optimizer: Any):
    accelerator, model, stepped, schedule = prepared(way, optimizer)
    seen = train(accelerator, model, stepped, schedule)
    skipped = [each for each, _ in seen]
    assert 3 < sum(skipped) < 12 and not skipped[-1] and sum(skipped) == model.loss_scale.report().skipped
    taken = 0
    for was_skipped, rate in seen:
        taken += not was_skipped
        assert rate == 0.1 * 0.5**taken


@pytest.mark.parametrize("way", ["helper", "alone"])
def test_save_state_and_load_state_have_the_scale(way: str, tmp_path: Path):
    accelerator, model, stepped, schedule = prepared(way)
    train(accelerator, model, stepped, schedule)
    expected = model.loss_scale.state_dict()
    accelerator.save_state(str(tmp_path))
    accelerator, model, stepped, schedule = prepared(way)
    accelerator.load_state(str(tmp_path))
    model(data())
    assert model.loss_scale.state_dict() == expected


def test_prepare_gives_what_accelerate_gives_and_rewrites_the_model_itself():
    accelerator, model = accelerate.Accelerator(cpu=True), mlp()
    assert helper.prepare(accelerator, model, dtype="bf16") is model
    assert model(data()).dtype is torch.float32 and model.plan.low == "bf16"
    assert helper.prepare(accelerator, model, dtype="bf16") is model


def test_a_mixed_precision_of_its_own_is_refused_by_name():
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state._mixed_precision = "bf16"
    try:
        with pytest.raises(PolicyError, match=r"mixed_precision='bf16'.*make it with mixed_precision='no'"):
            helper.prepare(accelerator, mlp(), dtype="bf16")
    finally:
        accelerator.state._mixed_precision = "no"
    with pytest.raises(PolicyError, match="no module to rewrite"):
        helper.prepare(accelerator, dtype="bf16")


def test_step_was_skipped_follows_each_step():
    """As accelerate's own test of it: gradients written by hand, finite, NaN, NaN, finite. NaN that was left there would count again."""
    accelerator, model, stepped, _ = prepared("helper", torch.optim.SGD, loss_scale=DynamicLossScale(init=2.0**8))
    for value in (0.01, float("nan"), float("nan"), 0.01):
        accelerator.backward(model(data()).sum())
        for p in model.parameters():
            p.grad.fill_(0.01)
        p.grad[0] = value
        stepped.step()
        assert stepped.step_was_skipped is (value != 0.01)
        stepped.zero_grad()


def test_a_prepared_optimizer_is_pickled():
    _, _, stepped, _ = prepared("helper")
    again = pickle.loads(pickle.dumps(stepped))
    assert [len(group["params"]) for group in again.param_groups] == [len(group["params"]) for group in stepped.param_groups]


def test_gradients_accumulate_as_one_batch():
    """As accelerate's own test: no step and no schedule between, and the mean gradient of the batches at the end."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, plain = mlp(), mlp()
    stepped = torch.optim.SGD(model.parameters(), lr=0.1)
    model, stepped = helper.prepare(accelerator, model, stepped, dtype="fp16", loss_scale=DynamicLossScale(init=2.0**10))
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        with accelerator.accumulate(model):
            accelerator.backward(model(data(seed=step)).square().mean())
            (plain(data(seed=step)).square().mean() / 2).backward()
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.linalg.vector_norm(ours.grad - theirs.grad) < 2e-2 * torch.linalg.vector_norm(theirs.grad)
            stepped.step()
            stepped.zero_grad()
        assert accelerator.sync_gradients is (step % 2 == 1)
        assert all(map(torch.equal, before, model.parameters())) is not accelerator.sync_gradients
        if accelerator.sync_gradients:
            plain.load_state_dict(model.state_dict())
            plain.zero_grad()
    assert model.loss_scale.report().steps == 2
