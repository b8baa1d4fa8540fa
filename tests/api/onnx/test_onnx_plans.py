"""Plans and ONNX files: the file has the casts of its plan, plans travel with it, and given plans are followed."""

from __future__ import annotations

import onnx
import pytest
import torch
from onnx_help import F16, F32, HAND, all_nodes, colours, const, gemm_chain, node, run
from torch import nn

import amprewrite
from amprewrite import CastPlan, PlanError, PolicyError
from amprewrite.api.onnx.convert import export_onnx, rewrite_onnx


def planned_casts(plan: CastPlan) -> list[tuple[str, str]]:
    return sorted((cast.value, cast.to) for cast in plan.casts if not cast.weight)


def casts_in(model: onnx.ModelProto) -> list[str]:
    """Formats of the casts that were inserted."""
    return sorted(prop.value for each in all_nodes(model) for prop in each.metadata_props if prop.key == "amprewrite.cast")


@pytest.mark.parametrize("name", HAND)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_casts_in_the_file_are_those_in_the_plan(name, dtype):
    given = HAND[name]()
    result = rewrite_onnx(given.model, dtype=dtype, calibration=given.feed)
    assert casts_in(result.model) == sorted(to for _, to in planned_casts(result.plan))
    written = colours(result.model)
    ops = {each.name: each.colour.value for each in result.plan.nodes if each.role == "op"}
    assert written
    assert all(ops[each] == colour for each, colour in written.items() if each in ops)


def test_a_cast_that_the_model_had_joins_the_planned_one():
    given = gemm_chain(
        node("Cast", ["h"], ["own"], to=F32, name="own_cast"), node("Exp", ["h"], ["e"], name="exp"), node("Add", ["e", "own"], ["mid"])
    )
    result = rewrite_onnx(given.model, overrides={"exp": "deny", "add": "deny"}, calibration=given.feed)
    assert casts_in(result.model) == sorted(to for _, to in planned_casts(result.plan))
    assert sum(each.op_type == "Cast" for each in result.model.graph.node) == len(casts_in(result.model))


def test_a_mask_that_runs_high_saturates_on_its_way_down():
    lowest = const("lowest", torch.finfo(torch.float32).min)
    given = gemm_chain(node("Where", ["m", "lowest", "h"], ["f"], name="fill"), node("Softmax", ["f"], ["mid"], name="soft"),
                       inits=[lowest, const("m", [True] + [False] * 15, bool)])  # fmt: skip
    result = rewrite_onnx(given.model, overrides={"node:fill": "fp32", "node:soft": "low"}, calibration=given.feed)
    assert any(cast.saturate for cast in result.plan.casts if not cast.weight)
    assert sum(each.op_type == "Clip" for each in result.model.graph.node) == 1
    onnx.checker.check_model(result.model, full_check=True)


# -- a plan of this very graph -----------------------------------------------------------
def test_a_plan_gives_the_same_file_again():
    given = HAND["overflow"]()
    first = rewrite_onnx(given.model, calibration=given.feed)
    plan = CastPlan.from_json(first.plan.to_json())
    assert plan == first.plan
    again = rewrite_onnx(given.model, plan=plan, calibration=given.feed)
    assert colours(again.model) == colours(first.model)
    assert planned_casts(again.plan) == planned_casts(first.plan)


def test_an_edited_plan_is_followed():
    given = gemm_chain(node("Relu", ["h"], ["mid"], name="act"))
    plan = rewrite_onnx(given.model, calibration=given.feed).plan
    made = rewrite_onnx(given.model, plan=plan.edit({"act": "high", "last": "high"}))
    assert colours(made.model) == {"first": "low", "act": "high", "last": "high"}
    assert "the given plan says so" in made.plan.explain("act")
    assert {tensor.name: tensor.data_type for tensor in made.model.graph.initializer} == {"w0": F16, "w1": F32}


def test_a_plan_with_low_inputs_is_followed():
    given = gemm_chain(node("Relu", ["h"], ["mid"]))
    plan = rewrite_onnx(given.model, keep_io=False).plan
    assert rewrite_onnx(given.model, keep_io=False, plan=plan).model.graph.input[0].type.tensor_type.elem_type == F16
    with pytest.raises(PlanError, match="x is a model input"):
        rewrite_onnx(given.model, plan=plan)


def test_plans_that_do_not_fit_are_refused():
    given = gemm_chain(node("Relu", ["h"], ["mid"], name="act"))
    plan = rewrite_onnx(given.model).plan
    other = gemm_chain(node("Tanh", ["h"], ["mid"], name="act"))
    with pytest.raises(PlanError, match="act is relu in the plan and tanh in the model"):
        rewrite_onnx(other.model, plan=plan)
    with pytest.raises(PlanError, match="the plan is for low = fp16, this rewrite's is bf16"):
        rewrite_onnx(given.model, plan=plan, dtype="bf16")
    with pytest.raises(PolicyError, match="takes a CastPlan"):
        rewrite_onnx(given.model, plan=plan.to_json())
    with pytest.raises(PolicyError, match=r"put the overrides into the plan with plan\.edit"):
        rewrite_onnx(given.model, plan=plan, overrides={"relu": "deny"})


def test_a_plan_cannot_ask_for_a_kernel_that_is_not_there():
    quantised = gemm_chain(node("QuantizeLinear", ["h", "s"], ["q"]), node("DequantizeLinear", ["q", "s"], ["mid"], name="dq"),
                           inits=[const("s", 0.02)])  # fmt: skip
    plan = rewrite_onnx(quantised.model).plan.edit({"dq": "low"})
    with pytest.raises(PlanError, match=r"dq is low in the plan, but cannot be: .*quantised"):
        rewrite_onnx(quantised.model, plan=plan)


def test_the_plan_is_written_with_the_file_or_not_at_all(tmp_path):
    given = gemm_chain(node("Relu", ["h"], ["mid"]))
    out, beside = tmp_path / "m.onnx", tmp_path / "m.plan.json"
    with pytest.raises(amprewrite.AccuracyError):
        rewrite_onnx(given.model, out, plan_path=beside, max_rel_err=1e-9)
    assert not list(tmp_path.iterdir())
    result = rewrite_onnx(given.model, out, plan_path=beside)
    assert result.plan_path == beside
    assert CastPlan.from_json(beside.read_text()) == result.plan
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "m.plan.json"}
    with pytest.raises(PolicyError, match="a file of its own"):
        rewrite_onnx(given.model, out, plan_path=out)
    with pytest.raises(PolicyError, match="goes with a file"):
        rewrite_onnx(given.model, plan_path=beside)


# -- plans and overrides of the PyTorch graph ------------------------------------------------
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture
def block() -> nn.Module:
    torch.manual_seed(0)
    return Block().eval()


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


def by_op(plan: CastPlan) -> dict[str, str]:
    return {each.op: each.colour.value for each in plan.nodes if each.role == "op"}


def heavy(plan: CastPlan) -> dict[str, str]:
    return {each.module: each.colour.value for each in plan.nodes if each.flops}


def test_an_edited_plan_of_the_model_decides_the_file(block, tmp_path):
    plan = amprewrite.plan(block, (X,), dtype="fp16").edit({"gelu": "high", "down": "high"})
    amp = amprewrite.rewrite(block, plan=plan)
    result = export_onnx(amp, tmp_path / "m.onnx", (X,))
    assert heavy(result.plan) == {"up": "low", "down": "high"}
    assert by_op(result.plan)["gelu"] == "high"
    assert "the given plan says so (gelu of the PyTorch graph)" in result.plan.explain("node_gelu")
    assert any("the plan of the PyTorch graph decides" in note for note in result.report.notes)
    assert heavy(export_onnx(amprewrite.rewrite(block, dtype="fp16"), tmp_path / "m.onnx", (X,), plan=plan).plan)["down"] == "high"


def test_node_overrides_decide_the_file(block, tmp_path):
    amp = amprewrite.rewrite(block, dtype="fp16", overrides={"node:linear_1": "fp32"})
    result = export_onnx(amp, tmp_path / "m.onnx", (X,))
    assert heavy(result.plan) == {"up": "low", "down": "high"}
    plain = export_onnx(amprewrite.rewrite(block, dtype="fp16"), tmp_path / "m.onnx", (X,))
    assert heavy(plain.plan) == {"up": "low", "down": "low"}


def test_an_edited_plan_of_the_file_decides_the_next_export(block, tmp_path):
    amp = amprewrite.rewrite(block, dtype="fp16")
    plan = export_onnx(amp, tmp_path / "m.onnx", (X,)).plan.edit({"up": "high"})
    result = export_onnx(amp, tmp_path / "m.onnx", (X,), plan=plan)
    assert heavy(result.plan) == {"up": "high", "down": "low"}
    assert run(result.model, {"x": X.numpy()})[0].shape == (4, 16)
    with pytest.raises(PlanError, match="this model's is bf16"):
        export_onnx(amprewrite.rewrite(block, dtype="bf16"), tmp_path / "b.onnx", (X,), plan=plan)
