"""Applying passes decide nothing: what they do is what the plan says, whatever was taken from it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite
from amprewrite import passes
from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.ir.pass_base import run_passes
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.ir.policies.policy import Policy
from amprewrite.passes import plan_region
from amprewrite.passes.driver import read_problem
from amprewrite.tables.errors import PlanError
from amprewrite.tables.formats import BF16
from amprewrite.tables.vocabulary import Colour, Edit

Capture = Callable[..., torch.fx.GraphModule]
APPLY = Path(__file__).parents[2] / "passes" / "apply"
DECIDES = (
    "amprewrite.ir.pass_base.Problem", "amprewrite.ir.pass_base.Decisions", "amprewrite.ir.policies", "amprewrite.ir.evidence",
    "amprewrite.planner",
)  # fmt: skip
"""What a decision would be taken from; how padding goes through an op is arithmetic on sizes."""


class Net(nn.Module):
    """One op for each kind of edit that fixed sizes allow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.out = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[-2])
        h = F.batch_norm(self.conv(x), None, None, training=True)
        h = F.scaled_dot_product_attention(h, h, h, at[None, :] <= at[:, None])
        return self.out(h.masked_fill(h > 4, -1e9).softmax(-1))


X = torch.randn(1, 2, 4, 8)


def edits(plan: amprewrite.CastPlan) -> dict[Edit, bool]:
    return {edit.what: edit.on for region in plan.regions for edit in region.edits}


@pytest.mark.parametrize("file", sorted(APPLY.glob("*.py")), ids=lambda path: path.stem)
def test_an_applying_pass_sees_the_plan_and_the_graph_alone(file: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        names = [".".join(filter(None, (getattr(node, "module", ""), each.name))) for each in node.names]
        found = [name for name in names if name.startswith(DECIDES) and not name.startswith("amprewrite.planner.padding.rules")]
        assert not found


def test_every_applying_pass_reads_a_plan() -> None:
    for each in (*passes.APPLY, *passes.TIDY):
        (base,) = type(each).__orig_bases__  # type: ignore[attr-defined]
        assert get_args(base) == (RegionPlan, EditedGraph)


def test_a_plan_that_says_nothing_changes_nothing(capture: Capture) -> None:
    read = read_problem(capture(Net(), X), Policy(BF16), fold_masks="any")
    plan = plan_region(read.problem)
    high = tuple(replace(n, colour=Colour.HIGH, dtype="fp32") if n.colour is Colour.LOW else n for n in plan.nodes)
    edited = EditedGraph.of(read)
    run_passes(passes.APPLY, replace(plan, nodes=high, casts=(), edits=()), edited)
    edited.module.recompile()
    read.module.recompile()
    assert edited.module.code == read.module.code


def test_edits_are_in_the_plan_its_json_its_text_and_its_differences() -> None:
    plan = amprewrite.plan(Net(), (X,), dtype="fp16")
    assert edits(plan) == {Edit.CLAMP_CONSTANTS: True, Edit.FP32_STATISTICS: True, Edit.DROP_CAUSAL_MASK: True}
    assert type(plan).from_json(plan.to_json()) == plan
    assert "  edit batch_norm gets fp32 weights of one, so that its statistics stay fp32" in str(plan)
    off = plan.switch_off("fp32 statistics")
    assert plan.diff(off).splitlines() == [
        "edit gone: batch_norm gets fp32 weights of one, so that its statistics stay fp32",
        "edit new: batch_norm stays as it is (switched off: fp32 statistics)",
    ]
    assert "takes no mask: its own is made of sizes alone, and is causal" in plan.explain("scaled_dot_product_attention")


@pytest.mark.parametrize(
    "name, what", [("scaled_dot_product_attention", Edit.DROP_CAUSAL_MASK), ("fp32 statistics", Edit.FP32_STATISTICS)]
)
def test_what_is_switched_off_is_not_done(name: str, what: Edit) -> None:
    plan = amprewrite.plan(Net(), (X,), dtype="bf16")
    off = plan.switch_off(name)
    assert edits(off)[what] is False and sum(edits(off).values()) == len(edits(plan)) - 1
    amp = amprewrite.rewrite(Net(), dtype="bf16", plan=type(plan).from_json(off.to_json()))
    with torch.no_grad():
        out = amp(X)
    assert edits(amp.plan) == edits(off)
    assert torch.isfinite(out).all()


def test_a_name_without_an_edit_is_refused() -> None:
    plan = amprewrite.plan(Net(), (X,), dtype="bf16")
    with pytest.raises(PlanError, match="'softmax' has no edit to switch off; the plan has: fp32 statistics, drop causal mask"):
        plan.switch_off("softmax")
    with pytest.raises(PlanError, match="no node and no module of the plan is called"):
        plan.switch_off("sdpa")


def test_a_recoloured_plan_keeps_what_was_switched_off() -> None:
    plan = amprewrite.plan(Net(), (X,), dtype="bf16").switch_off("drop causal mask").edit({"softmax": "high"})
    amp = amprewrite.rewrite(Net(), dtype="bf16", plan=plan)
    with torch.no_grad():
        amp(X)
    assert edits(amp.plan)[Edit.DROP_CAUSAL_MASK] is False
