"""Whole nets: valid, loadable at every level, few casts, heavy ops low, right under true rounding."""

from __future__ import annotations

import onnx
import pytest
from onnx_help import HAND, Net, colours, export, ops, run, torch_nets
from tiers import long_unless

import amprewrite.api.onnx.convert as convert
from amprewrite.graphs.onnx.run.compare import relative_error

MOST_CASTS = {
    "bert": 2, "gpt2": 1, "t5": 1, "vit": 2, "convnext": 4, "swin": 2, "resnet": 2, "whisper": 2,
    "cond_if": 3, "loop": 2, "scan": 2, "overflow": 4, "underflow": 2, "casts": 3, "lstm": 1, "unet": 2,
}  # fmt: skip
KEPT_HIGH = {"overflow": {"g2"}, "underflow": {"tiny"}}
"""Heavy ops that range forbids to run low in fp16."""


ALWAYS = {"bert", "resnet", *HAND}


class Nets(dict[str, Net]):
    """Files of all nets, exported when they are asked for."""

    def __missing__(self, name: str) -> Net:
        self[name] = HAND[name]() if name in HAND else export(*torch_nets()[name])
        return self[name]


@pytest.fixture(scope="module")
def nets() -> Nets:
    return Nets()


@pytest.mark.parametrize("name", MOST_CASTS)
@pytest.mark.long
def test_fp16(nets, name):
    given = nets[name]
    before = given.model.SerializeToString()
    result = convert.rewrite_onnx(given.model, calibration=given.feed)
    assert given.model.SerializeToString() == before
    made = result.model
    onnx.checker.check_model(made, full_check=True)
    wanted = run(given.model, given.feed)
    for level in range(4):
        assert relative_error([wanted], [run(made, given.feed, level)]) < 5e-3
    assert result.report.strict_error is not None
    assert result.report.strict_error < 5e-3
    planned = [cast for cast in result.plan.casts if not cast.weight]
    assert len(planned) <= MOST_CASTS[name]
    assert ops(made)["Cast"] <= ops(given.model)["Cast"] + len(planned)
    heavy = {node.name for node in result.plan.nodes if node.role == "op" and node.flops and node.colour.value != "low"}
    assert heavy == KEPT_HIGH.get(name, set())
    if not heavy:
        assert result.report.weights_after <= 0.51 * result.report.weights_before


@pytest.mark.parametrize("name", long_unless(ALWAYS.__contains__, MOST_CASTS))
def test_bf16(nets, name):
    given = nets[name]
    result = convert.rewrite_onnx(given.model, dtype="bf16", calibration=given.feed)
    onnx.checker.check_model(result.model, full_check=True)
    assert result.report.strict_error is not None
    assert result.report.strict_error < 5e-2
    low = colours(result.model)
    heavy = [node for node in result.plan.nodes if node.role == "op" and node.flops]
    assert all(node.colour.value == "low" for node in heavy)
    assert all(low[node.name] == "low" for node in heavy)


def test_every_kind_of_heavy_op_is_seen(nets):
    seen = {op for name in ALWAYS for op in ops(nets[name].model)}
    assert {"MatMul", "Gemm", "Conv", "LSTM"} <= seen


@pytest.mark.parametrize("name", ["bert", "cond_if", "overflow", "unet"])
def test_twice_changes_no_colour_of_a_heavy_op_and_adds_no_cast(nets, name):
    once = convert.rewrite_onnx(nets[name].model, calibration=nets[name].feed)
    twice = convert.rewrite_onnx(once.model, calibration=nets[name].feed)
    assert not [cast for cast in twice.plan.casts if not cast.weight]
    assert ops(twice.model) == ops(once.model)


def test_range_reasons_name_the_op_and_its_largest_value(nets):
    plan = convert.rewrite_onnx(nets["overflow"].model, calibration=nets["overflow"].feed).plan
    assert "g2 reaches 1.35e+05, fp16 ends at 65504" in plan.explain("g2")
    report = convert.rewrite_onnx(nets["underflow"].model, calibration=nets["underflow"].feed).report
    assert any(loss.name == "w0" and loss.kept for loss in report.losses)
