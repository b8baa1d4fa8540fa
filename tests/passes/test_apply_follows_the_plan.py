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
from amprewrite.passes.plan.plan_gradient_blocks import MOST, blocks
from amprewrite.tables.errors import PlanError
from amprewrite.tables.formats import BF16
from amprewrite.tables.vocabulary import Colour, Edit

Capture = Callable[..., torch.fx.GraphModule]
APPLY = Path(__file__).parents[2] / "passes" / "apply"
DECIDES = (
    "amprewrite.ir.problem", "amprewrite.ir.policies", "amprewrite.ir.evidence", "amprewrite.ir.decisions", "amprewrite.planner",
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
    for node in ast.walk(ast.parse(file.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])]
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


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def shared_nodes(out: Tensor) -> list[int]:
    """How many weights each autograd node behind `out` leads to that gives gradients to copies of weights."""
    seen, waiting = {out.grad_fn}, [out.grad_fn]
    while waiting:
        node = waiting.pop()
        new = {each for each, _ in node.next_functions if each is not None} - seen if node is not None else set()
        seen |= new
        waiting += new
    return sorted(sum(each is not None for each, _ in node.next_functions) for node in seen if node and node.name() == "_LinkBackward")


def with_blocks(plan: amprewrite.CastPlan, *blocks: tuple[str, ...]) -> amprewrite.CastPlan:
    return replace(plan, regions=(replace(plan.regions[0], gradient_blocks=blocks),))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_share_an_autograd_node_as_the_plan_says(dtype: str) -> None:
    torch.manual_seed(0)
    model, x = Mlp(), torch.randn(4, 8)
    amp = amprewrite.rewrite(model, dtype=dtype)
    out = amp(x)
    (weights,) = amp.plan.regions[0].gradient_blocks
    assert sorted(weights) == sorted(name for name, _ in model.named_parameters())
    assert shared_nodes(out) == [6]
    assert "its gradient comes back together with those of 5 more" in amp.plan.explain("2.weight")
    other = with_blocks(amp.plan, weights[:4])
    assert amp.plan.diff(other) == "weights whose gradients come together: [6] -> [4]"
    again = amprewrite.rewrite(model, dtype=dtype, plan=type(other).from_json(other.to_json()))
    told = again(x)
    assert shared_nodes(told) == [1, 1, 4]
    assert again.plan.regions[0].gradient_blocks == (weights[:4],)
    ours = [torch.autograd.grad(each.sum(), list(model.parameters())) for each in (out, told)]
    assert all(map(torch.equal, *ours))


@pytest.mark.parametrize(
    "blocks, why", [((("2.weight", "ghost"),), "ghost .* is no weight"), ((("2.weight",), ("2.weight",)), "2.weight .* is in two")]
)
@pytest.mark.usefixtures("launches")
def test_blocks_that_fit_no_graph_are_refused(blocks: tuple[tuple[str, ...], ...], why: str) -> None:
    amp = amprewrite.rewrite(Mlp(), dtype="bf16")
    amp(torch.randn(4, 8))
    with pytest.raises(PlanError, match=why):
        amprewrite.rewrite(Mlp(), dtype="bf16", plan=with_blocks(amp.plan, *blocks))(torch.randn(4, 8))


def test_blocks_are_runs_of_bounded_size() -> None:
    size = 1 << 25
    assert blocks([], size) == ()
    assert blocks([10] * 3, size) == ((0, 1, 2),)
    assert blocks([size, 10, size, 10], size) == ((0,), (1, 3), (2,))
    assert blocks([size // 2] * 3, size) == ((0, 1), (2,))
    assert [len(block) for block in blocks([10] * (MOST + 1), size)] == [MOST, 1]


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
