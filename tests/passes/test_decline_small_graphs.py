"""A graph that only loses by low precision stays fp32, where nobody asked for a format."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.tables.vocabulary import Colour, Reason


def mlp(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


def colours(plan: amprewrite.CastPlan) -> set[Colour]:
    return {node.colour for node in plan.nodes if node.role == "op"}


def test_a_small_graph_stays_fp32_and_says_why():
    model, x = mlp(16), torch.randn(4, 16)
    amp = amprewrite.rewrite(model, device="a100", example_inputs=(x,))
    assert colours(amp.plan) == {Colour.HIGH} and not amp.plan.casts
    assert {node.reason for node in amp.plan.nodes if node.role == "op"} == {Reason.DEVICE}
    assert "pass dtype='bf16' to rewrite anyway" in str(amp.plan)
    assert "it would run low with dtype= given" in amp.plan.explain("0")
    assert torch.equal(amp(x), model(x))


def test_a_large_one_does_not():
    with torch.device("meta"):
        model, x = mlp(4096), torch.empty(2048, 4096)
    assert colours(amprewrite.plan(model, (x,), device="a100")) == {Colour.LOW}


@pytest.mark.parametrize(
    "options", [{"dtype": "bf16"}, {"overrides": {"relu": "deny"}}, {"lists": "autocast"}, {"backend": "aot_eager"}], ids=str
)
def test_what_is_asked_for_is_done(options):
    assert Colour.LOW in colours(amprewrite.plan(mlp(16), (torch.randn(4, 16),), device="a100", **options))


def test_exported_programs_may_run_elsewhere():
    amp = amprewrite.rewrite(mlp(16).eval(), device="a100")
    case = amp.export_program((torch.randn(4, 16),))
    assert "bfloat16" in str(case.graph)


@pytest.mark.parametrize("options", [{"dtype": "fp32"}, {"device": "cpu"}, {"device": "cpu", "overrides": {"module:0": "low"}},
                                     {"device": "cpu", "lists": "autocast"}, {"device": "cpu", "lists": "o3"}], ids=str)  # fmt: skip
def test_a_plan_in_fp32_tells_of_no_low_op_and_no_cast(options):
    model = nn.Sequential(mlp(16), nn.LayerNorm(16))
    plan = amprewrite.plan(model, (torch.randn(4, 16),), **options)
    assert colours(plan) == {Colour.HIGH} and not plan.casts
    assert {node.reason for node in plan.nodes if node.role == "op"} == {Reason.FP32_POLICY}
    assert "pass dtype='fp32'" not in str(plan)
