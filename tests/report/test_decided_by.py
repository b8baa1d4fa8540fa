"""`plan MODEL --after PASS`: what was decided by then, and by which pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.report.questions.explain import OPEN, decided_after, progress_rows
from amprewrite.tables.errors import PlanError


def plan(**options: object) -> amprewrite.CastPlan:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Softplus())
    with torch.no_grad():
        return amprewrite.plan(model, (torch.randn(4, 64),), **{"dtype": "bf16", **options})  # type: ignore[arg-type]


def test_each_colour_is_put_down_to_its_pass() -> None:
    early = {node: (colour, by) for node, colour, by, _ in progress_rows(decided_after(plan(), "paint-ties"))}
    assert early == {
        "linear": ("low", "paint-lists"), "gelu": (OPEN, ""), "linear_1": ("low", "paint-lists"), "softplus": (OPEN, ""),
    }  # fmt: skip
    late = {node: by for node, _, by, _ in progress_rows(decided_after(plan(), "plan-masks"))}
    assert late["gelu"] == "repaint-by-cost"


def test_casts_count_from_the_pass_on_that_plans_them() -> None:
    found = plan()
    (before,), (after,) = decided_after(found, "repaint-by-cost"), decided_after(found, "plan-casts")
    assert (before.casts, after.casts) == (0, len(found.casts))


def test_the_last_pass_gives_the_plan_itself() -> None:
    found = plan(overrides={"gelu": "deny"})
    (last,) = decided_after(found, "plan-masks")
    assert [node.colour for node in last.nodes] == [node.colour.value for node in found.nodes if node.role == "op"]


def test_an_unknown_pass_and_a_saved_plan_are_refused() -> None:
    with pytest.raises(PlanError, match="is called 'paint'; in order they are paint-lists, paint-agreed, paint-after-deny, paint-ties"):
        decided_after(plan(), "paint")
    saved = amprewrite.CastPlan.from_json(plan().to_json())
    with pytest.raises(PlanError, match="name the model, not a saved or edited plan"):
        decided_after(saved, "paint-lists")
