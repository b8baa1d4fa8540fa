"""lists="o2" and "o3": everything low that nothing keeps high."""

from __future__ import annotations

import pytest
from chains import chain, decided, letters

from amprewrite.passes.paint.paint_all_low import PaintAllLow
from amprewrite.passes.paint.paint_lists import PaintLists
from amprewrite.tables.ops.op_lists import OpLists
from amprewrite.tables.vocabulary import Reason

BARE = OpLists.from_sets("bare", deny=["exp"], infer=["gelu"], rule="all-low")


@pytest.mark.parametrize(
    "lists, text, colours",
    [
        pytest.param("o2", "conv2d batch_norm relu", "L H L", id="o2 keeps batch norm in fp32"),
        pytest.param("o3", "conv2d batch_norm relu", "L L L", id="o3 keeps nothing"),
        pytest.param("o3", "matmul binary_cross_entropy", "L H", id="a gradient that divides by 1e-12 stays"),
        pytest.param("o2", "matmul exp softmax", "L L L", id="o2 runs even exp low"),
        pytest.param("o3", "matmul! relu", "H L", id="what the model spells out stays"),
        pytest.param("o3", "my_kernel relu", "H L", id="ops nobody knows stay"),
        pytest.param("o3", "relu:int64", ".", id="integers stay"),
        pytest.param(BARE, "exp gelu", "H L", id="a denied op denies nothing downstream"),
        pytest.param(BARE, "exp{t} gelu{t}", "H H", id="but what is tied to it"),
    ],
)
def test_colours(lists: str | OpLists, text: str, colours: str) -> None:
    assert letters(decided(text, lists)) == colours


def test_the_reason_says_that_the_lists_did_it() -> None:
    assert decided("gelu", BARE).paints["gelu"].reason is Reason.FORCED


def test_nothing_is_left_open_and_a_second_run_changes_nothing() -> None:
    case = chain("gelu exp gelu", BARE)
    case.run(PaintLists())
    case.run(PaintAllLow())
    assert set(case.paints) == set(case.graph.nodes)
    before = dict(case.paints)
    case.run(PaintAllLow())
    assert case.paints == before
