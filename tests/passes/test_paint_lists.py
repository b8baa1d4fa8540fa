"""Paint alone: facts, overrides, lists, and how far deny flows. "?" is what it leaves open."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chains import LETTERS, Case, chain, decided

from amprewrite.passes.paint.paint_after_deny import PaintAfterDeny
from amprewrite.passes.paint.paint_as_given import PaintAsGiven
from amprewrite.passes.paint.paint_lists import PaintLists, check_facts, paint_facts
from amprewrite.passes.paint.paint_ties import PaintTies
from amprewrite.tables.errors import PassError, PolicyError
from amprewrite.tables.ops.op_lists import OPS, OpLists
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

LISTS = OpLists.from_sets("small", allow=["matmul"], infer=["gelu"], clear=["relu"], deny=["exp"], internal=["softmax"])


def paint(case: Case) -> None:
    """As the pipelines begin that follow lists."""
    case.run(PaintLists(), PaintAfterDeny(past_bounded=case.problem.lists.rule == "tf"), PaintTies())


def painted(text: str, **options: object) -> str:
    case = chain(text, options.pop("lists", LISTS), **options)  # type: ignore[arg-type]
    paint(case)
    ops = [node.name for node in case.graph if node.role == "op"]
    return " ".join(LETTERS[case.paints[name].colour] if name in case.paints else "?" for name in ops)


@pytest.mark.parametrize(
    "text, letters",
    [
        pytest.param("matmul", "L", id="an allowed op is low"),
        pytest.param("exp", "H", id="a denied op is high"),
        pytest.param("erf", "H", id="an op on no list is high"),
        pytest.param("my_kernel", "H", id="an op nobody knows is high"),
        pytest.param("gelu", "?", id="an infer op without a denied op upstream is left open"),
        pytest.param("relu", "?", id="a clear op is left open"),
        pytest.param("softmax", "?", id="an internal op is left open"),
        pytest.param("relu:int64", ".", id="integers are plain"),
        pytest.param("matmul:fp64", ".", id="fp64 is plain even on the allowlist"),
        pytest.param("matmul!", "H", id="a dtype the model spells out beats the allowlist"),
    ],
)
def test_one_op(text: str, letters: str) -> None:
    assert painted(text) == letters


@pytest.mark.parametrize(
    "text, letters",
    [
        pytest.param("exp gelu", "H H", id="deny flows into infer"),
        pytest.param("exp softmax", "H H", id="deny flows into internal"),
        pytest.param("exp relu", "H ?", id="deny does not flow into clear ops that end there"),
        pytest.param("exp relu relu gelu", "H H H H", id="deny crosses clear ops on its way to infer"),
        pytest.param("exp relu softmax relu", "H H H ?", id="deny stops after the last internal op it reaches"),
        pytest.param("exp relu exp relu", "H H H ?", id="clear ops between two denied ops are high"),
        pytest.param("exp gelu relu gelu relu matmul gelu", "H H H H ? L ?", id="TensorFlow's canonical chain"),
        pytest.param("exp matmul gelu", "H L ?", id="deny stops at an allowed op"),
        pytest.param("exp erf gelu", "H H ?", id="deny stops at an unlisted op"),
        pytest.param("gelu exp", "? H", id="deny does not flow upstream"),
        pytest.param("e=exp(x) a=relu(e) gelu(a) matmul(a)", "H H H L", id="one of two branches to infer is enough"),
        pytest.param("e=exp(x) a=relu(e) b=relu(a) matmul(b)", "H ? ? L", id="no branch to infer, no deny"),
        pytest.param("e=exp(x) c=to~(e) gelu(c)", "H H ?", id="an unlisted cast is a wall"),
        pytest.param("e=exp(x) gelu(e:any)", "H ?", id="deny does not enter by an operand whose dtype is indifferent"),
        pytest.param("e=exp(x) gelu(y,e:high)", "H ?", id="deny does not enter by an operand that is fp32 anyway"),
        pytest.param("e=exp(x) relu:int64(e) gelu(relu)", "H . ?", id="deny does not flow through integers"),
    ],
)
def test_deny_flows_downstream(text: str, letters: str) -> None:
    assert painted(text) == letters


def test_a_cast_to_another_tensors_dtype_stops_deny() -> None:
    lists = LISTS.moved("to", LISTS.kinds["relu"])
    assert painted("e=exp(x) c=to~(e) gelu(c)", lists=lists) == "H ? ?"
    assert painted("e=exp(x) c=to(e) gelu(c)", lists=lists) == "H H H"


@pytest.mark.parametrize("op", sorted(row.name for row in OPS.values() if row.bounded))
def test_a_denied_op_with_a_bounded_result_does_not_spread_deny_but_under_tensorflows_rules(op: str) -> None:
    lists = LISTS.moved(op, OpKind.DENY)
    assert painted(f"{op} gelu", lists=lists) == "H ?"
    assert painted(f"{op} gelu", lists=replace(lists, rule="tf")) == "H H"


@pytest.mark.parametrize(
    "text, letters",
    [
        pytest.param("matmul{t} gelu{t}", "L L", id="a tied node is low with a low one"),
        pytest.param("exp matmul{t} gelu{t} exp{t}", "H H H H", id="one high member makes the whole tie high"),
        pytest.param("gelu{t} relu{t}", "? ?", id="a tie of open nodes stays open"),
        pytest.param("matmul{s} gelu{t} relu{t}", "L ? ?", id="another tie is not concerned"),
    ],
)
def test_tied_nodes_share_a_colour(text: str, letters: str) -> None:
    assert painted(text) == letters


@pytest.mark.parametrize(
    "text, overrides, letters",
    [
        pytest.param("matmul gelu", {"matmul": "deny"}, "H H", id="an op override moves the op to another list"),
        pytest.param("matmul matmul", {"node:matmul_1": "high"}, "L H", id="a node override keeps one node high"),
        pytest.param("exp exp", {"node:exp": "low"}, "L H", id="a node override makes a denied node low"),
        pytest.param("exp gelu", {"node:gelu": "low"}, "H L", id="a node override stops deny"),
        pytest.param(
            "exp gelu gelu", {"node:exp": "low"}, "L ? ?", id="a denied node that is asked low denies nothing downstream"
        ),
        pytest.param("gelu relu", {"node:*": "low"}, "L L", id="a pattern means every node it matches"),
        pytest.param("matmul! gelu", {"node:matmul": "low"}, "H ?", id="what the model spells out is not moved to low"),
        pytest.param("relu:int64", {"node:relu": "low"}, ".", id="integers are not moved"),
        pytest.param(
            "matmul matmul", {"matmul": "deny", "node:matmul_1": "low"}, "H L", id="a node override beats an op override"
        ),
    ],
)
def test_overrides(text: str, overrides: dict[str, str], letters: str) -> None:
    assert painted(text, overrides=overrides) == letters


def test_contradicting_node_patterns_are_an_error_that_names_both() -> None:
    with pytest.raises(PolicyError, match=r"'node:matmul\*'\] says high and overrides\['node:\*_1'\] says low for node matmul_1"):
        painted("matmul matmul", overrides={"node:matmul*": "high", "node:*_1": "low"})


@pytest.mark.parametrize(
    "text, node, reason, cause",
    [
        pytest.param("matmul", "matmul", Reason.ON_ALLOWLIST, "", id="allow"),
        pytest.param("exp", "exp", Reason.ON_DENYLIST, "", id="deny"),
        pytest.param("exp relu gelu", "gelu", Reason.AFTER_DENY, "exp", id="the cause is the denied op, not the op between"),
        pytest.param("a=exp(x) b=gelu(a) c=exp(y) gelu(b,c)", "gelu", Reason.AFTER_DENY, "c", id="of two denied ops the nearest"),
        pytest.param("a=exp(x) b=exp(y) gelu(b,a)", "gelu", Reason.AFTER_DENY, "a", id="of two as near the first by order"),
        pytest.param("matmul{t} gelu{t}", "gelu", Reason.TIED, "matmul", id="a tie names the member that decided"),
    ],
)
def test_every_colour_has_a_reason_and_a_cause(text: str, node: str, reason: Reason, cause: str) -> None:
    case = chain(text, LISTS)
    paint(case)
    assert (case.paints[node].reason, case.paints[node].because_of) == (reason, cause)


def test_a_refused_node_is_high_and_says_what_refused() -> None:
    case = chain("matmul gelu", LISTS)
    case.know(refused={"matmul": "no kernel"})
    case.run(PaintLists())
    paint = case.paints["matmul"]
    assert (paint.colour, paint.reason, paint.detail) == (Colour.HIGH, Reason.REFUSED, "no kernel")


@pytest.mark.parametrize(("key", "told"), [("node:matmul", True), ("node:*", False), ("node:gelu", False)])
def test_a_node_that_cannot_do_what_it_is_told_is_named(key: str, told: bool) -> None:
    """The override did nothing, silently. A pattern may match such nodes among others."""
    case = chain("matmul! gelu", LISTS, overrides={key: "low"})
    paint(case)
    assert case.paints["matmul"].colour is Colour.HIGH
    note = "overrides['node:matmul'] does nothing here: matmul stays fp32 for the reason in its line"
    assert case.decisions.notes == [note] * told


def test_a_refused_node_beats_an_override() -> None:
    case = chain("matmul gelu", LISTS, overrides={"node:matmul": "low"})
    case.know(refused={"matmul": "no kernel"})
    case.run(PaintLists())
    assert case.paints["matmul"].reason is Reason.REFUSED


def test_a_given_plan_is_followed_without_deciding() -> None:
    given = decided("matmul exp gelu", LISTS).plan
    case = chain("matmul exp gelu", LISTS, overrides={"matmul": "deny"}).know(given=given)
    case.run(PaintAsGiven())
    assert [paint.colour for paint in case.paints.values()] == [node.colour for node in given.nodes]
    with pytest.raises(PassError, match="follows a plan, and none is given"):
        chain("matmul", LISTS).run(PaintAsGiven())


def test_a_colour_on_a_value_that_is_not_fp32_breaks_the_promise() -> None:
    case = chain("relu:int64", LISTS)
    paint_facts(case.problem, case.decisions)
    case.decisions.paint("relu", Colour.LOW, Reason.ASKED)
    with pytest.raises(PassError, match="relu carries no fp32 value"):
        check_facts(case.problem, case.decisions)
