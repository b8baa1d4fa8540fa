"""accelerate, on the real library: schedules stand still for skipped steps, checkpoints have the scale, with and without the helper."""

from __future__ import annotations

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
