"""Sources that onnx.checker refuses: what ONNX Runtime runs all the same is taken, and a note says what was said against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper
from onnx_help import F32, Net, colours, const, graph, node, noise, run, value, weight

from amprewrite import CaptureError, EmitError, rewrite_onnx
from amprewrite.api.onnx import job
from amprewrite.graphs.onnx.check import invalid, same_complaint
from amprewrite.graphs.onnx.run import samples, trial
from amprewrite.graphs.onnx.write import apply_plan


def given(nodes: list[onnx.NodeProto], out: onnx.ValueInfoProto, inits=(), opset: int = 17) -> Net:
    made = graph(nodes, "net", [value("x", 4, 16)], [out], [weight("w", 16, 16), *inits])
    return Net(helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), {"x": noise(4, 16)})


def optimised() -> Net:
    """ONNX Runtime's optimiser writes such a norm as an op of onnx's own domain, which has none of that name."""
    norm = node("SimplifiedLayerNormalization", ["h", "g"], ["n"], name="norm", axis=-1, epsilon=1e-5)
    nodes = [node("MatMul", ["x", "w"], ["h"], name="mm"), norm, node("Relu", ["n"], ["out"])]
    return given(nodes, value("out", 4, 16), [const("g", np.ones(16))])


def without_shape() -> Net:
    nodes = [node("MatMul", ["x", "w"], ["h"], name="mm"), node("Relu", ["h"], ["out"])]
    return given(nodes, helper.make_tensor_value_info("out", F32, None))


def wrongly_inferred() -> Net:
    """onnx infers 400 bins where STFT gives 201."""
    nodes = [
        node("Reshape", ["x", "whole"], ["signal"]), node("STFT", ["signal", "step", "window"], ["s"]),
        node("ReduceSum", ["s", "axes"], ["p"], keepdims=0), node("MatMul", ["p", "bins"], ["out"], name="mm"),
    ]  # fmt: skip
    inits = [const("whole", [1, 64, 1], np.int64), const("step", 8, np.int64), const("window", np.hanning(32)),
             const("axes", [-1], np.int64), weight("bins", 17, 8)]  # fmt: skip
    return given(nodes, value("out", "a", "b", "c"), inits)


SAID = {"No Op registered for SimplifiedLayer": optimised, "Field 'shape' of 'type'": without_shape, "Inference error": wrongly_inferred}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("said", SAID)
def test_what_onnx_runtime_runs_is_taken_with_a_note(said: str, dtype: str, tmp_path: Path) -> None:
    source = SAID[said]()
    onnx.save(source.model, tmp_path / "m.onnx")
    result = rewrite_onnx(tmp_path / "m.onnx", tmp_path / "out.onnx", dtype=dtype)
    (note,) = [note for note in result.report.notes if "onnx.checker" in note and "ONNX Runtime runs" in note]
    assert said in note and str(tmp_path / "m.onnx") in note
    assert colours(result.model)["mm"] == "low" and result.report.strict_error < 2e-2
    assert not result.report.valid and "full check passed" not in str(result.report)
    assert same_complaint(invalid(tmp_path / "out.onnx"), invalid(source.model))
    if dtype == "fp16":
        want, got = run(source.model, source.feed)[0], run(onnx.load(tmp_path / "out.onnx"), source.feed)[0]
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-3 * np.abs(want).max())


def test_the_callers_samples_are_all_taken() -> None:
    feeds = [{"x": noise(4, 16) * scale} for scale in (1, 3)]
    assert rewrite_onnx(without_shape().model, calibration=iter(feeds)).report.samples == 2
    with pytest.raises(CaptureError, match=r"does not run it either: .*; export it again$"):
        rewrite_onnx(unknown().model, calibration=iter(feeds))


def test_inputs_of_unknown_rank_are_asked_for() -> None:
    """The made-up input is a number, on which this model does not run."""
    source = without_shape()
    source.model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", F32, None))
    with pytest.raises(CaptureError, match="export it again, pass calibration= with inputs that fit, or pass verify=False"):
        rewrite_onnx(source.model)
    assert rewrite_onnx(source.model, calibration=source.feed).report.strict_error < 2e-3


def unknown() -> Net:
    return given([node("MatMul", ["x", "w"], ["h"], name="mm"), node("NoSuchOp", ["h"], ["out"])], value("out", 4, 16))


def test_what_onnx_runtime_does_not_load_is_refused() -> None:
    said = r"onnx\.checker says No Op registered for NoSuchOp .*, and ONNX Runtime does not run it either: .*; export it again, or pass "
    with pytest.raises(CaptureError, match=said + "verify=False"):
        rewrite_onnx(unknown().model)
    notes = rewrite_onnx(unknown().model, verify=False).report.notes
    assert any("no sample run" in note for note in notes)


def test_something_else_said_against_the_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = apply_plan._tidy

    def spoil(model: ir.Model) -> None:
        edit(model)
        model.graph.node("mm").op_type = "NoSuchOp"

    monkeypatch.setattr(apply_plan, "_tidy", spoil)
    with pytest.raises(CaptureError, match=r"SimplifiedLayer.*, and the rewritten model fails onnx\.checker: .*NoSuchOp"):
        rewrite_onnx(optimised().model)


DEATHS = [("import os; os.abort()", r"it ends the process \(-6\)"), ("while True: pass", "it takes longer than")]


@pytest.mark.parametrize(("code", "said"), DEATHS, ids=["aborts", "hangs"])
def test_a_model_of_which_onnx_runtime_dies_is_refused(code: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of it is run in the process of the caller."""
    (tmp_path / "program.py").write_text(code)
    monkeypatch.setattr(trial, "__file__", str(tmp_path / "program.py"))
    monkeypatch.setattr(trial, "START", 0.5)
    monkeypatch.setattr(samples, "_Observer", None)
    with pytest.raises(CaptureError, match=f"ONNX Runtime does not run it either: {said}"):
        rewrite_onnx(without_shape().model, time_limit=0.1)


def test_a_complaint_is_the_same_whatever_its_numbers() -> None:
    assert same_complaint("(op_type:Relu): Inferred type 1 of h", "(op_type:Relu): Inferred type 10 of h")
    assert not same_complaint("no op Relu", "no op Gelu")
    assert not same_complaint("no op Relu", "")


def fails_optimised(monkeypatch: pytest.MonkeyPatch, also_the_source: bool) -> None:
    """As if ONNX Runtime's optimiser failed, as it does on some quantised models: on the source, too, or on the result alone."""
    plainly = job.session

    def session(model: Any, level: int | None = None) -> Any:
        if level is None and (also_the_source or isinstance(model, onnx.ModelProto)):
            raise RuntimeError("the optimiser gave up")
        return plainly(model, level)

    monkeypatch.setattr(job, "session", session)


def sound() -> Net:
    return given([node("MatMul", ["x", "w"], ["h"], name="mm"), node("Relu", ["h"], ["out"])], value("out", 4, 16))


@pytest.mark.parametrize("kind", ["path", "proto", "ir"])
def test_an_optimiser_that_fails_on_the_source_is_not_our_failure(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net = sound()
    onnx.save(net.model, tmp_path / "m.onnx")
    source = {"path": tmp_path / "m.onnx", "proto": net.model, "ir": ir.from_proto(net.model)}[kind]
    fails_optimised(monkeypatch, also_the_source=True)
    report = rewrite_onnx(source).report
    (note,) = [note for note in report.notes if "optimiser fails on" in note]
    assert "the optimiser gave up" in note and note.endswith("graph_optimization_level = ORT_DISABLE_ALL")
    assert report.valid and report.runtime_error < 1e-2


def test_an_optimiser_that_fails_on_the_result_alone_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    onnx.save(sound().model, tmp_path / "m.onnx")
    fails_optimised(monkeypatch, also_the_source=False)
    with pytest.raises(EmitError, match="ONNX Runtime refuses the rewritten model: the optimiser gave up; please report"):
        rewrite_onnx(tmp_path / "m.onnx")


def test_transposes_stay_fp32_where_onnx_runtime_crashes_on_them(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "v"], ["a"]),
        node("Transpose", ["a"], ["t"], perm=[1, 0, 2], name="t"),
        node("Shape", ["t"], ["s"]),
        node("MatMul", ["t", "w"], ["m"]),
    ]
    outputs = [value("m", "s", "b", 8), value("s", 3, dtype=onnx.TensorProto.INT64)]
    made = graph(nodes, "net", [value("x", "b", "s", 16)], outputs, [weight("v", 16, 16), weight("w", 16, 8)])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    if not trial.failure(rewrite_onnx(model, verify=False).model.SerializeToString(), [], ["CPUExecutionProvider"], 5.0):
        pytest.skip("this ONNX Runtime loads the file")
    result = rewrite_onnx(model, tmp_path / "out.onnx")
    assert any("Transposes stay fp32" in note for note in result.report.notes)
    assert result.plan.find("t")[0].colour.value == "high" and result.report.runtime_error < 1e-3
    with pytest.raises(EmitError, match="ONNX Runtime crashes"):  # a plan is followed as it is
        rewrite_onnx(model, plan=result.plan.edit({"t": "low"}))


def test_a_file_on_which_onnx_runtime_crashes_is_refused_and_the_process_lives(tmp_path: Path) -> None:
    nodes = [
        node("Softmax", ["x"], ["a"]),
        node("Transpose", ["a"], ["t"], perm=[1, 0, 2], name="t"),
        node("Shape", ["t"], ["s"]),
        node("MatMul", ["t", "w"], ["m"]),
    ]
    outputs = [value("m", "s", "b", 8), value("s", 3, dtype=onnx.TensorProto.INT64)]
    made = graph(nodes, "net", [value("x", "b", "s", 16)], outputs, [weight("w", 16, 8)])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    overrides, kept = {"softmax": "allow", "permute": "allow"}, {"softmax": "allow", "permute": "deny"}
    unverified = rewrite_onnx(model, verify=False, overrides=overrides, keep_io=False)
    if not trial.failure(unverified.model.SerializeToString(), [], ["CPUExecutionProvider"], 5.0):
        pytest.skip("this ONNX Runtime loads the file")
    with pytest.raises(EmitError, match=r"ONNX Runtime crashes .* it ends the process .*overrides={'permute': 'deny'}"):
        rewrite_onnx(model, tmp_path / "out.onnx", overrides=overrides, keep_io=False)
    assert not (tmp_path / "out.onnx").exists()
    rewrite_onnx(model, tmp_path / "out.onnx", overrides=kept, keep_io=False)
