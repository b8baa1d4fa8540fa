"""One cast wherever two colours meet: who gets one, who shares it, and what must stay uncast."""

from __future__ import annotations

import pytest
from chains import casts, chain, decided

from amprewrite.passes.plan.plan_casts import PlanCasts
from amprewrite.tables.errors import PassError
from amprewrite.tables.ops.op_lists import OpLists
from amprewrite.tables.vocabulary import Colour, Reason

LISTS = OpLists.from_sets(
    "two colours", allow=["matmul", "batch_norm", "layer_norm", "where", "add", "cat", "relu"], deny=["exp", "sub", "fmod"],
    clear=["argmax"], infer=["div"], rule="tf",
)  # fmt: skip


@pytest.mark.parametrize(
    "text, planned",
    [
        pytest.param("matmul matmul exp exp", ["x -> bf16 for matmul", "matmul_1 -> fp32 for exp"], id="only where colours meet"),
        pytest.param("exp exp", [], id="a high graph has none"),
        pytest.param("matmul:fp64 matmul:fp64", [], id="other dtypes have none"),
        pytest.param("matmul", ["x -> bf16 for matmul", "matmul -> fp32 for output"], id="outputs keep their dtype"),
        pytest.param(
            "m=matmul(x) n=matmul(x) output(m)", ["x -> bf16 for m, n", "m -> fp32 for output"], id="readers share one copy"
        ),
        pytest.param("m=matmul(x,x) output(x)", ["x -> bf16 for m"], id="an op that reads a value twice has it cast once"),
        pytest.param("m=matmul(x) e=exp(m) f=exp(m)", ["x -> bf16 for m", "m -> fp32 for e, f"], id="the output's copy, too"),
        pytest.param(
            "matmul exp matmul",
            ["x -> bf16 for matmul", "matmul -> fp32 for exp", "exp -> bf16 for matmul_1", "matmul_1 -> fp32 for output"],
            id="low, high, low: the casts go round the high op",
        ),
        pytest.param("m=matmul argmax:int64(m)", ["x -> bf16 for m"], id="an op with an integer result reads either"),
        pytest.param("m=matmul exp(m:any)", ["x -> bf16 for m"], id="an indifferent operand is never cast"),
        pytest.param(
            "m=matmul relu(y,m:high)",
            ["x -> bf16 for m", "y -> bf16 for relu", "m -> fp32 for relu", "relu -> fp32 for output"],
            id="an operand that must be fp32 is, whatever the op's colour",
        ),
        pytest.param(
            "m=matmul batch_norm(m,w1,w2) exp", ["x -> bf16 for m", "batch_norm -> fp32 for exp"], id="statistics stay fp32"
        ),
        pytest.param(
            "m=matmul my_kernel(m)", ["x -> bf16 for m", "m -> fp32 for my_kernel"], id="an unknown op gets what it had"
        ),
    ],
)
def test_casts(text: str, planned: list[str]) -> None:
    assert casts(text, LISTS) == planned


@pytest.mark.parametrize(
    "text, planned",
    [
        pytest.param("m=matmul sub(m,y)", ["x -> bf16 for m"], id="a low operand beside a high one is promoted in the kernel"),
        pytest.param("m=matmul sub(y,m)", ["x -> bf16 for m"], id="in either order"),
        pytest.param(
            "m=matmul n=matmul(y) sub(m,n)",
            ["x -> bf16 for m", "y -> bf16 for n", "m -> fp32 for sub"],
            id="of two low ones the first is cast",
        ),
        pytest.param("m=matmul sub(m)", ["x -> bf16 for m", "m -> fp32 for sub"], id="a low one beside a Python number is cast"),
        pytest.param(
            "m=matmul sub(m,k:scalar)", ["x -> bf16 for m", "m -> fp32 for sub"], id="a 0-dim operand promotes no tensor"
        ),
        pytest.param("s=matmul sub(y,s:scalar)", ["x -> bf16 for s"], id="nor is it cast itself"),
        pytest.param("s=matmul sub(s:scalar)", ["x -> bf16 for s", "s -> fp32 for sub"], id="a 0-dim one alone is cast"),
        pytest.param(
            "m=matmul add(m,y)",
            ["x -> bf16 for m", "y -> bf16 for add", "add -> fp32 for output"],
            id="a promoting op that runs low has its fp32 operands cast",
        ),
        pytest.param("m=matmul add(m,k:scalar)", ["x -> bf16 for m", "add -> fp32 for output"], id="but for 0-dim ones"),
        pytest.param("m=matmul sub(m,y) sub(m,y)", ["x -> bf16 for m"], id="mixed operands need none, however many readers"),
    ],
)
def test_promoting_ops_keep_mixed_operands(text: str, planned: list[str]) -> None:
    assert casts(text, LISTS) == planned


def test_copies_are_not_shared_across_an_in_place_write() -> None:
    assert casts("a=matmul(x) b=matmul(x@1) c=matmul(x@1) output(y)", LISTS) == ["x -> bf16 for a", "x -> bf16 for b, c"]


def test_epochs_are_kept_in_the_plan() -> None:
    case = decided("a=matmul(x) b=matmul(x@1)", LISTS)
    assert [(cast.users, cast.write_version) for cast in case.casts if cast.value == "x"] == [(("a",), 0), (("b",), 1)]


def test_low_copies_of_huge_values_saturate_and_high_ones_do_not() -> None:
    case = decided("h=exp^(x) m=matmul(h) f=relu^(y) exp(f)", LISTS)
    assert [(cast.value, cast.to, cast.saturate) for cast in case.casts] == [
        ("h", "bf16", True), ("y", "bf16", False), ("f", "fp32", False), ("m", "fp32", False),
    ]  # fmt: skip


def test_only_casts_of_parameters_are_weight_casts() -> None:
    case = decided("matmul(x,w,k)", LISTS)
    assert [(cast.value, cast.weight) for cast in case.casts] == [("x", False), ("w", True), ("k", False), ("matmul", False)]


def test_the_format_is_the_policys() -> None:
    assert {cast.to for cast in decided("matmul exp matmul", LISTS, low="fp16").casts} == {"fp16", "fp32"}


def test_a_program_that_is_not_painted_through_is_refused() -> None:
    case = chain("matmul exp", LISTS)
    case.decisions.paint("x", Colour.HIGH, Reason.BOUNDARY)
    with pytest.raises(PassError, match="matmul and 2 more are not"):
        case.run(PlanCasts())


def test_planning_paints_nothing_and_twice_is_once() -> None:
    case = decided("matmul exp", LISTS)
    before, casts = dict(case.paints), case.casts
    case.run(PlanCasts())
    assert (case.paints, case.casts) == (before, casts)
    case.decisions.casts = ()
    case.run(PlanCasts())
    assert (case.paints, case.casts) == (before, casts)
