"""Loss scales: schedules against their originals, state both ways with GradScaler, bad input."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from amprewrite.runtime.training.loss_scale import (
    DEFAULT_CAP,
    DEFAULT_FLOOR,
    PRESETS,
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
    parse_loss_scale,
)
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import BF16, FP16


def flag(overflow: bool) -> torch.Tensor:
    return torch.tensor(float(overflow))


def trajectory(scale: LossScale, overflows: list[bool]) -> list[float]:
    """The scale before each step and after the last."""
    values = [scale.value]
    for overflow in overflows:
        scale.update(flag(overflow))
        values.append(scale.value)
    return values


def overflow_patterns(length: int) -> list[list[bool]]:
    """Clean, rare, frequent, bursts, and all bad."""
    rng = random.Random(7)
    bursts = [step % 37 < 5 for step in range(length)]
    return [[False] * length, *([rng.random() < p for _ in range(length)] for p in (0.01, 0.1, 0.5)), bursts, [True] * 60]


# What each library does, written from its source as plain Python.


def torch_steps(overflows: list[bool], window: int) -> list[float]:
    """The real thing."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=window)
    scaler.scale(torch.ones(()))
    values = [scaler.get_scale()]
    for overflow in overflows:
        scaler._per_optimizer_states[0]["found_inf_per_device"] = {torch.device("cpu"): flag(overflow)}
        scaler.update()
        values.append(scaler.get_scale())
    return values


def keras_steps(overflows: list[bool], window: int) -> list[float]:
    scale, good = 2.0**15, 0
    values = [scale]
    for overflow in overflows:
        if overflow:
            scale, good = max(scale / 2, 1.0), 0
        elif good + 1 >= window:
            scale, good = (scale * 2 if scale * 2 <= torch.finfo(torch.float32).max else scale), 0
        else:
            good += 1
        values.append(scale)
    return values


def keras3_steps(overflows: list[bool], window: int) -> list[float]:
    scale, counter = 2.0**15, 0
    values = [scale]
    for overflow in overflows:
        if overflow:
            scale, counter = scale / 2, 0
        elif counter == window - 1:
            scale, counter = scale * 2, 0
        else:
            counter += 1
        values.append(scale)
    return values


def apex_steps(overflows: list[bool], window: int) -> list[float]:
    scale, unskipped = 2.0**16, 0
    values = [scale]
    for overflow in overflows:
        scale, unskipped = (scale / 2, 0) if overflow else (scale, unskipped + 1)
        if unskipped == window:
            scale, unskipped = min(2.0**24, scale * 2), 0
        values.append(scale)
    return values


def deepspeed_steps(overflows: list[bool], window: int) -> list[float]:
    """Until it would end the run."""
    scale, last_overflow, hysteresis = 2.0**16, -1, 2
    values = [scale]
    for iteration, overflow in enumerate(overflows):
        if overflow:
            if hysteresis == 1:
                if scale == 1.0:
                    break
                scale = max(scale / 2, 1.0)
            else:
                hysteresis -= 1
            last_overflow = iteration
        else:
            stable = iteration - last_overflow - 1
            if stable > 0 and stable % window == 0:
                hysteresis = 2
                scale *= 2
        values.append(scale)
    return values


def megatron_steps(overflows: list[bool], window: int) -> list[float]:
    scale, tracker, hysteresis = 2.0**32, 0, 2
    values = [scale]
    for overflow in overflows:
        if overflow:
            tracker, hysteresis = 0, hysteresis - 1
            if hysteresis <= 0:
                scale = max(scale * 0.5, 1.0)
        else:
            tracker += 1
            if tracker == window:
                tracker, hysteresis, scale = 0, 2, scale * 2
        values.append(scale)
    return values


def as_fp32(values: list[float]) -> list[float]:
    """Up to where a Python number leaves fp32's normal range."""
    return list(itertools.takewhile(lambda value: 2.0**-126 <= value < 2.0**128, values))


ORIGINALS: dict[str, Callable[[list[bool], int], list[float]]] = {
    "torch": torch_steps,
    "tf": keras_steps,
    "keras": keras_steps,
    "keras3": keras3_steps,
    "apex": apex_steps,
    "deepspeed": deepspeed_steps,
    "megatron": megatron_steps,
}


def test_every_preset_but_ours_has_an_original():
    assert set(PRESETS) == {*ORIGINALS, "auto"}


def test_auto_moves_as_torch_does_where_the_first_step_is_clean():
    overflows = [False] * 30 + [True] + [False] * 40
    assert trajectory(parse_loss_scale("auto", "fp16"), overflows) == torch_steps(overflows, 2000)


def test_auto_falls_fast_until_the_first_clean_step_then_grows_back_until_it_overflows():
    searched = trajectory(parse_loss_scale("auto", "fp16"), [True] * 2 + [False] * 201 + [True] + [False] * 200)
    assert searched[:4] == [65536.0, 4096.0, 256.0, 256.0]
    assert searched[102:104] == [256.0, 512.0]
    assert searched[202:204] == [512.0, 1024.0]
    assert searched[204:] == [512.0] * 201


def test_a_search_goes_on_after_a_resume():
    first = parse_loss_scale("auto", "fp16")
    trajectory(first, [True, False])
    second = parse_loss_scale("auto", "fp16")
    second.load_state_dict(first.state_dict())
    assert trajectory(second, [False] * 100)[-2:] == [4096.0, 8192.0]


@pytest.mark.parametrize("window", [1, 3, 20], ids="window {}".format)
@pytest.mark.parametrize("name", ORIGINALS)
def test_a_preset_moves_as_its_original(name, window):
    for overflows in overflow_patterns(400):
        expected = as_fp32(ORIGINALS[name](overflows, window))
        got = trajectory(DynamicLossScale(**{**PRESETS[name], "growth_interval": window}), overflows)
        assert got[: len(expected)] == expected


@pytest.mark.parametrize(
    ("name", "init", "window"),
    [
        ("torch", 2**16, 2000),
        ("tf", 2**15, 2000),
        ("keras", 2**15, 2000),
        ("keras3", 2**15, 2000),
        ("apex", 2**16, 2000),
        ("deepspeed", 2**16, 1000),
        ("megatron", 2**32, 1000),
    ],
)
def test_a_preset_starts_where_its_original_does(name, init, window):
    scale = DynamicLossScale.preset(name)
    assert (scale.value, scale.growth_interval) == (init, window)


def test_deepspeed_says_stuck_only_at_the_floor_with_its_hysteresis_spent():
    scale = DynamicLossScale.preset("deepspeed")
    for _ in range(17):
        scale.observe(flag(True))
        assert not scale.stuck()
        scale.apply_pending()
    assert scale.value == 1.0
    scale.observe(flag(False))
    assert not scale.stuck()
    scale.apply_pending()
    scale.observe(flag(True))
    assert scale.stuck()


def test_the_kernel_and_our_own_arithmetic_agree():
    for overflows in overflow_patterns(300):
        kernel = DynamicLossScale(growth_interval=7, floor=2.0**10, cap=2.0**20)
        ours = DynamicLossScale(growth_interval=7, floor=2.0**10, cap=2.0**20)
        values = []
        for overflow in overflows:
            ours._scale = ours._moved_by_where(ours._scale, flag(overflow) > 0).clamp(ours.floor, ours.cap)
            values.append(ours._scale.item())
        assert trajectory(kernel, overflows)[1:] == values
        assert torch.equal(kernel._growth_tracker, ours._growth_tracker)


@pytest.mark.parametrize("settings", [*PRESETS.values(), {"search_interval": 3}, {"refill": "good", "hysteresis": 2}], ids=str)
def test_a_step_that_is_only_counted_moves_what_the_whole_rule_moves(settings, monkeypatch):
    for overflows in overflow_patterns(120):
        short, whole = (DynamicLossScale(**{**settings, "growth_interval": 7}) for _ in range(2))
        monkeypatch.setattr(whole, "_only_counts", lambda found_inf: 0)
        for overflow in overflows:
            for scale in (short, whole):
                scale.update(flag(overflow))
            assert all(torch.equal(getattr(short, name), getattr(whole, name)) for name in DynamicLossScale._state)
            assert all(getattr(short, name).dtype == getattr(whole, name).dtype for name in DynamicLossScale._state)
            assert list(map(float, short.snapshot("cpu"))) == list(map(float, whole.snapshot("cpu")))


def test_a_step_that_is_only_counted_writes_to_no_scale_that_a_forward_has():
    scale = DynamicLossScale(growth_interval=3)
    taken = []
    for _ in range(8):
        taken.append(scale.snapshot("cpu"))
        scale.observe(flag(False))
    assert [pair[0].item() for pair in taken] == [2.0**16] * 3 + [2.0**17] * 3 + [2.0**18] * 2


@pytest.mark.parametrize(("name", "last"), [("keras3", math.inf), ("megatron", math.inf), ("torch", 2.0**127), ("tf", 2.0**127)])
def test_growth_past_fp32_ends_as_in_the_original(name, last):
    scale = DynamicLossScale(**{**PRESETS[name], "growth_interval": 1})
    assert trajectory(scale, [False] * 130)[-1] == last


def test_hysteresis_refilled_by_good_steps_needs_overflows_in_a_row():
    scale = DynamicLossScale(hysteresis=2, refill="good")
    assert trajectory(scale, [True, False, True, False, True, True])[1:] == [2**16] * 5 + [2**15]
    scale = DynamicLossScale(hysteresis=2)
    assert trajectory(scale, [True, False, True, False, True])[1:] == [2**16, 2**16, 2**15, 2**15, 2**14]


def test_floor_and_cap_hold():
    scale = DynamicLossScale(growth_interval=1)
    assert min(trajectory(scale, [True] * 100)) == DEFAULT_FLOOR
    assert scale.at_floor
    assert max(trajectory(scale, [False] * 100)) == DEFAULT_CAP


@pytest.mark.parametrize("scale", [StaticLossScale(1024), DynamicLossScale(growth_interval=2)], ids=repr)
def test_a_scale_that_was_handed_out_never_changes(scale):
    pair = scale.snapshot("cpu")
    before = [t.clone() for t in pair]
    assert scale.snapshot("cpu")[0] is pair[0]
    for overflow in (True, False, False, False):
        scale.update(flag(overflow))
    scale.load_state_dict({**scale.state_dict(), "scale": 4.0})
    assert all(map(torch.equal, pair, before))
    assert [t._version for t in pair] == [0, 0]
    assert [t.item() for t in scale.snapshot("cpu")] == [4.0, 0.25]
    assert all(t.dtype == torch.float32 and t.dim() == 0 for t in scale.snapshot("cpu"))


def test_one_update_a_set_of_steps():
    scale = DynamicLossScale(growth_interval=100)
    scale.observe(flag(False), source="a")
    scale.observe(flag(True), source="b")
    assert scale.report().steps == 1
    assert scale.value == 2**15
    scale.observe(flag(False), source="a")
    scale.observe(flag(False), source="a")  # the same again: the first was a set by itself
    assert scale.consecutive_skips() == 0
    scale.snapshot("cpu")
    for _ in range(5):  # forwards without a step count nothing
        scale.snapshot("cpu")
    assert scale.report().steps == 3


def test_a_peek_at_the_skips_leaves_the_set_open():
    scale = DynamicLossScale()
    scale.observe(flag(True), source="a")
    assert scale.consecutive_skips() == 1
    scale.observe(flag(True), source="b")
    assert scale.consecutive_skips() == 1
    assert scale.report().steps == 1


def test_first_use_under_inference_mode_leaves_ordinary_tensors():
    scale = DynamicLossScale()
    with torch.inference_mode():
        scale.update(flag(True))
        factor, _ = scale.snapshot("cpu")
    assert not factor.is_inference()
    x = torch.ones(2, requires_grad=True)
    (x * factor).sum().backward()
    scale.update(flag(True))


def test_report_counts_and_reads_well():
    scale = DynamicLossScale()
    assert str(scale.report()) == "dynamic loss scale 65536: 0 of 0 steps skipped"
    for overflow in (False, True, False, True, True):
        scale.update(flag(overflow))
    scale.overflow_at = "encoder.layer.0 (matmul)"
    report = scale.report()
    assert (report.steps, report.skipped, report.consecutive_skips, report.last_overflow_step) == (5, 3, 2, 5)
    scale.update(flag(False))
    assert scale.report().last_overflow_step == 5
    assert str(report) == (
        "dynamic loss scale 8192: 3 of 5 steps skipped, last at step 5, 2 in a row just now\n"
        "last overflow began at encoder.layer.0 (matmul)"
    )
    assert str(NoLossScale().report()) == "no loss scaling"
    with pytest.raises(AttributeError):
        report.scale = 1.0


# State


@pytest.mark.parametrize("overflows", overflow_patterns(50))
def test_state_goes_to_grad_scaler_and_back(overflows):
    scaler = torch.amp.GradScaler("cpu", growth_factor=4.0, backoff_factor=0.25, growth_interval=9)
    ours = DynamicLossScale(growth_factor=4.0, backoff_factor=0.25, growth_interval=9, floor=None, cap=None)
    trajectory(ours, overflows)
    scaler.load_state_dict(ours.state_dict())
    assert scaler.state_dict().items() <= ours.state_dict().items()
    scaler.scale(torch.ones(()))
    back = DynamicLossScale.preset("torch")
    back.load_state_dict(scaler.state_dict())
    assert trajectory(back, overflows) == trajectory(ours, overflows)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_resuming_goes_on_bitwise(name, how):
    overflows = overflow_patterns(120)[2]
    scale = DynamicLossScale(**{**PRESETS[name], "growth_interval": 4})
    trajectory(scale, overflows[:57])
    scale.snapshot("cpu")
    scale.observe(flag(True))
    if how == "state_dict":
        other = DynamicLossScale()
        other.load_state_dict(pickle.loads(pickle.dumps(scale.state_dict())))
    else:
        other = pickle.loads(pickle.dumps(scale)) if how == "pickle" else copy.deepcopy(scale)
    assert trajectory(other, overflows[57:]) == trajectory(scale, overflows[57:])
    assert other.report() == scale.report()
    assert other.state_dict() == scale.state_dict()


def test_static_state_goes_to_grad_scaler_and_stays_static():
    static = StaticLossScale(128)
    static.update(flag(True))
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(static.state_dict())
    scaler.scale(torch.ones(()))
    for overflow in (True, False, False):
        scaler._per_optimizer_states[0]["found_inf_per_device"] = {torch.device("cpu"): flag(overflow)}
        scaler.update()
        static.update(flag(overflow))
    assert scaler.get_scale() == static.value == 128
    other = StaticLossScale(1)
    other.load_state_dict(static.state_dict())
    assert other.report() == static.report()
    with pytest.raises(PolicyError, match="static"):
        static.load_state_dict(DynamicLossScale().state_dict())


def test_no_loss_scale_ignores_a_scalers_state():
    none = NoLossScale()
    assert none.state_dict() == {}
    none.load_state_dict({})
    none.load_state_dict(DynamicLossScale().state_dict())
    none.observe(flag(True))
    none.update(flag(True))
    assert none.value == 1.0
    assert none.report().steps == 0
    with pytest.raises(PolicyError):
        none.load_state_dict({"model": 1})


@pytest.mark.parametrize(
    ("state", "says"),
    [
        pytest.param({}, "empty", id="a disabled scaler's"),
        pytest.param({"state": {}, "param_groups": []}, "lacks scale", id="an optimizer's"),
        pytest.param([1, 2], "list", id="a list"),
        pytest.param({**DynamicLossScale().state_dict(), "scale": 0.0}, "scale=0.0", id="a zero scale"),
        pytest.param({**DynamicLossScale().state_dict(), "scale": math.nan}, "scale=nan", id="a NaN scale"),
        pytest.param({**DynamicLossScale().state_dict(), "growth_factor": 0.5}, "growth_factor", id="a factor that shrinks"),
    ],
)
def test_a_state_of_something_else_is_refused_and_nothing_changes(state, says):
    scale = DynamicLossScale(growth_interval=3)
    before = scale.state_dict()
    with pytest.raises(PolicyError, match=says):
        scale.load_state_dict(state)
    assert scale.state_dict() == before


OWN = DynamicLossScale().state_dict()["amprewrite"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, bad) for key in ("scale", "growth_factor", "backoff_factor") for bad in (None, "2", [2.0], True, math.inf)),
        *((key, bad) for key in ("growth_interval", "_growth_tracker") for bad in (None, "2", 2.5, [2], True, 2**40)),
        *(("amprewrite", bad) for bad in (None, [1], "own", 3)),
        *(("amprewrite", OWN | {"counters": bad}) for bad in (None, 3, [1, 2], [0, 0, 0, -1], [0, 0, 0, "x"], [0, 0, 0, 2**70])),
        *(("amprewrite", OWN | {key: bad}) for key in ("left", "searching", "hysteresis", "rest") for bad in ("x", [1], 1.5, -1, True)),
        *(("amprewrite", OWN | {key: bad}) for key in ("floor", "cap") for bad in ("x", [1.0], True, -1.0, math.nan)),
        *(("amprewrite", OWN | {"refill": bad}) for bad in (None, [], "never")),
        *(("amprewrite", OWN | {"search_interval": bad}) for bad in ("x", [], 0, 1.5, True)),
        ("amprewrite", OWN | {"raise_at_floor": "yes"}),
        ("amprewrite", OWN | {"raise_at_floor": True, "floor": None}),
        ("amprewrite", OWN | {"floor": 8.0, "cap": 4.0}),
    ],
)
def test_a_malformed_state_is_refused_whole(key, value):
    scale = DynamicLossScale(init=2.0**9, growth_interval=3, hysteresis=2, search_interval=5)
    for found in (False, False, True):
        scale.update(flag(found))
    before = scale.state_dict()
    other = DynamicLossScale(init=2.0**4, growth_interval=7).state_dict()
    with pytest.raises(PolicyError):
        scale.load_state_dict({**other, key: value})
    assert scale.state_dict() == before
    static = StaticLossScale(4.0)
    if key in ("scale", "growth_interval", "_growth_tracker"):
        with pytest.raises(PolicyError):
            static.load_state_dict({**StaticLossScale(8.0).state_dict(), key: value})
        assert static.value == 4.0


# What users write


@pytest.mark.parametrize(
    ("spec", "fmt", "kind", "value"),
    [
        ("auto", FP16, DynamicLossScale, 2**16),
        ("auto", "fp16", DynamicLossScale, 2**16),
        ("auto", BF16, NoLossScale, 1),
        ("auto", torch.float32, NoLossScale, 1),
        ("none", FP16, NoLossScale, 1),
        ("dynamic", BF16, DynamicLossScale, 2**16),
        ("megatron", FP16, DynamicLossScale, 2**32),
        (128, FP16, StaticLossScale, 128),
        (0.5, FP16, StaticLossScale, 0.5),
    ],
)
def test_specs(spec, fmt, kind, value):
    scale = parse_loss_scale(spec, fmt)
    assert type(scale) is kind
    assert scale.value == value


def test_an_object_is_taken_as_it_is():
    scale = StaticLossScale(2)
    assert parse_loss_scale(scale, FP16) is scale


@pytest.mark.parametrize("spec", ["dynamical", None, True, [1], -1, 0, math.inf, math.nan, 1e-60, DynamicLossScale])
def test_other_specs_are_refused(spec):
    with pytest.raises(PolicyError):
        parse_loss_scale(spec, FP16)


@pytest.mark.parametrize(
    "bad",
    [
        {"init": 0},
        {"init": -2.0},
        {"init": math.inf},
        {"init": "big"},
        {"init": 2.0**40},
        {"growth_factor": 1.0},
        {"growth_factor": math.inf},
        {"backoff_factor": 0.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": math.nan},
        {"growth_interval": 0},
        {"growth_interval": 1.5},
        {"hysteresis": 0},
        {"hysteresis": True},
        {"rest": -1},
        {"refill": "never"},
        {"floor": 0.0},
        {"floor": 2.0**20},
        {"cap": 2.0**10},
        {"cap": -1.0},
        {"floor": 8.0, "cap": 4.0},
        {"floor": None, "raise_at_floor": True},
        {"per_layer": True},
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad: dict[str, Any]):
    with pytest.raises(PolicyError):
        DynamicLossScale(**bad)


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(PolicyError, match="deepspeed"):
        DynamicLossScale.preset("tensorflow")
