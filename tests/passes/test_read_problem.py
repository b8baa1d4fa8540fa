"""One model, one plan: `rewrite`, `export_program` and `verify` decide alike."""

from __future__ import annotations

import pytest
import torch
from runtime_help import data
from torch import nn
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.accuracy.strict.run import StrictRun
from amprewrite.accuracy.verify import verify
from amprewrite.api.export_program import export_with_plan
from amprewrite.tables.vocabulary import Reason


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Hooked(Two):
    """Clamps a gradient inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return self.second(torch.relu(h))


def heavy(plan: amprewrite.CastPlan) -> list[tuple[str, str]]:
    return [(node.op, node.colour.value) for region in plan.regions for node in region.nodes if node.flops]


def plans(model: nn.Module, x: torch.Tensor, **options: object) -> list[list[tuple[str, str]]]:
    """Heavy ops with their colours, through every door."""
    with torch.no_grad():
        amp = amprewrite.rewrite(model, example_inputs=(x,), **options)
        return [heavy(amp.plan), heavy(export_with_plan(amp, (x,))[1]), heavy(StrictRun(amp, (x,)).plan)]


def scaled(factor: float) -> Two:
    torch.manual_seed(0)
    model = Two().eval()
    with torch.no_grad():
        model.second.weight.mul_(factor)
    return model


@pytest.mark.parametrize("factor", [1.0, 1e8, 1e-12], ids=["ordinary", "huge", "tiny"])
@pytest.mark.parametrize("options", [{}, {"overrides": {"module:first": "fp32"}}, {"lists": "autocast"}], ids=str)
def test_every_door_decides_alike(factor, options):
    found = plans(scaled(factor), data(4, 8), dtype="fp16", **options)
    assert found[0] == found[1] == found[2] and found[0]


def test_calibration_counts_at_every_door():
    model, x = scaled(1.0), data(4, 8) * 1e6
    found = plans(model, x, dtype="fp16", calibration=amprewrite.calibrate(model, [x]))
    assert found[0] == found[1] == found[2] and ("linear", "high") in found[0]


def test_an_exported_weight_beyond_fp16_is_no_infinity():
    model, x = scaled(1e8), data(4, 8)
    with torch.no_grad():
        exported = amprewrite.rewrite(model, dtype="fp16").export_program((x,))
        got, want = exported.module()(x), model(x)
    assert got.isfinite().all() and float((got - want).norm() / want.norm()) < 1e-2


def test_a_model_that_hooks_tensors_is_verified():
    amp, x = amprewrite.rewrite(Hooked(), dtype="bf16"), data(4, 8)
    amp(x)
    report = verify(amp, (x,))
    assert 0 < report.output_error < 2e-2


class Named(nn.Module):
    """What comes in has the names that ops are given: a parameter, an input, and what enters the body of a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.linear_1 = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, mul_1: torch.Tensor) -> torch.Tensor:
        h = self.b(self.a(x) * 2) * 3 * mul_1 * self.linear_1
        return checkpoint(lambda t: self.a(t * 2.0) * 0.5, h * h, use_reentrant=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_no_two_nodes_have_one_name(dtype: str) -> None:
    torch.manual_seed(0)
    model, x = Named(), torch.randn(3, 4)
    amp = amprewrite.rewrite(model, dtype=dtype)
    torch.testing.assert_close(amp(x, x), model(x, x), rtol=0.05, atol=0.05)
    for region in amp.plan.regions:
        names = [node.name for node in region.nodes]
        assert len(names) == len(set(names))
    planned = [node.name for region in amp.plan.regions for node in region.nodes]
    assert {"linear", "linear_2", "mul", "mul_2"} <= set(planned)


def test_a_nested_tensor_stays_fp32_and_the_plan_says_why():
    amp = amprewrite.rewrite(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), dtype="bf16")
    ragged = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    assert amp(ragged).dtype == torch.float32
    linear = next(node for node in amp.plan.nodes if node.op == "linear")
    assert linear.reason is Reason.NOT_DENSE and "nested fp32" in str(amp.plan)
