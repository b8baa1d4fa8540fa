"""Options of a wrong type or value: a PolicyError (for lists= an OpListError) that says what is allowed, and quotes little."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.errors import AmpRewriteError, CalibrationError, OpListError, PlanError, PolicyError

LONG = "x" * 5000


class Broken:
    """Its repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


STRANGE = (b"bf16", ["bf16"], {"a": 1}, 3.5, 10**400, Broken(), np.zeros(3), torch.zeros(3), LONG, LONG.encode(), [LONG] * 9, object())
"""Wrong for almost every option."""

WRONG: dict[str, tuple[Any, ...]] = {
    "example_inputs": (5, "x", torch.zeros(3), {"x": 1}, LONG, np.zeros(3)),
    "example_kwargs": (5, "x", (torch.zeros(3),), [1], {3: 1}, torch.zeros(3), LONG, np.zeros(3)),
    "dtype": ("fp8", torch.int32, 16, "", *STRANGE),
    "lists": ("tensorflow", 3, None, *STRANGE),
    "overrides": (
        "softmax", (pair for pair in [("softmax", "deny")]), [], 5, [("softmax", "deny")], {3: "deny"}, {"softmax": 5}, {"softmax": None},
        {LONG: "deny"}, {"linear": LONG}, {f"module:{LONG}": "fp32"}, {f"{LONG}:a": "fp32"}, {"softmax": [LONG]}, {"node:a": "deny"},
        {"linear": np.zeros(3)}, np.zeros(3), torch.zeros(3), LONG, Broken(), {"softmax": Broken()},
    ),
    "plan": (5, "plan", {}, LONG, np.zeros(3)),
    "tolerance": (0, 1, -1e-3, math.nan, "1e-3", True, *STRANGE),
    "accuracy": ("best", 5, True, *STRANGE),
    "device": ("gpu9000", 5, torch.device("cpu"), *STRANGE),
    "measure": (None, [], 2, 1, "yes", np.int64(1), *STRANGE),
    "memory": (-1, math.nan, math.inf, "1", None, True, *(each for each in STRANGE if not isinstance(each, float | int))),
    "high": ("tf32", "bf16", None, 5, *STRANGE),
    "loss_scale": ("huge", -1, 0, math.nan, math.inf, [], True, *(each for each in STRANGE if not isinstance(each, float))),
    "pad": ("sometimes", -8, True, {"module:zz": "always"}, {3: 8}, {LONG: 8}, {"module:0": LONG}, {f"module:{LONG}": 8}, *STRANGE),
    "granularity": (["nothing"], 5, "layers", [3], None, [], [LONG], True, (each for each in ("0",)), *STRANGE),
    "backend": ("nonsense", 5, None, *STRANGE),
    "cache_weights": ("always", 2, None, [], np.int64(8), *STRANGE),
    "strict": (None, [], 2, 1, "yes", np.int64(8), *STRANGE),
    "optimizer": (5, "adam", [5], nn.Linear(2, 2), *STRANGE),
}  # fmt: skip

CASES = [pytest.param(option, value, id=f"{option}-{at}") for option, values in WRONG.items() for at, value in enumerate(values)]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))


@pytest.mark.parametrize(("option", "value"), CASES)
def test_a_wrong_value_is_refused_in_few_words(option: str, value: Any) -> None:
    kind = OpListError if option == "lists" else PolicyError
    with pytest.raises(kind) as caught:
        amprewrite.rewrite(small(), **{option: value})
    said = str(caught.value)
    assert len(said) <= 600
    assert "x" * 90 not in said
    named = {"loss_scale": "LossScale: value="}.get(option, option)
    assert option in said or named in said


@pytest.mark.parametrize("value", [5, "x", torch.zeros(3), np.zeros(()), {}, LONG])
def test_a_wrong_calibration_is_refused(value: Any) -> None:
    with pytest.raises(CalibrationError) as caught:
        amprewrite.rewrite(small(), calibration=value)
    assert len(str(caught.value)) <= 600


@pytest.mark.parametrize("option", ["strict", "measure", "cache_weights"])
@pytest.mark.parametrize("value", [np.bool_(True), np.bool_(False)])
def test_numpy_flags_are_flags(option: str, value: Any) -> None:
    amprewrite.rewrite(small(), dtype="bf16", **{option: value})(torch.randn(2, 3))


def test_nothing_is_looked_at_before_the_options_are_checked() -> None:
    """A wrong keyword argument is the caller's, whatever model it is for."""
    with pytest.raises(PolicyError, match="a dict of keyword arguments by name"):
        amprewrite.plan(small(), (torch.randn(2, 3),), kwargs=[1])  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="tuple of positional arguments"):
        amprewrite.plan(small(), torch.randn(2, 3))  # type: ignore[arg-type]


def test_a_plan_for_another_format_is_refused_at_once() -> None:
    model = small()
    plan = amprewrite.plan(model, (torch.randn(2, 3),), dtype="bf16")
    with pytest.raises(PlanError, match="the plan is for low = bf16, dtype= asks for fp16"):
        amprewrite.rewrite(model, dtype="fp16", plan=plan)
    amprewrite.rewrite(model, dtype=torch.bfloat16, plan=plan)(torch.randn(2, 3))


@pytest.mark.parametrize("value", STRANGE)
def test_quotes_are_short_and_on_one_line(value: Any) -> None:
    assert len(shown(value)) <= 80
    assert "\n" not in shown([value, "a\nb"])


def test_short_values_are_quoted_as_they_are() -> None:
    for value in ("bf16", 5, None, ["a", "b"], {"softmax": "deny"}, 3.5, torch.float16, "it's", ("a",)):
        assert shown(value) == repr(value)


@pytest.mark.parametrize("value", STRANGE)
def test_wrong_values_of_other_doors(value: Any) -> None:
    """What exporting, verifying and loss scales are given is checked the same way."""
    amp = amprewrite.rewrite(small(), dtype="bf16")
    for call in (
        lambda: amprewrite.verify(amp, value),
        lambda: amprewrite.DynamicLossScale(init="x" if isinstance(value, float) else value),  # type: ignore[arg-type]
        lambda: amprewrite.DynamicLossScale.preset(value),
        lambda: amp.loss_scale.load_state_dict(value),  # type: ignore[union-attr,operator]
    ):
        with pytest.raises(AmpRewriteError) as caught:
            call()
        assert len(str(caught.value)) <= 600


def test_a_plan_for_other_lists_is_refused_at_once() -> None:
    plan = amprewrite.plan(nn.Linear(3, 3), (torch.randn(2, 3),), dtype="bf16", lists="o2")
    amprewrite.rewrite(nn.Linear(3, 3), plan=plan, lists="o2")
    with pytest.raises(PlanError, match="for lists = o2, lists= asks for tf"):
        amprewrite.rewrite(nn.Linear(3, 3), plan=plan, lists="tf")


def test_a_plan_with_overrides_is_refused() -> None:
    plan = amprewrite.plan(small(), (torch.randn(2, 3),), dtype="bf16")
    with pytest.raises(PolicyError, match="plan= chooses formats, as overrides= does"):
        amprewrite.rewrite(small(), plan=plan, overrides={"relu": "deny"})
    compiled = torch.compile(small(), backend=amprewrite.compile_backend, options={"plan": plan, "overrides": {"relu": "deny"}})
    with pytest.raises(Exception, match="plan= chooses formats, as overrides= does"):
        compiled(torch.randn(2, 3))


def test_wrong_values_at_plans_calibrations_and_losses() -> None:
    model, batch = small(), (torch.randn(2, 3),)
    plan, calibration = amprewrite.plan(model, batch, dtype="bf16"), amprewrite.calibrate(model, [batch])
    amp = amprewrite.rewrite(model, dtype="bf16", example_inputs=batch)
    two: Any = lambda output, labels: output.sum()  # noqa: E731
    for call, said in (
        (lambda: plan.edit(["linear"]), "takes a dict such as {'linear': 'high'}, not one list"),  # type: ignore[arg-type]
        (lambda: plan.edit({3: "low"}), "named by a string, not by one int"),  # type: ignore[dict-item]
        (lambda: plan.explain(3), "named by a string, not by one int"),  # type: ignore[arg-type]
        (lambda: plan.diff(3), "takes a plan, not one int"),  # type: ignore[arg-type]
        (lambda: calibration | 3, "merges with another, not with one int"),  # type: ignore[operator]
        (lambda: amprewrite.rewrite(model, calibration="ranges.json"), "Calibration.load reads"),
        (lambda: amprewrite.calibrate(model, [batch], loss=two), "loss= .* fails on one Tensor: TypeError: .*labels"),
        (lambda: amprewrite.calibrate(model, [batch], loss=3), "loss= .* fails on one Tensor: TypeError: 'int'"),  # type: ignore[arg-type]
        (lambda: amprewrite.debug(amp, batch, loss=two), "loss= .* fails on one Tensor: TypeError: .*labels"),
    ):
        with pytest.raises(AmpRewriteError, match=said):
            call()


def test_a_rewrite_that_fails_at_its_example_guards_no_optimizer() -> None:
    model, x = small(), torch.randn(2, 3)
    plan = amprewrite.plan(nn.Linear(3, 3), (x,), dtype="bf16")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(PlanError, match="the plan is for another model"):
        amprewrite.rewrite(model, example_inputs=(x,), plan=plan, optimizer=optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
