"""Nodes that a search keeps high stay high, whatever the planner would do."""

from __future__ import annotations

import pytest
from chains import Case, chain, letters

from amprewrite.ir.evidence.ranges import KeepHigh, fingerprint
from amprewrite.passes.paint.paint_lists import PaintLists
from amprewrite.passes.repaint.repaint_by_error import RepaintByError
from amprewrite.tables.vocabulary import Colour, Reason


def keeping(text: str, *names: str, **options: object) -> Case:
    case = chain(text, "default", "bf16", **options)
    case.know(keep_high=KeepHigh({fingerprint(case.graph): dict.fromkeys(names, "it adds 0.01")}))
    case.decide()
    return case


@pytest.mark.parametrize("names", [("relu",), ("matmul",), ("matmul_1",), ("matmul", "relu", "matmul_1")])
def test_what_is_named_is_high(names: tuple[str, ...]) -> None:
    assert letters(keeping("matmul relu matmul")) == "L L L"
    found = keeping("matmul relu matmul", *names)
    assert all(found.paints[name].colour is Colour.HIGH for name in names)


def test_the_reason_is_the_evidence() -> None:
    paint = keeping("matmul relu matmul", "relu").paints["relu"]
    assert (paint.reason, paint.detail) == (Reason.SENSITIVE, "it adds 0.01")


def test_an_override_stands() -> None:
    assert keeping("matmul relu matmul", "matmul", overrides={"node:matmul": "low"}).paints["matmul"].colour is Colour.LOW


def test_a_graph_that_the_search_never_ran_says_so() -> None:
    case = chain("matmul relu", "default", "bf16")
    case.know(keep_high=KeepHigh({}))
    case.decide()
    assert letters(case) == "L L"
    assert "never ran this graph" in case.decisions.notes[0]


def test_without_a_search_nothing_changes() -> None:
    case = chain("matmul relu", "default", "bf16")
    case.run(PaintLists())
    before = dict(case.paints)
    case.run(RepaintByError())
    assert case.paints == before
