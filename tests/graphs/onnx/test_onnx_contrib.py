"""Ops of ONNX Runtime's own domain: known ones are classified, all others are walls that are listed."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime.capi.onnxruntime_pybind11_state as runtime
import pytest
from onnx import helper
from onnx_help import BOOL, F16, I64, colours, const, graph, net, node, noise, run, value, weight

from amprewrite.api.onnx.convert import rewrite_onnx
from amprewrite.graphs.onnx.ops import signature
from amprewrite.tables.ops.onnx_names import CONTRIB, DOMAIN
from amprewrite.tables.ops.op_lists import find_op

SCHEMAS = {schema.name: schema for schema in runtime.get_all_operator_schema() if schema.domain == DOMAIN}


@pytest.mark.parametrize("op_type", CONTRIB)
def test_rows_are_what_onnx_runtime_registers(op_type):
    row, schema = CONTRIB[op_type], SCHEMAS[op_type]
    sig = signature(DOMAIN, op_type, 1)
    allowed = {constraint.type_param_str: set(constraint.allowed_type_strs) for constraint in schema.type_constraints}
    assert find_op(row.name) is not None
    assert len(row.inputs) == len(schema.inputs)
    assert len(row.outputs) == len(schema.outputs)
    for ours, theirs in [*zip(sig.inputs, schema.inputs, strict=True), *zip(sig.outputs, schema.outputs, strict=True)]:
        types = allowed.get(theirs.typeStr, {theirs.typeStr})
        if ours.startswith("tensor("):
            assert not types & {"tensor(float16)", "tensor(bfloat16)"}, theirs.name
        else:
            assert {"tensor(float)", "tensor(float16)"} <= types, theirs.name
            assert ("tensor(bfloat16)" in types) == row.newer, theirs.name
    own = {theirs.typeStr for letter, theirs in zip(row.inputs, schema.inputs, strict=True) if letter == "T"}
    assert own == {"T"}


def fused_block():
    nodes = [
        node("FusedMatMul", ["x", "w0"], ["h"], name="mm", domain=DOMAIN, alpha=0.5),
        node("BiasGelu", ["h", "b0"], ["g"], name="gelu", domain=DOMAIN),
        node("MatMul", ["g", "w1"], ["d"], name="down"),
        node("SkipLayerNormalization", ["d", "x", "gamma", "beta"], ["n", "", "", "s"], name="norm", domain=DOMAIN),
        node("Add", ["n", "s"], ["out"], name="add"),
    ]
    inits = [
        weight("w0", 16, 32), const("b0", np.zeros(32)), weight("w1", 32, 16), const("gamma", np.ones(16)), const("beta", np.zeros(16)),
    ]  # fmt: skip
    return net(nodes, [value("x", 2, 4, 16)], [value("out", 2, 4, 16)], inits, {"x": noise(2, 4, 16)}, domains=[DOMAIN])


def test_fused_ops_run_low_though_onnx_cannot_infer_their_types():
    given = fused_block()
    result = rewrite_onnx(given.model, calibration=given.feed)
    low = colours(result.model)
    assert low["mm"] == low["gelu"] == low["down"] == "low"
    assert all(t.data_type == F16 for t in result.model.graph.initializer if t.name in ("w0", "b0", "w1"))
    forced = rewrite_onnx(given.model, calibration=given.feed, overrides={"node:norm": "low", "node:add": "low"})
    assert set(colours(forced.model).values()) == {"low"}
    denied = rewrite_onnx(given.model, calibration=given.feed, overrides={"BiasGelu": "deny"})
    assert colours(denied.model)["gelu"] == "high"
    assert not [note for note in result.report.notes if "on no list" in note]
    np.testing.assert_allclose(run(result.model, given.feed)[0], run(given.model, given.feed)[0], atol=1e-2)
    assert result.report.strict_error < 2e-3


def test_what_has_no_row_is_a_wall_and_is_listed():
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="a"),
        node("Inverse", ["h"], ["i"], name="inverse", domain=DOMAIN),
        node("MatMul", ["i", "w"], ["out"], name="b"),
    ]
    given = net(nodes, [value("x", 8, 8)], [value("out", 8, 8)], [weight("w", 8, 8)], {"x": noise(8, 8)}, domains=[DOMAIN])
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert colours(result.model) == {"a": "low", "inverse": "high", "b": "low"}
    assert any(note.startswith("com.microsoft::Inverse is on no list") for note in result.report.notes)


def test_onnx_runtime_tells_types_that_nothing_else_does():
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="a"),
        node("Inverse", ["h"], ["i"], name="inverse", domain=DOMAIN),
        node("Relu", ["i"], ["r"], name="relu"),
        node("Inverse", ["r"], ["j"], name="again", domain=DOMAIN),
        node("Gemm", ["j", "r"], ["out"], name="b"),
    ]
    given = net(nodes, [value("x", 8, 8)], [value("out", 8, 8)], [weight("w", 8, 8)], {"x": noise(8, 8) + 9 * np.eye(8, dtype="f")},
                domains=[DOMAIN])  # fmt: skip
    result = rewrite_onnx(given.model, calibration=given.feed, overrides={"node:relu": "low"})
    assert colours(result.model) == {"a": "low", "inverse": "high", "relu": "low", "again": "high", "b": "low"}
    assert not [info for info in result.model.graph.value_info if info.name in "ijr"]  # they are guesses, which no file declares


def test_values_of_unknown_type_keep_their_readers_fp32_and_are_named():
    nodes = [
        node("Strange", ["x"], ["at"], name="strange", domain="acme"),
        node("Gather", ["table", "at"], ["rows"], name="gather"),
        node("MatMul", ["rows", "w"], ["out"], name="b"),
    ]
    given = net(nodes, [value("x", 8)], [value("out", 8, 8)], [weight("table", 9, 8), weight("w", 8, 8)], {}, domains=["acme"])
    result = rewrite_onnx(given.model, verify=False)
    assert "the type of at is unknown, so its readers stay fp32 (1 nodes): declare it in value_info" in result.report.notes
    assert not [note for note in result.report.notes if "Gather is on no list" in note]
    assert "it reads a value of unknown type (at)" in result.plan.explain("gather")
    assert colours(result.model)["b"] == "low"


def bare(name: str) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto(name=name)


def unlisted_in_branch(first: bool, declares: bool):
    own = [node("MatMul", ["h", "w1"], ["a"], name="mm_own"), node("Inverse", ["a"], ["oa"], name="inverse", domain=DOMAIN)]
    other = [node("MatMul", ["h", "w1"], ["b"], name="mm_other"), node("Relu", ["b"], ["ob"], name="relu")]
    branches = graph(own, "own", [], [bare("oa")]), graph(other, "other", [], [value("ob", 16, 16) if declares else bare("ob")])
    then, otherwise = branches if first else branches[::-1]
    nodes = [
        node("MatMul", ["x", "w0"], ["h"], name="first"),
        node("If", ["yes"], ["mid"], name="if", then_branch=then, else_branch=otherwise),
        node("MatMul", ["mid", "w1"], ["out"], name="last"),
    ]
    inits = [const("yes", first, np.bool_), const("w0", np.eye(16)), const("w1", np.eye(16))]
    feed = {"x": noise(16, 16) / 9 + np.eye(16, dtype=np.float32)}
    return net(nodes, [value("x", 16, 16)], [value("out", 16, 16)], inits, feed, domains=[DOMAIN])


@pytest.mark.parametrize("declares", [True, False], ids=["other branch declared", "none declared"])
@pytest.mark.parametrize("first", [True, False], ids=["then", "else"])
def test_a_branch_that_does_not_declare_its_result_has_the_type_of_the_other(first, declares):
    given = unlisted_in_branch(first, declares)
    result = rewrite_onnx(given.model, calibration=given.feed)
    low = colours(result.model)
    assert low["inverse"] == "high" and low["mm_own"] == low["mm_other"] == low["last"] == "low"
    np.testing.assert_allclose(run(result.model, given.feed)[0], run(given.model, given.feed)[0], rtol=0, atol=1e-2)


def test_a_loop_that_begins_with_a_value_of_unknown_type_casts_it():
    nodes = [node("MatMul", ["s", "w1"], ["m"], name="mm"), node("Tanh", ["m"], ["s1"], name="tanh"), node("Identity", ["go"], ["on"])]
    body = graph(nodes, "body", [value("i", dtype=I64), value("go", dtype=BOOL), value("s", 4, 16)], [bare("on"), bare("s1")])
    nodes = [
        node("MatMul", ["x", "w0"], ["h"], name="first"),
        node("Foreign", ["h"], ["f"], name="foreign", domain="own.domain"),
        node("Loop", ["n", "", "f"], ["mid"], name="loop", body=body),
        node("MatMul", ["mid", "w1"], ["out"], name="last"),
    ]
    inits = [weight("w0", 16, 16), weight("w1", 16, 16), const("n", 3, np.int64)]
    given = net(nodes, [value("x", 4, 16)], [value("out", 4, 16)], inits, {}, domains=["own.domain"])
    made = rewrite_onnx(given.model).model
    foreign = helper.make_function("own.domain", "Foreign", ["a"], ["b"], [node("Relu", ["a"], ["b"])], [helper.make_opsetid("", 18)])
    for model in (made, given.model):
        model.functions.append(foreign)
    feed = {"x": noise(4, 16)}
    np.testing.assert_allclose(run(made, feed)[0], run(given.model, feed)[0], rtol=0, atol=1e-2)
