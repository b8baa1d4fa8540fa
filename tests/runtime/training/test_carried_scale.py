"""The loss scale rides in the optimizer's state_dict, and wrappers that hold schedules learn of skipped steps."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_help import data, mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import amprewrite
from amprewrite import AmpRewriteWarning, DynamicLossScale, PolicyError
from amprewrite.runtime.training.optimizers.optimizer_hooks import KEY

OVERFLOWS = (1, 4, 6, 8)


def build(optimizer: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = mlp()
    stepped = optimizer(model.parameters(), lr=1e-2)
    return model, stepped, amprewrite.rewrite(model, **{"dtype": "fp16", **options})


def train(amp: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = amp(data(seed=step)).square().mean()
        (loss * (1e30 if step in OVERFLOWS else 1)).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fused(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(*args, **kwargs, fused=True)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, fused], ids=["AdamW", "SGD", "fused"])
@pytest.mark.parametrize("attach", [False, True], ids=["found", "attached"])
def test_a_checkpoint_of_model_and_optimizer_alone_resumes_bitwise(optimizer: Any, attach: bool):
    _, stepped, amp = build(optimizer)
    whole = train(amp, stepped, 0, 10)
    expected = amp.loss_scale.state_dict()
    model, stepped, amp = build(optimizer)
    train(amp, stepped, 0, 5)
    saved = through_a_file({"model": model.state_dict(), "optimizer": stepped.state_dict()})
    model, stepped, amp = build(optimizer)
    if attach:
        amp.attach(stepped)
    model.load_state_dict(saved["model"])
    stepped.load_state_dict(saved["optimizer"])
    assert train(amp, stepped, 5, 10) == whole[5:]
    assert amp.loss_scale.state_dict() == expected
    assert KEY not in stepped.param_groups[0]


def test_an_attached_optimizer_resumes_at_once_and_saving_changes_nothing():
    _, stepped, amp = build()
    amp.attach(stepped)
    train(amp, stepped, 0, 3)
    saved = stepped.state_dict()
    assert saved["param_groups"][0][KEY] == [amp.loss_scale.state_dict()] and KEY not in stepped.param_groups[0]
    train(amp, stepped, 3, 5)
    stepped.load_state_dict(saved)
    assert [amp.loss_scale.state_dict()] == saved["param_groups"][0][KEY]


def test_a_load_that_calls_no_hooks_is_seen_by_the_next_forward():
    """As that of optimizers which have a `load_state_dict` of their own."""
    _, stepped, amp = build()
    train(amp, stepped, 0, 3)
    came = stepped.state_dict()["param_groups"][0][KEY]
    train(amp, stepped, 3, 5)
    stepped.param_groups[0][KEY] = came
    amp(data())
    assert amp.loss_scale.report().steps == 3 and KEY not in stepped.param_groups[0]


def test_without_dynamic_scales_nothing_is_added():
    for options in ({"dtype": "bf16"}, {"loss_scale": 8.0}, {"loss_scale": None}):
        _, stepped, amp = build(**options)
        train(amp, stepped, 0, 1)
        assert KEY not in stepped.state_dict()["param_groups"][0]


def test_a_checkpoint_without_a_scale_leaves_it_as_it_is():
    model, stepped, amp = build()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2).state_dict()
    train(amp, stepped, 0, 3)
    before = amp.loss_scale.state_dict()
    stepped.load_state_dict(plain)
    assert amp.loss_scale.state_dict() == before


def test_a_run_that_goes_on_in_bf16_or_with_a_static_scale_does():
    _, stepped, amp = build()
    train(amp, stepped, 0, 3)
    saved = stepped.state_dict()
    _, stepped, amp = build(dtype="bf16")
    stepped.load_state_dict(saved)
    train(amp, stepped, 2, 4)
    _, stepped, amp = build(loss_scale=8.0)
    stepped.load_state_dict(saved)
    with pytest.warns(AmpRewriteWarning, match=r"has a loss scale, which is left out: this model's own is StaticLossScale\(8\)"):
        train(amp, stepped, 2, 4)
    assert amp.loss_scale.value == 8


def test_what_is_no_state_is_refused():
    for wrong, says in ((3, "must be a list of states"), ([{"scale": 1.0}], "lacks growth_factor")):
        _, stepped, amp = build()
        saved = stepped.state_dict()
        saved["param_groups"][0][KEY] = wrong
        stepped.load_state_dict(saved)
        with pytest.raises(PolicyError, match=says):
            amp(data())


def test_models_of_one_optimizer_are_told_apart_by_their_order():
    def build_two() -> Any:
        models = [mlp(0), mlp(1)]
        stepped = torch.optim.SGD([p for each in models for p in each.parameters()], lr=0.1)
        scales = [DynamicLossScale(init=2.0**8), DynamicLossScale(init=2.0**9)]
        return stepped, [amprewrite.rewrite(each, dtype="fp16", loss_scale=scale) for each, scale in zip(models, scales, strict=True)]

    stepped, amps = build_two()
    for amp in amps:
        amp.attach(stepped)
    saved = stepped.state_dict()
    stepped, amps = build_two()
    amps[0].loss_scale.load_state_dict(DynamicLossScale(init=2.0**4).state_dict())
    stepped.load_state_dict(saved)
    for amp in amps:  # found one after the other
        amp(data())
    assert [amp.loss_scale.value for amp in amps] == [2.0**8, 2.0**9]


def test_a_scale_that_two_optimizers_carry_is_resumed_once():
    """The second is found when the scale has moved on already: it must not go back."""

    def build_two() -> Any:
        models, scale = [mlp(0), mlp(1)], DynamicLossScale(init=2.0**20)
        amps = [amprewrite.rewrite(each, dtype="fp16", loss_scale=scale) for each in models]
        return scale, amps, [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]

    def turns(amps: Any, optimizers: Any, first: int, last: int) -> list[float]:
        pairs = list(zip(amps, optimizers, strict=True))
        return [loss for step in range(first, last) for amp, each in pairs for loss in train(amp, each, step, step + 1)]

    scale, amps, optimizers = build_two()
    whole = turns(amps, optimizers, 0, 8)
    expected = scale.state_dict()
    scale, amps, optimizers = build_two()
    turns(amps, optimizers, 0, 4)
    saved = [(amp.state_dict(), each.state_dict()) for amp, each in zip(amps, optimizers, strict=True)]
    saved = copy.deepcopy(saved)
    scale, amps, optimizers = build_two()
    for amp, each, (weights, state) in zip(amps, optimizers, saved, strict=True):
        amp.load_state_dict(weights)
        each.load_state_dict(state)
    assert turns(amps, optimizers, 4, 8) == whole[8:]
    assert scale.state_dict() == expected
    amps[0].load_state_dict(saved[0][0])
    again = torch.optim.SGD(amps[0].parameters(), lr=0.1)  # goes back to the checkpoint, with an optimizer made anew
    again.load_state_dict(saved[0][1])
    amps[0].attach(again)
    assert [scale.state_dict()] == saved[0][1]["param_groups"][0][KEY]


def test_the_distributed_state_dict_carries_it():
    model, stepped, amp = build()
    train(amp, stepped, 0, 5)
    saved = through_a_file(get_optimizer_state_dict(model, stepped))
    expected = amp.loss_scale.state_dict()
    model, stepped, amp = build()
    set_optimizer_state_dict(model, stepped, saved)
    amp(data())
    assert amp.loss_scale.state_dict() == expected


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
def test_a_sharded_optimizer_carries_it(tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:

        def sharded(params: Any, lr: float) -> Any:
            return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=lr)

        _, stepped, amp = build(sharded)
        train(amp, stepped, 0, 5)
        expected = amp.loss_scale.state_dict()
        stepped.consolidate_state_dict()
        saved = copy.deepcopy(stepped.state_dict())
        _, stepped, amp = build(sharded)
        stepped.load_state_dict(saved)
        amp(data())
        assert amp.loss_scale.state_dict() == expected
    finally:
        dist.destroy_process_group()


def test_copies_of_an_optimizer_carry_nothing_stale():
    _, stepped, amp = build()
    train(amp, stepped, 0, 3)
    twin = copy.deepcopy({"amp": amp, "optimizer": stepped})
    assert KEY not in twin["optimizer"].param_groups[0]
    assert train(twin["amp"], twin["optimizer"], 3, 6) == train(amp, stepped, 3, 6)


def test_the_hooks_go_with_the_model():
    model, stepped, amp = build()
    train(amp, stepped, 0, 1)
    assert stepped._optimizer_state_dict_post_hooks and stepped._optimizer_load_state_dict_post_hooks
    del amp
    gc.collect()
    assert not stepped._optimizer_state_dict_post_hooks and not stepped._optimizer_load_state_dict_post_hooks
    assert KEY not in stepped.state_dict()["param_groups"][0]
    assert model is not None


class Asking:
    """Steps an optimizer and wants to know how it went, as accelerate's AcceleratedOptimizer does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self._is_overflow = optimizer, False

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, fused], ids=["AdamW", "fused"])
@pytest.mark.parametrize("deep", [False, True], ids=["one wrapper", "two wrappers"])
def test_a_wrapper_that_asks_is_told_of_every_step(optimizer: Any, deep: bool):
    _, stepped, amp = build(optimizer)
    wrapper = Asking(stepped)
    outer = Asking(wrapper) if deep else wrapper  # type: ignore[arg-type]
    told = []
    for step in range(8):
        train(amp, outer, step, step + 1)
        told.append((wrapper._is_overflow, outer._is_overflow))
    assert told == [(step in OVERFLOWS, step in OVERFLOWS) for step in range(8)]
    assert amp.loss_scale.report().skipped == 3


def test_a_wrapper_is_told_where_there_is_a_closure_and_where_there_are_no_gradients():
    _, stepped, amp = build(torch.optim.SGD)
    wrapper = Asking(stepped)

    def closure(factor: float) -> Any:
        stepped.zero_grad()
        loss = amp(data()).square().mean()
        (loss * factor).backward()
        return loss

    amp(data())
    wrapper.step(lambda: closure(torch.inf))
    assert wrapper._is_overflow is True
    wrapper.step(lambda: closure(1.0))
    assert wrapper._is_overflow is False
    wrapper.step(lambda: closure(torch.inf))
    stepped.zero_grad()
    wrapper.step()
    assert wrapper._is_overflow is False


def test_a_wrapper_forgets_the_last_skip_with_the_model():
    """Else its schedules would stand still for ever."""
    model, stepped, amp = build(torch.optim.SGD)
    wrapper = Asking(stepped)
    train(amp, wrapper, 1, 2)
    assert wrapper._is_overflow
    amprewrite.restore(amp)
    assert not wrapper._is_overflow and model is not None


def test_nothing_else_that_steps_is_touched():
    _, stepped, amp = build(torch.optim.SGD)
    other = Asking(torch.optim.SGD(mlp().parameters(), lr=0.1))

    class Loop:
        _is_overflow = None

        def step(self) -> None:
            train(amp, stepped, 1, 2)

    loop = Loop()
    loop.step()
    assert loop._is_overflow is None and other._is_overflow is False
