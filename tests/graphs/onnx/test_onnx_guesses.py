"""Shapes that onnx guesses are for planning: a file declares what its source declared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import helper
from onnx_help import BF16, BOOL, F16, F32, I64, Net, const, gemm_chain, graph, node, noise, run, value, weight

from amprewrite import rewrite_onnx
from amprewrite.graphs.onnx.run.compare import relative_error, strict_outputs

COPIES = {name: (F16, [4, 16]) for name in ("x_fp16", "out_fp16")}
"""What copies of the input and the output declare: what those declare, in fp16."""


def undeclared(nodes: list[onnx.NodeProto], outs, inits, opset: int = 18, size=(4, 16), declared=()) -> Net:
    """A model that declares nothing but its inputs, its outputs and the values `declared`."""
    ins, feed = [value("x", *size)], {"x": noise(*size)}
    made = helper.make_graph(nodes, "net", ins, outs, inits, value_info=list(declared))
    return Net(helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), feed)


def chain(opset: int = 18, declared=()) -> Net:
    nodes = [
        node("Gemm", ["x", "w0"], ["h"], name="first"), node("Relu", ["h"], ["mid"]), node("Exp", ["mid"], ["e"]),
        node("Gemm", ["e", "w1"], ["out"], name="last"),
    ]  # fmt: skip
    return undeclared(nodes, [value("out", 4, 16)], [weight("w0", 16, 16), weight("w1", 16, 16)], opset, declared=declared)


def said(model: onnx.ModelProto) -> dict[str, tuple[int, list[int]]]:
    """What a file declares of its inner values."""
    held = {tensor.name for tensor in model.graph.initializer}
    kinds = {info.name: info.type.tensor_type for info in model.graph.value_info if info.name not in held}
    return {name: (kind.elem_type, [dim.dim_value for dim in kind.shape.dim]) for name, kind in kinds.items()}


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
def test_a_file_declares_what_its_source_declared(outside: bool, tmp_path: Path) -> None:
    """Of values in between that were declared the type is the new one."""
    result = rewrite_onnx(chain().model, tmp_path / "m.onnx", external_data=outside)
    assert said(onnx.load(tmp_path / "m.onnx")) == said(result.model) == COPIES
    shapes = {each.name: each.shape for each in result.plan.regions[0].nodes}
    assert shapes["first"] == (4, 16), "planned with what was inferred"
    result = rewrite_onnx(chain(declared=[value("mid", 4, 16), value("e", 4, 16)]).model)
    assert said(result.model) == {
        **COPIES, "mid": (F16, [4, 16]), "mid_fp32": (F32, [4, 16]), "e": (F32, [4, 16]), "e_fp16": (F16, [4, 16]),
    }  # fmt: skip


@pytest.mark.parametrize("opset", [6, 11], ids=["too old", "raised for bf16"])
def test_what_a_converter_declares_is_a_guess_too(opset: int) -> None:
    nodes = [node("Relu", ["x"], ["h"]), node("MatMul", ["h", "w"], ["m"]), node("Exp", ["m"], ["out"])]
    given = undeclared(nodes, [value("out", 4, 16)], [weight("w", 16, 16)], opset)
    result = rewrite_onnx(given.model, dtype="bf16", overrides={"relu": "allow"})
    assert any("opset raised" in note for note in result.report.notes)
    assert not {"h", "m"} & set(said(result.model))
    declared = undeclared(nodes, [value("out", 4, 16)], [weight("w", 16, 16)], opset, declared=[value("m", 4, 16)])
    assert said(rewrite_onnx(declared.model, dtype="bf16").model)["m"] == (BF16, [4, 16])


def test_a_body_declares_what_its_source_declared() -> None:
    inner = graph(
        [node("MatMul", ["state", "w"], ["m"]), node("Tanh", ["m"], ["next"]), node("Identity", ["c_in"], ["c_out"])], "body",
        [value("i", dtype=I64), value("c_in", dtype=BOOL), onnx.ValueInfoProto(name="state")],
        [value("c_out", dtype=BOOL), value("next", 4, 16)],
    )  # fmt: skip
    nodes = [node("Loop", ["n", "yes", "x"], ["y"], name="loop", body=inner), node("MatMul", ["y", "w"], ["out"])]
    inits = [weight("w", 16, 16), const("n", 3, np.int64), const("yes", True, np.bool_)]
    result = rewrite_onnx(undeclared(nodes, [value("out", 4, 16)], inits).model)
    assert set(said(result.model)) == set(COPIES) and result.report.strict_error < 1e-2
    body = next(each for each in result.model.graph.node if each.name == "loop").attribute[0].g
    assert not body.input[2].HasField("type") and "m" not in {info.name for info in body.value_info}


def test_a_wrong_guess_of_onnx_is_in_no_file() -> None:
    """Of STFT without `onesided` onnx says 400 bins; it gives 201. ONNX Runtime believes what a file says."""
    nodes = [
        node("STFT", ["x", "step", "window"], ["s"], name="stft"), node("ReduceSum", ["s", "axes"], ["p"], keepdims=0),
        node("Transpose", ["p"], ["t"], perm=[0, 2, 1]), node("MatMul", ["w", "t"], ["out"], name="mm"),
    ]  # fmt: skip
    inits = [const("step", 100, np.int64), const("window", np.hanning(400)), const("axes", [-1], np.int64), weight("w", 8, 201)]
    given = undeclared(nodes, [value("out", "a", "b", "c")], inits, size=(1, 1200, 1))
    assert said(onnx.shape_inference.infer_shapes(given.model))["s"] == (F32, [1, 9, 400, 2])
    result = rewrite_onnx(given.model, verify=False)
    assert not {"s", "p", "t", "t_fp16"} & set(said(result.model))
    want, got = run(given.model, given.feed)[0], run(result.model, given.feed)[0]
    assert got.shape == (1, 8, 9)
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-3 * np.abs(want).max())


def test_an_optional_gets_no_shape_without_a_type(caplog: pytest.LogCaptureFixture) -> None:
    """ONNX Runtime says a shape of it, which no file can hold without a type: onnx_ir warned that it left it out."""
    given = gemm_chain(node("Optional", ["h"], ["o"]), node("OptionalGetElement", ["o"], ["mid"]))
    del given.model.graph.value_info[:]
    assert rewrite_onnx(given.model, calibration=given.feed).report.strict_error < 2e-3 and not caplog.records


def branching() -> Net:
    """Bodies whose inner values no one declared."""
    branches = {}
    for name, act in (("then", "Tanh"), ("else", "Relu")):
        inner = [node("Gemm", ["h", f"w_{name}"], [f"g_{name}"], name=f"gemm_{name}"), node(act, [f"g_{name}"], [f"o_{name}"])]
        branches[f"{name}_branch"] = graph(inner, name, [], [value(f"o_{name}", 4, 16)], [])
    nodes = [
        node("Gemm", ["x", "w0"], ["h"]), node("ReduceSum", ["h"], ["total"], keepdims=0), node("Greater", ["total", "zero"], ["positive"]),
        node("If", ["positive"], ["chosen"], **branches), node("Gemm", ["chosen", "w1"], ["out"]),
    ]  # fmt: skip
    weights = [weight(name, 16, 16) for name in ("w0", "w1", "w_then", "w_else")]
    return undeclared(nodes, [value("out", 4, 16)], [*weights, const("zero", 0.0)])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("make", [chain, branching])
def test_the_strict_interpreter_works_out_types_that_a_model_does_not_declare(make, dtype: str) -> None:
    """bf16 has no kernels in ONNX Runtime on a CPU: a low value that was taken for fp32 would not run."""
    given = make()
    result = rewrite_onnx(given.model, dtype=dtype, calibration=given.feed)
    before = onnx_ir.to_proto(result.ir_model).SerializeToString()
    (got,) = strict_outputs(result.ir_model, [given.feed])
    assert relative_error([run(given.model, given.feed)], [got]) == pytest.approx(result.report.strict_error)
    assert result.report.strict_error > 1e-5, "nothing was rounded"
    assert onnx_ir.to_proto(result.ir_model).SerializeToString() == before
