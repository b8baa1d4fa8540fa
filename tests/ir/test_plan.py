"""The plan as people use it: read, asked, saved, edited, applied, compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.ir.plans.plan import Cast, NodePlan, RegionPlan, Skipped
from amprewrite.report.cast_plan import CastPlan
from amprewrite.tables.errors import AmpRewriteError, PlanError
from amprewrite.tables.vocabulary import Colour, Reason


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Small(nn.Module):
    """Two residual blocks, a masked head, and a denied op at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.second(self.first(x)) * mask)
        return logits.exp().sum(-1)


INPUTS = torch.randn(2, 8, 16), torch.ones(2, 8, 1)


@pytest.fixture(scope="module")
def plan() -> CastPlan:
    """Planned for one device whatever is at hand, and without the notes, which tell of the machine."""
    return replace(amprewrite.plan(Small(), INPUTS, dtype="bf16", device="cpu-bf16"), notes=())


def pair() -> CastPlan:
    """Two hand-made regions with a node of one name, and everything a plan can hold."""
    node = NodePlan("exp", "exp", Colour.HIGH, Reason.ON_DENYLIST, dtype="fp32", shape=("s0", 4), module="head", source="m.py:3")
    low = NodePlan("linear", "linear", Colour.LOW, Reason.TIED, "exp", "a word", dtype="fp16", flops=7, inputs=("exp",))
    cast = Cast("exp", "fp16", ("linear",), saturate=True, weight=True, write_version=2)
    graphs = (RegionPlan("graph0", (node, low), (cast,), True, ("a note",), "head"), RegionPlan("graph1", (node,), ()))
    return CastPlan("fp16", graphs, (Skipped("m.py:9 in forward", "graph break: print"),), ("the device gains nothing",), "tf")


# reading ------------------------------------------------------------------------------------------------------------


def test_print(plan: CastPlan, golden: Callable[[str, str], None]) -> None:
    golden("small_plan.txt", str(plan))


def test_print_of_several_graphs(golden: Callable[[str, str], None]) -> None:
    golden("two_graphs_plan.txt", str(pair()))


def test_a_region_prints_by_itself(plan: CastPlan) -> None:
    assert str(plan.regions[0]) in str(plan)


def test_explain_a_node(plan: CastPlan) -> None:
    sentence, copy, condition, alone = plan.explain("exp").splitlines()
    assert sentence.startswith("exp runs high (fp32) because its op is on the denylist (test_plan.py:")
    assert copy == "  it reads a cast copy of linear_4 in fp32"
    assert condition == "  it would run low with its op on another list: overrides={'exp': 'low'}"
    assert alone.startswith("  it alone can be told to: overrides={'node:exp': 'low'} gives ")


def test_explain_names_the_copies_of_a_result(plan: CastPlan) -> None:
    assert "its result is cast: linear_4 -> fp32 for exp" in plan.explain("linear_4")


def test_explain_a_module_lists_its_nodes_and_those_of_its_parts(plan: CastPlan) -> None:
    text = plan.explain("second")
    assert [line.split()[0] for line in text.splitlines() if not line.startswith(" ")] == [
        "layer_norm_1", "linear_2", "relu_1", "linear_3", "add_1",
    ]  # fmt: skip
    assert "linear_2 in second.up runs low (bf16)" in text


def test_explain_what_is_never_cast() -> None:
    node = NodePlan("argmax", "argmax", Colour.PLAIN, Reason.NO_FLOAT, dtype="int64")
    assert CastPlan("bf16", (RegionPlan("graph0", (node,), ()),)).explain("argmax") == (
        "argmax is never cast because it carries no fp32 value"
    )


def test_explain_in_several_graphs_answers_for_each_or_for_one() -> None:
    assert [line.split()[0] for line in pair().explain("exp").splitlines() if line[0] != " "] == ["graph0/exp", "graph1/exp"]
    assert pair().explain("graph1/exp").split()[0] == "graph1/exp"


def test_explain_an_unknown_name_offers_near_ones(plan: CastPlan) -> None:
    with pytest.raises(PlanError, match=r"no node and no module of the plan is called 'linaer_3'; did you mean .*linear_3"):
        plan.explain("linaer_3")
    with pytest.raises(PlanError, match=r"'secnd\.up'; did you mean .*second\.up"):
        plan.explain("secnd.up")
    with pytest.raises(PlanError, match=r"'@'; print\(plan\) lists all nodes"):
        plan.explain("@")


def test_every_node_can_be_explained(plan: CastPlan) -> None:
    assert all(node.name in plan.explain(node.name) for node in plan.nodes)


def test_the_empty_path_is_the_root_whose_ops_are_found(plan: CastPlan) -> None:
    assert list(plan.find("")) == [node for node in plan.nodes if node.role == "op"]


def test_summary_counts(plan: CastPlan) -> None:
    ops, casts, *weighed = plan.summary().splitlines()  # no heavy op was left high, so none is named before
    assert ops == "14 ops in 1 graph: 7 low (bf16), 7 high (fp32), 0 without fp32 values"
    assert casts.startswith(f"{len(plan.casts)} casts: 10 of weights, 4 of activations; low does 100.0 % of matmul")
    assert any(line.startswith("one pass on cpu") for line in weighed)


def test_summary_names_heavy_ops_left_high_and_what_was_left_out(plan: CastPlan) -> None:
    kept = amprewrite.plan(Small(), INPUTS, dtype="bf16", overrides={"module:head": "fp32"})
    assert "heavy op left high: linear_4 in head runs high (fp32) because an override asks for it (module:head)" in kept.summary()
    assert "left out: m.py:9 in forward: graph break: print" in pair().summary()


def test_casts_of_several_graphs_carry_their_graphs_name() -> None:
    assert [str(cast) for cast in pair().casts] == ["graph0/exp -> fp16 for graph0/linear (saturating)"]


def test_casts_with_many_readers_print_short() -> None:
    assert str(Cast("x", "bf16", tuple("abcdef"))) == "x -> bf16 for a, b, c, d and 2 more"


def test_before_capture_there_is_no_plan() -> None:
    amp = amprewrite.rewrite(Small(), dtype="bf16")
    for ask in (lambda: amp.plan.nodes, lambda: amp.plan.explain("x"), lambda: str(amp.plan)):
        with pytest.raises(PlanError, match="no plan before capture: call the model once, or pass example_inputs"):
            ask()
    assert amp.plan.skipped == ()


# JSON ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indent", [None, 1, 4])
def test_json_gives_the_plan_back_exactly(plan: CastPlan, indent: int | None) -> None:
    for each in (plan, pair()):
        assert CastPlan.from_json(each.to_json(indent)) == each
        assert CastPlan.from_json(each.to_json(indent)).to_json() == each.to_json()


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(pair().to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    "text, says",
    [
        pytest.param("", "this is no cast plan: not JSON", id="empty"),
        pytest.param("{", "this is no cast plan: not JSON", id="cut off"),
        pytest.param("[]", "has no 'regions'", id="a list"),
        pytest.param("{}", "has no 'regions'; write one with plan.to_json()", id="another object"),
        pytest.param(
            damaged(lambda d: d.update(version=99)),
            "version 99, this amprewrite reads 1 to 5; make the plan anew",
            id="a later version",
        ),
        pytest.param(damaged(lambda d: d.pop("version")), "version None", id="no version"),
        pytest.param(damaged(lambda d: d.pop("low")), "the plan is damaged.*low", id="a field missing"),
        pytest.param(damaged(lambda d: d.update(colour="green")), "the plan is damaged.*colour", id="a field too many"),
        pytest.param(
            damaged(lambda d: d["regions"][0]["nodes"][0].update(colour="green")),
            "damaged.*'green' is not a valid",
            id="a colour",
        ),
        pytest.param(damaged(lambda d: d["regions"][0]["nodes"][0].update(reason="WHIM")), "damaged.*WHIM", id="a reason"),
        pytest.param(damaged(lambda d: d["regions"][0]["nodes"][0].update(kind="odd")), "damaged.*odd", id="a kind"),
        pytest.param(damaged(lambda d: d["regions"][0].update(nodes=3)), "damaged.*int", id="a number for a list"),
        pytest.param(damaged(lambda d: d["regions"][0]["casts"][0].pop("users")), "damaged.*users", id="a cast without readers"),
    ],
)
def test_other_text_is_an_error_that_says_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        CastPlan.from_json(text)


# editing, applying, comparing -----------------------------------------------------------------------------------------


def test_an_edited_plan_is_what_runs(plan: CastPlan) -> None:
    edited = plan.edit({"second": "high", "mul": "high"})
    amp = amprewrite.rewrite(Small(), plan=edited, example_inputs=INPUTS)
    asked = {node.name: node.colour for node in edited.nodes}
    assert {node.name: node.colour for node in amp.plan.nodes} == asked
    assert amp.plan.casts
    assert all(node.colour is Colour.HIGH for node in amp.plan.find("second"))
    assert "in_plan" not in amp.plan.explain("second").lower() and "the given plan says so" in amp.plan.explain("second")
    assert amp(*INPUTS).dtype is torch.float32


def test_an_unedited_plan_gives_the_same_plan(plan: CastPlan) -> None:
    read = CastPlan.from_json(plan.to_json())
    amp = amprewrite.rewrite(Small(), plan=read, example_inputs=INPUTS)
    assert replace(amp.plan, notes=()) == plan


def test_edit_leaves_the_plan_and_what_carries_no_fp32_as_they_are(plan: CastPlan) -> None:
    before = plan.to_json()
    assert plan.edit({"linear": "low"}).nodes[plan.nodes.index(plan.find("linear")[0])].reason is Reason.IN_PLAN
    assert plan.to_json() == before


def test_edit_reaches_one_graph_of_several() -> None:
    edited = pair().edit({"graph1/exp": "low"})
    assert [node.colour for node in edited.find("exp")] == [Colour.HIGH, Colour.LOW]
    assert [node.colour for node in pair().edit({"exp": "low"}).find("exp")] == [Colour.LOW, Colour.LOW]


def test_edit_takes_the_names_of_formats_as_colours(plan: CastPlan) -> None:
    assert plan.edit({"exp": "bf16"}) == plan.edit({"exp": "low"})
    assert plan.edit({"exp": "fp32"}) == plan.edit({"exp": "high"})


def test_what_is_no_text_is_no_plan() -> None:
    with pytest.raises(PlanError, match=r"takes text that plan.to_json.* not one dict"):
        CastPlan.from_json({})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "colours, says",
    [
        pytest.param(
            {"exp": "green"}, "'exp': 'green' is neither 'low' nor 'high', and for products 'wide', 'fp8' or 'bf16'", id="no colour"
        ),
        pytest.param({"exp": "plain"}, "'plain' is neither 'low' nor 'high'", id="a colour that cannot be asked for"),
        pytest.param({"expo": "low"}, "'expo'; did you mean .*exp", id="no node"),
    ],
)
def test_edit_refuses(plan: CastPlan, colours: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan.edit(colours)


class Other(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def applied(made_for: nn.Module, model: nn.Module, change: Callable[[CastPlan], CastPlan] = lambda p: p, **options: Any) -> None:
    plan = change(amprewrite.plan(made_for, (torch.randn(3, 4),), dtype="bf16"))
    amprewrite.rewrite(model, plan=plan, example_inputs=(torch.randn(3, 4),), **options)


def recoloured(name: str, colour: Colour) -> Callable[[CastPlan], CastPlan]:
    def change(plan: CastPlan) -> CastPlan:
        (region,) = plan.regions
        nodes = tuple(replace(node, colour=colour) if node.name == name else node for node in region.nodes)
        return replace(plan, regions=(replace(region, nodes=nodes),))

    return change


LINEAR = Other(nn.Linear(4, 4), nn.ReLU())


@pytest.mark.parametrize(
    "model, change, options, says",
    [
        pytest.param(
            Other(nn.Linear(4, 4), nn.GELU()),
            None,
            {},
            "for another model.*a node relu where the model has gelu",
            id="another op",
        ),
        pytest.param(Other(nn.Linear(4, 4)), None, {}, "another model.*a node relu where the model has output", id="an op more"),
        pytest.param(Other(nn.ReLU(), nn.Linear(4, 4)), None, {}, "for another model.*where the model has", id="another order"),
        pytest.param(
            LINEAR, None, {"dtype": "fp16"}, "the plan is for low = bf16, dtype= asks for fp16; leave dtype= out", id="another format"
        ),
        pytest.param(
            LINEAR, lambda p: replace(p, regions=()), {}, "the plan has no regions; make one with amprewrite.plan", id="nothing"
        ),
        pytest.param(
            LINEAR, recoloured("x", Colour.LOW), {}, "x is a model input: it cannot be low, only its copies can", id="a low input"
        ),
        pytest.param(
            LINEAR, recoloured("relu", Colour.PLAIN), {}, "relu is plain in the plan, but it carries fp32", id="a plain fp32 node"
        ),
        pytest.param(
            LINEAR, recoloured("output", Colour.LOW), {}, "output is low in the plan, but it carries no tensor", id="a low output"
        ),
    ],
)
def test_a_plan_that_does_not_fit_names_the_first_mismatch(
    model: nn.Module, change: Callable[[CastPlan], CastPlan] | None, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        applied(LINEAR, model, change or (lambda p: p), **options)


class Difference(nn.Module):
    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.fc, self.turned = nn.Linear(4, 4), turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) - x if self.turned else x - self.fc(x)


def test_a_plan_does_not_fit_a_model_that_exchanges_an_input_and_a_result() -> None:
    with pytest.raises(PlanError, match=r"for another model.*sub reads x, linear in the plan"):
        applied(Difference(False), Difference(True))


class Moded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x) if self.training else torch.sigmoid(x @ x)


def test_a_plan_of_another_mode_does_not_fit() -> None:
    x = torch.randn(4, 4)
    plan = amprewrite.plan(Moded().train(), (x,), dtype="bf16")
    with pytest.raises(PlanError, match="another model, mode or kind of input: it has a node relu where the model has sigmoid"):
        amprewrite.rewrite(Moded().eval(), plan=plan, example_inputs=(x,))


def test_a_plan_that_does_not_fit_leaves_the_model_alone(plan: CastPlan) -> None:
    model, x = LINEAR, torch.randn(3, 4)
    want = model(x)
    with pytest.raises(PlanError):
        amprewrite.rewrite(model, plan=plan, example_inputs=(x,))
    torch.testing.assert_close(model(x), want, rtol=0, atol=0)


def test_plan_errors_are_amprewrite_errors() -> None:
    assert issubclass(PlanError, AmpRewriteError)


def test_diff_lists_what_the_other_does_differently(plan: CastPlan) -> None:
    other = amprewrite.rewrite(Small(), plan=plan.edit({"head": "high"}), example_inputs=INPUTS).plan
    lines = plan.diff(other).splitlines()
    assert lines[0] == "linear_4: low -> high (the given plan says so)"
    assert "cast gone: linear_4 -> fp32 for exp" in lines
    assert plan.diff(plan) == ""


def test_diff_compares_padding_and_what_casts_clamp() -> None:
    model, inputs = nn.Sequential(nn.Linear(127, 129), nn.ReLU(), nn.Linear(129, 64)), (torch.randn(64, 127),)
    plain, padded = (amprewrite.plan(model, inputs, dtype="bf16", pad=pad) for pad in ("never", 8))
    lines = plain.diff(padded).splitlines()
    assert lines and all(line.startswith("pad new: graph0: ") for line in lines)
    assert [line.replace("new", "gone") for line in lines] == padded.diff(plain).splitlines()
    assert padded.diff(padded) == padded.diff(padded.edit({})) == ""
    (region,) = plain.regions
    first, *rest = region.casts
    clamped = replace(plain, regions=(replace(region, casts=(replace(first, saturate=True), *rest)),))
    text = f"{first.value} -> {first.to} for {first.users[0]}"
    assert plain.diff(clamped) == f"cast gone: {text}\ncast new: {text} (saturating)"


def test_an_edited_plan_says_that_its_casts_follow(plan: CastPlan) -> None:
    edited = plan.edit({"head": "high"})
    assert plan.diff(edited) == "linear_4: low -> high (the given plan says so)"
    assert plan.diff(plan.edit({})) == ""
    assert "0 casts" not in f"{edited}{edited.listing()}" and "casts follow from the colours" in edited.summary()
    assert "0 casts" in str(amprewrite.plan(Small(), INPUTS, dtype="fp32"))


def test_casts_in_subgraphs_alone_are_counted() -> None:
    """A graph of low ops around a checkpoint may have no casts of its own."""
    inner = pair().regions[0]
    found = CastPlan("fp16", (replace(inner, name="outer", casts=()), inner))
    assert "1 casts: " in found.summary()
    assert "casts follow" not in f"{found}{found.listing()}"


def test_diff_names_nodes_that_only_one_has() -> None:
    one, two = pair(), replace(pair(), regions=pair().regions[:1])
    assert "only here: graph1/exp" in one.diff(two)
    assert "only there: graph1/exp" in two.diff(one)


def test_a_0_dim_divisor_of_a_weight_is_not_cast():
    """As spectral norm divides: type promotion leaves 0-dim tensors out, and a cast would round the whole weight's scale."""
    model = nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)))
    plan = amprewrite.plan(model, (torch.randn(4, 8),), dtype="bf16")
    assert not [cast for cast in plan.casts if cast.to == "bf16" and not plan.find(cast.value)[0].shape]


def test_a_plan_of_version_one_is_migrated() -> None:
    """It called the write version of a cast its epoch."""
    plan = amprewrite.plan(torch.nn.Linear(8, 8), (torch.randn(2, 8),), dtype="bf16")
    old = json.loads(plan.to_json()) | {"version": 1}
    for region in old["regions"]:
        for cast in region["casts"]:
            cast["epoch"] = cast.pop("write_version")
    assert amprewrite.CastPlan.from_json(json.dumps(old)) == plan
    for damage in ({"regions": 3}, {"regions": [4]}, {"regions": [{"casts": [5]}]}):
        with pytest.raises(PlanError):
            amprewrite.CastPlan.from_json(json.dumps(old | damage))


def test_a_plan_of_version_three_is_migrated() -> None:
    """It listed weights whose gradients one autograd node returned."""
    plan = amprewrite.plan(torch.nn.Linear(8, 8), (torch.randn(2, 8),), dtype="bf16")
    old = json.loads(plan.to_json()) | {"version": 3}
    for region in old["regions"]:
        region["gradient_blocks"] = [["weight", "bias"]]
    assert amprewrite.CastPlan.from_json(json.dumps(old)) == plan
    for damage in ({"regions": 3}, {"regions": [4]}):
        with pytest.raises(PlanError):
            amprewrite.CastPlan.from_json(json.dumps(old | damage))


@pytest.mark.parametrize(("version", "reason"), [(2, "PARTLY_ROUNDED"), (2, "AVERAGED"), (4, "DRAWN")])
def test_a_plan_with_more_reasons_is_migrated(version: int, reason: str) -> None:
    """It had several reasons where there is one now, `MAGNIFIED`."""
    plan = amprewrite.plan(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 8)), (torch.randn(2, 8),), dtype="bf16")
    old = json.loads(plan.to_json()) | {"version": version}
    node = next(node for node in old["regions"][0]["nodes"] if node["op"] == "relu")
    node["reason"] = reason
    assert amprewrite.CastPlan.from_json(json.dumps(old)).find(node["name"])[0].reason is Reason.MAGNIFIED
    for damage in ({"regions": 3}, {"regions": [4]}, {"regions": [{"nodes": 5}]}, {"regions": [{"nodes": [5]}]}):
        with pytest.raises(PlanError):
            amprewrite.CastPlan.from_json(json.dumps(old | damage))
