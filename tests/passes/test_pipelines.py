"""Which passes each rule of the op lists has: no pass asks for the rule itself."""

from __future__ import annotations

import pytest

from amprewrite import passes
from amprewrite.tables.formats import BF16
from amprewrite.tables.ops.op_lists import PRESETS, op_lists

PAINTERS = {
    "cost": "repaint-by-cost", "tf": "paint-tf", "autocast": "paint-autocast", "all-low": "paint-all-low", "given": "paint-as-given",
}


@pytest.mark.parametrize("rule", passes.PIPELINES)
def test_each_rule_has_one_painter_of_what_lists_leave_open(rule: str) -> None:
    names = [each.name for each in passes.PIPELINES[rule]]
    assert [name for name in names if name in PAINTERS.values()] == [PAINTERS[rule]]
    assert names[-len(passes.PLAN) :] == [each.name for each in passes.PLAN]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_pipeline(preset: str) -> None:
    assert op_lists(preset, BF16, "cpu").rule in passes.PIPELINES


def test_deny_flows_as_tensorflow_has_it_by_tensorflows_rules_alone() -> None:
    found = {rule: [p.past_bounded for p in members if p.name == "paint-after-deny"] for rule, members in passes.PIPELINES.items()}  # type: ignore[attr-defined]
    assert found == {"cost": [False], "tf": [True], "autocast": [], "all-low": [], "given": []}
