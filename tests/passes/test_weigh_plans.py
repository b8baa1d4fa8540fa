"""The plan beside those of painting rules: same graph, same prices."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from chains import Case, chain, decided
from test_repaint_by_cost import random_text
from torch import nn

import amprewrite
from amprewrite.ir.cost import TICK, price
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes import weigh_plans
from amprewrite.passes.weigh_plans import PLANNED, painted_otherwise, weighed
from amprewrite.report.cast_plan import CastPlan
from amprewrite.tables.devices import H100

BLOCK = "a=layer_norm b=matmul(a,w) c=softmax(b) d=matmul(c,b) e=add(x,d) f=layer_norm(e) g=matmul(f,w1) h=gelu(g) i=matmul(h,w2) add(e,i)"


def planned(text: str, lists: str = "default", **options: object) -> RegionPlan:
    return weighed(decided(text, lists, **options).plan)  # type: ignore[arg-type]


def test_all_rules_are_weighed_and_the_plan_comes_first() -> None:
    names = [candidate.name for candidate in planned(BLOCK).candidates]
    assert names == [PLANNED, "tf rules", "autocast rules", "our lists, tf rules", "all fp32"]


def test_the_price_and_the_casts_are_those_of_the_plan() -> None:
    case = decided(BLOCK, "default")
    own = weighed(case.plan).candidates[0]
    assert own.casts == len(case.casts)
    assert own.seconds == price(case.graph, case.decisions.colours, case.problem.costs).total * TICK


@pytest.mark.parametrize("lists", ["tf", "autocast"])
@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_a_rival_is_painted_as_with_its_own_lists(lists: str, low: str) -> None:
    case = decided(BLOCK, "default", low)
    rival = painted_otherwise(case.problem, case.decisions.colours)[f"{lists} rules"]
    assert rival == decided(BLOCK, lists, low).decisions.colours


@pytest.mark.parametrize("training", [False, True])
def test_no_rival_that_keeps_our_lists_is_cheaper(training: bool) -> None:
    rng = random.Random(training)
    for _ in range(60):
        text = random_text(rng)
        own, *others = planned(text, training=training).candidates
        ours = next(candidate for candidate in others if candidate.name == "our lists, tf rules")
        assert own.seconds <= ours.seconds + 1e-15, text


def test_everything_fp32_needs_no_cast() -> None:
    found = planned("exp gelu matmul relu matmul", device="cuda")
    assert [candidate.casts for candidate in found.candidates] == [2, 2, 2, 2, 0]


def test_prices_are_computed_when_a_plan_is_read_not_in_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(weigh_plans, "painted_otherwise", lambda problem, colours: asked.append(problem) or {})
    amp = amprewrite.rewrite(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), dtype="bf16")
    amp(torch.randn(4, 8))
    assert asked == []
    first = amp.plan
    assert len(asked) == len(first.regions) == 1
    assert [candidate.name for candidate in first.regions[0].candidates] == [PLANNED]
    assert amp.plan == first
    assert len(asked) == 1


def test_other_lists_and_given_plans_are_not_weighed() -> None:
    assert planned(BLOCK, "tf").candidates == ()
    case = decided(BLOCK, "default")
    assert weighed(Case(replace(case.problem, given=case.plan)).decide().plan).candidates == ()


def test_the_plan_says_whether_weights_are_copied_at_every_call() -> None:
    def notes(training: bool, **policy: object) -> list[str]:
        case = chain("matmul(x,w) gelu", "default", training=training)
        case.know(policy=replace(case.problem.policy, **policy)).decide()  # type: ignore[arg-type]
        return [note for note in weighed(case.plan).notes if "copies of weights" in note]

    assert len(notes(False)) == 1
    assert notes(False, keeps_copies=True) == notes(True) == []


def test_the_summary_shows_all_and_names_the_device() -> None:
    case = chain(BLOCK, "default")
    case.know(planned_for=H100)
    found = weighed(case.decide().plan)
    plan = CastPlan("bf16", (found,))
    assert CastPlan.from_json(plan.to_json()) == plan
    lines = plan.summary().splitlines()
    assert any(line.startswith("one pass on h100 (modelled): ") for line in lines)
    assert [line.split("  ")[1] for line in lines if line.startswith("  ")] == [c.name for c in found.candidates[1:]]
    assert "h100" not in str(plan)  # a printed plan is the same on every machine that plans the same
