"""Opsets: named where none is, raised where too old, and what raising changes is found out."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper
from onnx_help import F32, colours, const, gemm_chain, graph, net, node, noise, parsed, run, true_error, value, weight

from amprewrite import CaptureError, rewrite_onnx
from amprewrite.graphs.onnx.ops import OLDEST, changed_ops
from amprewrite.graphs.onnx.read import opsets
from amprewrite.graphs.onnx.run.compare import strict_outputs


def old(*nodes: onnx.NodeProto, outs=None, inits=(), opset: int = 6, shape: tuple[int, ...] = (4, 16)) -> onnx.ModelProto:
    ids = [helper.make_opsetid("", opset)]
    made = graph(list(nodes), "old", [value("x", *shape)], outs or [value("out", *shape)], list(inits))
    return helper.make_model(made, opset_imports=ids, ir_version=4)


def test_an_old_model_is_raised_and_says_so():
    """Gemm and Add of opset 6 broadcast by attribute, Add along an axis."""
    model = old(
        node("Gemm", ["x", "w", "b"], ["h"], broadcast=1),
        node("Add", ["h", "c"], ["out"], broadcast=1, axis=0),
        inits=[weight("w", 16, 16), weight("b", 16), weight("c", 4)],
    )
    feed = {"x": noise(4, 16)}
    result = rewrite_onnx(model, calibration=feed)
    assert result.report.notes[0].startswith(f"opset raised from 6 to {OLDEST}")
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    wanted = feed["x"] @ held["w"] + held["b"] + held["c"][:, None]
    np.testing.assert_allclose(run(result.model, feed)[0], wanted, rtol=0, atol=5e-3)
    made = [each.op_type for each in result.model.graph.node]
    assert sorted(made) == ["Add", "Cast", "Cast", "Gemm"], "the shape of c is folded into it"


@pytest.mark.parametrize("computed", [False, True])
def test_a_slope_per_channel_stays_one_per_channel(computed: bool) -> None:
    """The converter leaves its shape as it is, which opset 7 broadcasts from the right: here over the last dimension, as large."""
    nodes = [node("PRelu", ["x", "s"], ["out"])]
    if computed:
        nodes = [node("Identity", ["held"], ["s"]), *nodes]
    model = old(*nodes, inits=[weight("held" if computed else "s", 3)], shape=(2, 3, 3))
    feed = {"x": noise(2, 3, 3)}
    slope = onnx.numpy_helper.to_array(model.graph.initializer[0])
    wanted = np.where(feed["x"] > 0, feed["x"], feed["x"] * slope[:, None])
    np.testing.assert_allclose(run(rewrite_onnx(model, calibration=feed).model, feed)[0], wanted, rtol=0, atol=2e-3)


def test_a_slope_for_an_unknown_rank_is_refused() -> None:
    model = old(node("Strange", ["x"], ["h"], domain="acme"), node("PRelu", ["h", "s"], ["out"]), inits=[weight("s", 3)], shape=(2, 3, 3))
    model.opset_import.append(helper.make_opsetid("acme", 1))
    with pytest.raises(CaptureError, match="s cannot be shaped for PRelu, whose input has no known rank"):
        rewrite_onnx(model)


@pytest.mark.parametrize("beside", [[], [node("LeakyRelu", ["x"], ["large"], alpha=1e4)]], ids=["alone", "beside a large output"])
def test_a_converter_that_changes_numbers_is_found_out(beside: list[onnx.NodeProto], monkeypatch: pytest.MonkeyPatch) -> None:
    convert = onnx.version_converter.convert_version

    def wrong(model: onnx.ModelProto, target: int) -> onnx.ModelProto:
        made = convert(model, target)
        made.graph.node[0].op_type = "Sin"
        return made

    monkeypatch.setattr(opsets.onnx.version_converter, "convert_version", wrong)
    with pytest.raises(CaptureError, match=r"converter changes what the model gives \(by .*\) when it raises its opset to 7"):
        rewrite_onnx(old(node("Relu", ["x"], ["out"]), *beside, outs=[value("out", 4, 16), *(value("large", 4, 16) for _ in beside)]))


@pytest.mark.parametrize(("axis", "shape"), [(0, (2, 3)), (1, (2, 3)), (0, (1, 3))])
def test_a_converter_that_changes_shapes_is_found_out(monkeypatch: pytest.MonkeyPatch, axis: int, shape: tuple[int, ...]) -> None:
    convert = onnx.version_converter.convert_version

    def wrong(model: onnx.ModelProto, target: int) -> onnx.ModelProto:
        made = convert(model, target)
        made.graph.node[0].CopyFrom(node("Concat", ["x", "x"], ["out"], axis=axis))
        del made.graph.output[0].type.tensor_type.shape.dim[:]
        made.graph.output[0].type.tensor_type.ClearField("shape")
        return made

    monkeypatch.setattr(opsets.onnx.version_converter, "convert_version", wrong)
    with pytest.raises(CaptureError, match=r"converter changes what the model gives \(by inf\)"):
        rewrite_onnx(old(node("Relu", ["x"], ["out"]), shape=shape))


def test_what_the_converter_cannot_raise_says_why() -> None:
    model = old(node("Cast", ["x"], ["out"], to="FLOAT"), opset=1)
    with pytest.raises(CaptureError, match="the model is of opset 1, older than 7, and "):
        rewrite_onnx(model)


def test_a_scan_with_a_batch_is_not_raised() -> None:
    """A Scan of opset 8 has a batch dimension that later ones do not have; the converter only changes the number."""
    body = graph(
        [node("MatMul", ["s", "w"], ["m"]), node("Add", ["m", "e"], ["t"]), node("Identity", ["t"], ["y"])], "body",
        [value("s", 4, 4), value("e", 4, 4)], [value("t", 4, 4), value("y", 4, 4)], [weight("w", 4, 4)],
    )  # fmt: skip
    nodes = [node("Scan", ["", "s0", "x"], ["last", "ys"], body=body, num_scan_inputs=1)]
    shapes = {"s0": (1, 4, 4), "x": (1, 3, 4, 4)}
    feed = {name: noise(*shape) for name, shape in shapes.items()}
    given = net(nodes, [value(n, *s) for n, s in shapes.items()], [value("last", 1, 4, 4), value("ys", 1, 3, 4, 4)], [], feed, opset=8)
    result = rewrite_onnx(given.model, dtype="bf16", calibration=feed)
    assert any("a Scan of opset 8 has a batch" in note for note in result.report.notes)
    assert result.model.opset_import[0].version == 8
    assert result.report.strict_error is not None and result.report.strict_error < 1e-2


def test_a_model_of_other_domains_alone_gets_an_opset_for_casts() -> None:
    nodes = [node("Binarizer", ["x"], ["out"], domain="ai.onnx.ml", threshold=0.5)]
    made = graph(nodes, "ml", [value("x", 4, 16)], [value("out", 4, 16)])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("ai.onnx.ml", 1)], ir_version=3)
    result = rewrite_onnx(model)
    assert {each.domain: each.version for each in result.model.opset_import} == {"ai.onnx.ml": 1, "": opsets.CASTS}
    assert result.report.strict_error == 0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_attention_keeps_keys_and_values_in_one_format(dtype: str) -> None:
    """Its values have a type variable of their own, and so has the result that holds them."""
    shapes = {"q": (2, 3, 4, 8), "k": (2, 3, 6, 8), "v": (2, 3, 6, 8), "pk": (2, 3, 5, 8), "pv": (2, 3, 5, 8)}
    feed = {name: noise(*shape) for name, shape in shapes.items()}
    outs = [value("out", 2, 3, 4, 8), value("nk", 2, 3, 11, 8), value("nv", 2, 3, 11, 8)]
    nodes = [node("Attention", ["q", "k", "v", "", "pk", "pv"], ["out", "nk", "nv"], name="a")]
    given = net(nodes, [value(n, *s) for n, s in shapes.items()], outs, [], feed, opset=23)
    result = rewrite_onnx(given.model, dtype=dtype, calibration=feed, overrides={"node:a": "low"})
    assert colours(result.model) == {"a": "low"}
    assert result.report.strict_error is not None and result.report.strict_error < 1e-2


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_running_averages_of_a_batch_norm_stay_fp32(dtype: str) -> None:
    norm = node("BatchNormalization", ["h", "s", "b", "m", "v"], ["out", "nm", "nv"], training_mode=1, name="bn")
    nodes = [node("MatMul", ["x", "w"], ["h"]), norm]
    held = [weight("w", 16, 16), weight("s", 16), weight("b", 16)]
    ins = [value("x", 64, 16), value("m", 16), value("v", 16)]
    feed = {"x": noise(64, 16), "m": noise(16), "v": np.abs(noise(16))}
    given = net(nodes, ins, [value("out", 64, 16), value("nm", 16), value("nv", 16)], held, feed, opset=15)
    result = rewrite_onnx(given.model, dtype=dtype, calibration=feed, overrides={"node:bn": "low"})
    types = {info.name: info.type.tensor_type.elem_type for info in (*result.model.graph.value_info, *result.model.graph.output)}
    assert types["nm"] == types["nv"] == F32
    read = next(each for each in result.model.graph.node if each.op_type == "BatchNormalization").input
    assert list(read)[3:] == ["m", "v"]


def test_raising_an_opset_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """onnxscript warned of its fallback, onnx's converter, whose result is compared with the source."""
    given = gemm_chain(node("TopK", ["h", "k"], ["mid", "at"]), inits=[const("k", [16], np.int64)], opset=13)
    notes = rewrite_onnx(given.model, dtype="bf16", calibration=given.feed).report.notes
    assert notes[0].startswith("opset raised from 13 to ") and not caplog.records


def test_newer_opsets_are_left_alone() -> None:
    result = rewrite_onnx(gemm_chain(node("Add", ["h", "one"], ["mid"]), inits=[const("one", 1.0)]).model)
    assert result.model.opset_import[0].version == 18
    assert not any("raised" in note for note in result.report.notes)


def test_no_opset_is_chosen_at_which_the_runtime_lacks_kernels() -> None:
    """Conv takes bf16 from opset 22 on, at which ONNX Runtime's CPU provider has no RoiAlign: the file stays as it can be run."""
    nodes = [
        node("Conv", ["x", "k"], ["h"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("RoiAlign", ["h", "boxes", "which"], ["crops"], output_height=2, output_width=2),
        node("Flatten", ["crops"], ["rows"]),
        node("MatMul", ["rows", "w"], ["out"], name="head"),
    ]
    which = const("which", [0, 0], np.int64)
    inits = [weight("k", 4, 3, 3, 3), weight("w", 16, 8), which]
    given = net(nodes, [value("x", 1, 3, 8, 8), value("boxes", 2, 4)], [value("out", 2, 8)], inits, {}, opset=16)
    feed = {"x": noise(1, 3, 8, 8), "boxes": np.array([[0, 0, 4, 4], [2, 2, 7, 7]], np.float32)}
    result = rewrite_onnx(given.model, dtype="bf16", calibration=feed)
    assert result.model.opset_import[0].version == 16
    assert any("opset 16 could not be raised to 22 for bf16: ONNX Runtime does not load it then" in note for note in result.report.notes)
    assert colours(result.model)["head"] == "low"
    assert result.report.strict_error < 3e-2


@pytest.mark.parametrize(
    ("op_type", "opset", "raised", "same"),
    [
        pytest.param("Relu", 10, 22, True, id="more types"),
        pytest.param("Gemm", 10, 22, True, id="an operand that may be left out"),
        pytest.param("Reshape", 10, 22, True, id="an attribute that changes nothing by itself"),
        pytest.param("Cast", 13, 22, True, id="an attribute for types that came with it"),
        pytest.param("Constant", 10, 22, True, id="an attribute that may be left out now"),
        pytest.param("Add", 6, 7, True, id="broadcasting by attribute"),
        pytest.param("Hardmax", 10, 22, False, id="another default"),
        pytest.param("ReduceMean", 13, 18, False, id="an attribute that became an operand"),
        pytest.param("RoiAlign", 10, 16, False, id="an attribute whose default is not what was done before"),
        pytest.param("Upsample", 9, 22, False, id="an op that went"),
        pytest.param("GroupNormalization", 18, 22, False, id="an op that was given up and came again"),
        pytest.param("BatchNormalization", 6, 7, False, id="an attribute that went"),
    ],
)
def test_schemas_say_whether_an_op_means_the_same_at_another_opset(op_type: str, opset: int, raised: int, same: bool) -> None:
    made = graph([node(op_type, ["x"], ["out"])], "g", [value("x", 1)], [value("out", 1)])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)])
    assert changed_ops(ir.from_proto(model), raised) == ([] if same else [op_type])


OPEN = "c = Conv<pads=[1,1,1,1]>(x, K)\n b = Reshape(c, s)\n y = Resize<mode=\"linear\">(b, sizes)\n z = Hardmax<axis=1>(c)"


def test_what_changed_and_cannot_be_compared_is_not_raised() -> None:
    """The shape has no sample: made-up ones do not fit. The converter forgets the mode of the Resize and the axis of the Hardmax."""
    inits = {"K": noise(3, 3, 3, 3), "sizes": np.array([1, 1, 1.5, 2.5], np.float32)}
    ins, outs = "float[1,3,8,8] x, int64[4] s", "float[a,b,c,d] y, float[1,3,8,8] z"
    given = parsed(OPEN, ins, outs, inits, {"x": noise(1, 3, 8, 8), "s": np.array([1, 3, 16, 4])}, opset=10, ir_version=5)
    with pytest.raises(CaptureError, match=r"must be raised to 22, up to which Hardmax, Resize changed; .* pass calibration="):
        rewrite_onnx(given.model, dtype="bf16")
    with pytest.raises(CaptureError, match="converter changes what the model gives"):
        rewrite_onnx(given.model, dtype="bf16", calibration=given.feed)
    assert not any("raised" in note for note in rewrite_onnx(given.model, dtype="fp16").report.notes)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize(("op", "opset", "scale"), [("Resize", 10, 1.5), ("Upsample", 9, 2.0), ("Resize", 10, 1.3), ("Resize", 10, 0.6)])
def test_a_resize_reads_the_same_elements_at_a_newer_opset(op: str, opset: int, scale: float, mode: str) -> None:
    """The converter leaves it the default of opset 11, half_pixel."""
    inits = {"K": noise(3, 3, 3, 3), "scales": np.array([1, 1, scale, scale], np.float32)}
    body = f'c = Conv<pads=[1,1,1,1]>(x, K)\n y = {op}<mode="{mode}">(c, scales)'
    given = parsed(body, "float[1,3,8,8] x", "float[a,b,c,d] y", inits, {"x": noise(1, 3, 8, 8)}, opset=opset, ir_version=5)
    result = rewrite_onnx(given.model, dtype="bf16", calibration=given.feed)
    assert result.model.opset_import[0].version == 22
    assert true_error(given, result) < 1e-2


@pytest.mark.parametrize("inside", ["Softmax<axis=1>(c)", "Relu(c)"])
def test_what_changed_in_a_branch_that_no_sample_takes_is_not_raised(inside: str) -> None:
    branches = f"then_branch=t () => (float t) {{t = Identity(c)}}, else_branch=o () => (float o) {{o = {inside}}}"
    body = f"c = Conv<pads=[1,1,1,1]>(x, K)\n y = If(b) <{branches}>"
    feed = {"x": noise(1, 3, 8, 8), "b": np.array(True)}
    given = parsed(body, "float[1,3,8,8] x, bool b", "float[1,3,8,8] y", {"K": noise(3, 3, 3, 3)}, feed, opset=11, ir_version=6)
    result = rewrite_onnx(given.model, dtype="bf16", calibration=feed)
    stays = inside.startswith("Softmax")
    assert result.model.opset_import[0].version == (11 if stays else 22)
    assert any("Softmax changed in between, in a body" in note for note in result.report.notes) == stays


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_what_changed_in_a_branch_of_a_model_that_is_too_old_is_refused(dtype: str) -> None:
    inside = graph([node("Upsample", ["x"], ["o"], height_scale=1.0, width_scale=1.0)], "o", [], [value("o", 1, 3, 4, 4)])
    other = graph([node("Relu", ["x"], ["t"])], "t", [], [value("t", 1, 3, 4, 4)])
    model = old(node("If", ["b"], ["out"], then_branch=other, else_branch=inside), shape=(1, 3, 4, 4))
    model.graph.input.append(helper.make_tensor_value_info("b", onnx.TensorProto.BOOL, [1]))
    with pytest.raises(CaptureError, match="older than 7, and Upsample changed, in a body of If"):
        rewrite_onnx(model, dtype=dtype)


def test_what_did_not_change_is_raised_without_a_sample() -> None:
    body = "c = Conv<pads=[1,1,1,1]>(x, K)\n r = Relu(c)\n y = Reshape(r, s)"
    given = parsed(body, "float[1,3,8,8] x, int64[2] s", "float[a,b] y", {"K": noise(3, 3, 3, 3)}, {}, opset=11, ir_version=6)
    result = rewrite_onnx(given.model, dtype="bf16")
    assert result.model.opset_import[0].version == 22
    assert any("no sample run" in note for note in result.report.notes)


def test_what_changed_stays_as_it_is_where_the_runtime_does_not_load_it() -> None:
    inits = {"K": noise(3, 3, 3, 3), "sizes": np.array([1, 1, 1.5, 2.5], np.float32)}
    body = "c = Conv<pads=[1,1,1,1]>(x, K)\n b = acme.Own(c)\n y = Resize<mode=\"linear\">(b, sizes)"
    given = parsed(body, "float[1,3,8,8] x", "float[1,3,12,20] y", inits, {}, opset=10, ir_version=5)
    given.model.opset_import.append(helper.make_opsetid("acme", 1))
    result = rewrite_onnx(given.model, dtype="bf16")
    assert {each.domain: each.version for each in result.model.opset_import}[""] == 10
    assert any("could not be raised to 22 for bf16: Resize changed in between" in note for note in result.report.notes)


@pytest.mark.parametrize("mode", ["", "bilinear"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_an_old_file_that_the_runtime_lacks_kernels_for_is_evaluated_or_refused(mode: str, dtype: str) -> None:
    """onnx's evaluator has BatchNormalization of opset 6, and no Upsample of it. The converter keeps a mode that opset 7 does not have."""
    norm = node("BatchNormalization", ["x", "s", "b", "m", "v"], ["h"], is_test=1)
    last = node("Relu", ["h"], ["out"])
    if mode == "bilinear":
        last = node("Upsample", ["h"], ["out"], mode=mode, height_scale=2.0, width_scale=2.0)
    inits = [const(name, np.abs(noise(3)) + 0.5) for name in "sbmv"]
    size = 8 if mode == "bilinear" else 4
    model = old(norm, last, outs=[value("out", 2, 3, size, size)], inits=inits, shape=(2, 3, 4, 4))
    if mode == "bilinear":
        with pytest.raises(CaptureError, match="must be raised to 7, up to which BatchNormalization, Upsample changed"):
            rewrite_onnx(model, dtype=dtype)
        return
    feed = {"x": noise(2, 3, 4, 4)}
    held = [onnx.numpy_helper.to_array(tensor)[:, None, None] for tensor in model.graph.initializer]
    wanted = np.maximum(0, (feed["x"] - held[2]) / np.sqrt(held[3] + 1e-5) * held[0] + held[1])
    result = rewrite_onnx(model, dtype=dtype)
    found = strict_outputs(result.ir_model, [feed])[0][0]
    np.testing.assert_allclose(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("opset", [9, 11])
def test_a_mask_is_bounded_as_its_opset_bounds(opset: int) -> None:
    """Up to opset 10 the bounds of a Clip are attributes."""
    nodes = [
        node("MatMul", ["x", "w"], ["s"], name="scores"),
        node("Mul", ["m", "far"], ["b"], name="mask"),
        node("Add", ["s", "b"], ["sb"], name="add"),
        node("Softmax", ["sb"], ["p"], axis=1, name="softmax"),
        node("MatMul", ["p", "v"], ["out"], name="last"),
    ]
    feed = {"x": noise(8, 16), "m": (np.arange(8) > 5).astype(np.float32)[None]}
    inits = [weight("w", 16, 8), const("far", -1e9), weight("v", 8, 16)]
    given = net(nodes, [value("x", 8, 16), value("m", 1, 8)], [value("out", 8, 16)], inits, feed, opset)
    given.model.ir_version = 8
    result = rewrite_onnx(given.model, dtype="fp16", calibration=feed, overrides={"node:softmax": "low", "node:mask": "high"})
    assert "Clip" in [each.op_type for each in result.model.graph.node]
    assert true_error(given, result) < 2e-3


def test_a_rotary_embedding_runs_low() -> None:
    """It is an op of its own from opset 23 on."""
    angles = np.outer(np.arange(1024), 10000.0 ** -np.linspace(0, 1, 8))
    nodes = [
        node("MatMul", ["x", "w0"], ["h"], name="first"),
        node("RotaryEmbedding", ["h", "cos", "sin", "at"], ["r"], name="rotate", num_heads=1),
        node("MatMul", ["r", "w1"], ["out"], name="last"),
    ]
    inits = [weight("w0", 16, 16), weight("w1", 16, 16), const("cos", np.cos(angles)), const("sin", np.sin(angles))]
    inits += [const("at", np.arange(1024)[None], np.int64)]
    given = net(nodes, [value("x", 1, 1024, 16)], [value("out", 1, 1024, 16)], inits, {"x": noise(1, 1024, 16)}, opset=23)
    result = rewrite_onnx(given.model, dtype="fp16", calibration=given.feed)
    assert colours(result.model)["rotate"] == "low" and true_error(given, result) < 1e-3
