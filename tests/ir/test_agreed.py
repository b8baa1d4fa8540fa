"""Colours that graphs of one model agree on: which op is which, and high for all that one must keep high."""

from __future__ import annotations

from amprewrite.ir.evidence.agreed import NOTHING_AGREED
from amprewrite.ir.plans.plan import NodePlan
from amprewrite.tables.vocabulary import Colour, Reason


def plan(*rows: str, reason: Reason = Reason.CHEAPER_LOW) -> list[NodePlan]:
    """Ops from rows such as "block add net.py:3 low"."""
    found = []
    for place, row in enumerate(rows):
        module, op, source, colour = row.split()
        found.append(NodePlan(f"{op}_{place}", op, Colour(colour), reason, module=module, source=source))
    return found


def taken(agreed: object, *rows: str) -> list[str]:
    """The colours that ops take over, "" where they are free."""
    ops = plan(*(f"{row} high" for row in rows))
    found = agreed.of(ops)  # type: ignore[attr-defined]
    return [found[op.name].value if op.name in found else "" for op in ops]


def test_an_op_is_known_by_module_name_line_and_turn():
    agreed = NOTHING_AGREED.joined(plan("a add n:3 low", "a add n:3 high", "a add n:5 low", "b add n:3 high"))
    assert taken(agreed, "a add n:3", "a add n:3", "a add n:3", "a add n:5", "b add n:3", "c add n:3", "a mul n:3") == [
        "low", "high", "", "low", "high", "", ""
    ]  # fmt: skip


def test_where_a_tracer_stops_at_other_lines_ops_are_matched_in_order():
    agreed = NOTHING_AGREED.joined(plan("a norm n:3 low", "a norm n:5 high"))
    assert taken(agreed, "a norm f:9", "a norm f:9") == ["low", "high"]
    assert taken(agreed, "a norm f:9") == [""]  # it may be either
    assert taken(agreed, "a norm n:5") == ["high"]
    alike = NOTHING_AGREED.joined(plan("a norm n:3 low", "a norm n:5 low"))
    assert taken(alike, "a norm f:9", "a norm f:9", "a norm f:9") == ["low"] * 3


def test_high_in_one_is_high_in_all_and_what_was_low_contradicts_it():
    before = plan("a add n:3 low", "a mul n:4 low")
    agreed = NOTHING_AGREED.joined(before)
    assert not agreed.contradicts(before) and agreed.joined(before) is agreed
    later = plan("a add n:3 high")
    higher = agreed.joined(later)
    assert higher.contradicts(before) and not higher.contradicts(later)
    assert taken(higher, "a add n:3", "a mul n:4") == ["high", "low"]
    assert higher.joined(before) is higher  # high stays


def test_that_holds_for_the_lines_of_another_tracer_too():
    before = plan("a norm n:3 low")
    agreed = NOTHING_AGREED.joined(before).joined(plan("a norm f:9 high"))
    assert agreed.contradicts(before)


def test_a_graph_left_in_fp32_and_what_stands_for_an_inner_graph_bind_nobody():
    for reason in (Reason.DEVICE, Reason.BODY):
        assert NOTHING_AGREED.joined(plan("a add n:3 high", reason=reason)) is NOTHING_AGREED
    low = NOTHING_AGREED.joined(plan("a add n:3 low"))
    assert low.contradicts(plan("a add n:3 high", reason=Reason.DEVICE))  # it can follow
    assert not low.contradicts(plan("a add n:3 high", reason=Reason.BODY))


def test_the_reason_of_the_graph_that_decided_comes_along():
    agreed = NOTHING_AGREED.joined(plan("a add n:3 high", "a mul n:4 low", reason=Reason.CHEAPER_HIGH))
    assert set(agreed.whys_of(plan("a add n:3 high", "a add n:9 high")).values()) == {Reason.CHEAPER_HIGH.value}
    again = agreed.joined(plan("a add n:3 high", "b add n:7 low", reason=Reason.AGREED))
    assert set(again.whys_of(plan("a add n:3 high")).values()) == {Reason.CHEAPER_HIGH.value}, "one that follows is no reason"
