"""What onnx_ir does not read, or drops: it is made into what it reads, kept, told in a note, or refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_help import F16, F32, I64, Net, colours, const, differs_before_ort_1_27, gemm_chain, graph, net, node, noise, run, value, weight

from amprewrite import CaptureError
from amprewrite.api.onnx.convert import rewrite_onnx
from amprewrite.graphs.onnx.read import load

AT = np.array([[0, 3], [2, 1], [15, 15]])


def sparse(name: str, flat: bool = False, size: int = 16) -> onnx.SparseTensorProto:
    places = AT[:, 0] * size + AT[:, 1] if flat else AT
    values = numpy_helper.from_array(np.array([1.5, -2, 0.5], np.float32), name)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(places, f"{name}_at"), [size, size])


def dense() -> np.ndarray:
    made = np.zeros((16, 16), np.float32)
    made[tuple(AT.T)] = 1.5, -2, 0.5
    return made


def wanted(given: Net) -> np.ndarray:
    hidden = given.feed["x"] @ numpy_helper.to_array(weight("w0", 16, 16))
    return (hidden @ dense()) @ numpy_helper.to_array(weight("w1", 16, 16))


# -- sparse constants ----------------------------------------------------------------------------
@pytest.mark.parametrize("flat", [False, True], ids=["pairs", "flat"])
def test_a_sparse_initialiser_becomes_a_dense_one(flat):
    given = gemm_chain(node("MatMul", ["h", "s"], ["mid"], name="mm"))
    held = sparse("s", flat)
    held.values.doc_string = "few"
    given.model.graph.sparse_initializer.append(held)
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert "1 sparse constants are dense now" in result.report.notes
    assert colours(result.model)["mm"] == "low"
    assert [(t.data_type, t.doc_string) for t in result.model.graph.initializer if t.name == "s"] == [(F16, "few")]
    np.testing.assert_allclose(run(result.model, given.feed)[0], wanted(given), rtol=0, atol=2e-2)


@differs_before_ort_1_27("it does not find constants of bodies that its own optimizer has folded")
@pytest.mark.parametrize("inside", [False, True], ids=["top", "body"])
def test_a_sparse_constant_becomes_a_dense_one(inside):
    nodes = [node("Constant", [], ["s"], name="few", sparse_value=sparse("")), node("MatMul", ["h", "s"], ["m"], name="mm")]
    body = graph(nodes, "body", [], [value("m", 4, 16)])
    between = [node("If", ["yes"], ["mid"], then_branch=body, else_branch=body)] if inside else [*nodes, node("Identity", ["m"], ["mid"])]
    given = gemm_chain(*between, inits=[const("yes", True, np.bool_)])
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert f"{1 + inside} sparse constants are dense now" in result.report.notes
    np.testing.assert_allclose(run(result.model, given.feed)[0], wanted(given), rtol=0, atol=2e-2)


def test_broken_sparse_constants_are_refused_by_name(monkeypatch):
    def refusal(held: onnx.SparseTensorProto) -> str:
        given = gemm_chain(node("MatMul", ["h", "s"], ["mid"]))
        given.model.graph.sparse_initializer.append(held)
        with pytest.raises(CaptureError) as caught:
            rewrite_onnx(given.model)
        return str(caught.value)

    outside, fewer, elsewhere = sparse("s", size=16), sparse("s"), sparse("s")
    outside.dims[0] = 4
    fewer.values.CopyFrom(const("s", [1.0]))
    elsewhere.values.data_location = TensorProto.EXTERNAL
    for held in (outside, fewer):
        assert re.search("the sparse constant s does not hold what its shape says: .*; export the model again", refusal(held))
    assert "the sparse constant s lies in a file of its own; save the model with its sparse constants inside" in refusal(elsewhere)
    monkeypatch.setattr(load, "memory", lambda: 1000)
    assert "takes 1.02e+03 bytes when it is dense, and 500 are free; use a machine with more memory" in refusal(sparse("s"))


def test_a_sparse_attribute_of_another_op_is_refused_by_name():
    own = node("Own", ["h"], ["mid"], name="own", domain="acme", table=sparse("t"))
    nodes = [node("MatMul", ["x", "w"], ["h"]), own]
    given = net(nodes, [value("x", 4, 16)], [value("mid", 4, 16)], [weight("w", 16, 16)], {}, domains=["acme"])
    with pytest.raises(CaptureError, match="Own own has sparse tensors as table, which cannot be rewritten; export it with dense ones"):
        rewrite_onnx(given.model)


# -- maps ------------------------------------------------------------------------------------------
def classifier(outs: list[onnx.ValueInfoProto]) -> Net:
    zipped = node("ZipMap", ["out"], ["z"], name="zip", domain="ai.onnx.ml", classlabels_int64s=list(range(16)))
    nodes = [node("MatMul", ["x", "w"], ["out"], name="a"), zipped]
    return net(nodes, [value("x", 4, 16)], outs, [weight("w", 16, 16)], {"x": noise(4, 16)}, domains=["ai.onnx.ml"])


def maps(name: str) -> onnx.ValueInfoProto:
    kind = helper.make_map_type_proto(I64, helper.make_tensor_type_proto(F32, []))
    return helper.make_value_info(name, helper.make_sequence_type_proto(kind))


@pytest.mark.parametrize("as_file", [False, True])
def test_a_map_as_output_is_refused_by_name(as_file, tmp_path):
    model = classifier([value("out", 4, 16), maps("z")]).model
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(CaptureError) as caught:
        rewrite_onnx(tmp_path / "m.onnx" if as_file else model)
    said = str(caught.value)
    assert "its output z is a map that ZipMap makes, which cannot be rewritten; export it with tensors instead" in said
    assert said.startswith(str(tmp_path / "m.onnx") if as_file else "the model")


def test_a_map_in_between_is_no_hindrance():
    given = classifier([value("out", 4, 16)])
    given.model.graph.value_info.append(maps("z"))
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert colours(result.model)["a"] == "low" and result.report.strict_error < 2e-3


def test_what_else_is_not_read_is_said():
    kind = helper.make_optional_type_proto(maps("z").type.sequence_type.elem_type)
    given = gemm_chain(node("Relu", ["h"], ["mid"]), node("Optional", [], ["none"], type=kind))
    with pytest.raises(CaptureError, match=r"the model holds what onnx_ir does not read: Map types .*; export it with tensors instead"):
        rewrite_onnx(given.model)


# -- what would be dropped -----------------------------------------------------------------------------
def test_training_information_is_left_out_and_told():
    given = gemm_chain(node("Relu", ["h"], ["mid"]))
    step = graph([node("Identity", ["w0"], ["w0_next"])], "step", [], [value("w0_next", 16, 16)])
    info = given.model.training_info.add(algorithm=step)
    info.update_binding.add(key="w0", value="w0_next")
    onnx.checker.check_model(given.model, full_check=True)
    result = rewrite_onnx(given.model)
    assert [note for note in result.report.notes if note.startswith("training_info was left out: it trains fp32 weights by their names")]
    assert not any("training_info" in note for note in rewrite_onnx(result.ir_model).report.notes)


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
def test_what_weights_say_of_themselves_is_kept(outside: bool, tmp_path: Path):
    """Those stored low, once or twice, and those that stay fp32; wherever their data lies."""
    between = [node("Add", ["h", "c"], ["a"], name="add"), node("Exp", ["a"], ["e"]), node("Mul", ["e", "c"], ["f"]),
               node("MatMul", ["f", "k"], ["mid"])]  # fmt: skip
    given = gemm_chain(*between, inits=[const("c", np.full((16, 16), 0.3)[:4]), weight("k", 16, 16)])
    for tensor in given.model.graph.initializer:
        tensor.doc_string = f"doc of {tensor.name}"
        tensor.metadata_props.add(key="from", value=tensor.name)
    path, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    onnx.save(given.model, path, save_as_external_data=outside, size_threshold=0)
    result = rewrite_onnx(path, out, external_data=outside, overrides={"add": "allow", "mul": "deny"})
    written = onnx.load(out, load_external_data=False).graph.initializer
    assert any(tensor.data_location == TensorProto.EXTERNAL for tensor in written) == outside
    for tensors in (written, result.model.graph.initializer):
        assert {tensor.name: tensor.data_type for tensor in tensors} == {"w0": F16, "w1": F16, "k": F16, "c": F32, "c_fp16": F16}
        for tensor in tensors:
            own = tensor.name.removesuffix("_fp16")
            assert tensor.doc_string == f"doc of {own}"
            assert {prop.key: prop.value for prop in tensor.metadata_props} == {"from": own}
