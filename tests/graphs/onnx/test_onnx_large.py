"""Models with external data, and models beyond what one protobuf holds."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_help import F16, colours, gemm_chain, net, node, run, value, weight

from amprewrite import CaptureError, EmitError, PolicyError
from amprewrite.api.onnx.convert import rewrite_onnx
from amprewrite.graphs.onnx.run import onnx_runtime
from amprewrite.graphs.onnx.run.onnx_runtime import session


@pytest.fixture
def given():
    return gemm_chain(node("Relu", ["h"], ["mid"], name="act"))


@pytest.fixture
def outside(given, tmp_path):
    """A model whose weights lie in a file of their own."""
    folder = tmp_path / "source"
    folder.mkdir()
    ir.save(ir.from_proto(given.model), folder / "in.onnx", external_data="in.data", size_threshold_bytes=0)
    return folder / "in.onnx"


def stored(path) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in onnx.load(path).graph.initializer}


def data_of(model: Path) -> Path:
    """The one data file of a model, named by its content."""
    (found,) = model.parent.glob(f"{model.name}.*.data")
    assert hashlib.blake2b(found.read_bytes(), digest_size=8).hexdigest() == found.name.split(".")[-2]
    return found


def test_external_data_is_read_and_written(given, outside, tmp_path):
    result = rewrite_onnx(outside, tmp_path / "out.onnx", external_data=True, calibration=given.feed)
    assert result.report.strict_error < 2e-3
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out.onnx", data_of(tmp_path / "out.onnx").name}
    assert stored(result.path) == {"w0": F16, "w1": F16}
    onnx.checker.check_model(str(result.path), full_check=True)
    inside = rewrite_onnx(outside, tmp_path / "whole.onnx", calibration=given.feed)
    assert run(inside.model, given.feed)[0].tolist() == session(str(result.path)).run(None, given.feed)[0].tolist()


@pytest.mark.parametrize("outside", [True, "auto"])
def test_small_constants_of_any_type_stay_in_the_model(outside, tmp_path, request):
    """A shape, which every exporter writes, ended in an error as soon as the weights went into a file of their own."""
    if outside == "auto":
        request.getfixturevalue("low_limit")
    nodes = [node("Reshape", ["h", "shape"], ["r"]), node("DequantizeLinear", ["q", "scale"], ["s"]), node("Mul", ["r", "s"], ["mid"])]
    held = [numpy_helper.from_array(np.array([4, 16]), "shape"), helper.make_tensor("q", TensorProto.INT4, [16], list(range(-8, 8)))]
    held += [numpy_helper.from_array(np.float32(0.1), "scale")]
    held[0].doc_string = "rows, columns"
    small = gemm_chain(*nodes, inits=held, opset=21)
    result = rewrite_onnx(small.model, tmp_path / "out.onnx", external_data=outside, calibration=small.feed)
    assert result.report.strict_error < 2e-3 and data_of(tmp_path / "out.onnx")
    inside = {each.name: each for each in onnx.load(result.path, load_external_data=False).graph.initializer if not each.external_data}
    assert {"shape", "q", "scale"} == set(inside) and inside["shape"].doc_string == "rows, columns"


@pytest.mark.parametrize("large", [False, True])
def test_a_model_in_memory_reads_its_data_from_any_folder(given, outside, large, tmp_path, monkeypatch, request):
    """onnx_ir reads a file without its data, which was looked for in the current folder."""
    if large:
        request.getfixturevalue("low_limit")
    monkeypatch.chdir(tmp_path)
    read = ir.load(outside)
    result = rewrite_onnx(read, tmp_path / "out.onnx", calibration=given.feed)
    assert 0 < result.report.strict_error < 2e-3
    assert isinstance(read.graph.initializers["w0"].const_value, ir.ExternalTensor), "the caller's model changed"
    outside.with_name("in.data").unlink()
    with pytest.raises(CaptureError, match=r"the model: the data of w0 is missing: there is no .*in\.data; put it beside the model"):
        rewrite_onnx(read)


def test_a_model_in_the_cache_of_the_hub_is_two_links_into_one_folder(given, outside, tmp_path):
    """The cache names files by content, and a snapshot holds links to them. ONNX Runtime reads that, too."""
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for name, blob in (("in.onnx", "1f"), ("in.data", "2e")):
        outside.with_name(name).rename(blobs / blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    result = rewrite_onnx(snapshot / "in.onnx", tmp_path / "out.onnx", calibration=given.feed)
    want, got = run(given.model, given.feed)[0], run(result.model, given.feed)[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-3 * np.abs(want).max())
    (blobs / "2e").rename(tmp_path / "2e")
    (snapshot / "in.data").unlink()
    (snapshot / "in.data").symlink_to("../../2e")
    with pytest.raises(CaptureError, match=r"the data of w0 is refused: in\.data is a link that leads out of the model's folder"):
        rewrite_onnx(snapshot / "in.onnx")


def test_a_function_reads_its_data_beside_the_file(tmp_path):
    held = TensorProto(name="k", data_type=TensorProto.FLOAT, dims=[16, 16], data_location=TensorProto.EXTERNAL)
    held.external_data.add(key="location", value="k.data")
    (tmp_path / "k.data").write_bytes(np.eye(16, dtype=np.float32).tobytes())
    inner = [node("Constant", [], ["k"], value=held), node("MatMul", ["a", "k"], ["b"])]
    function = helper.make_function("own", "Times", ["a"], ["b"], inner, [helper.make_opsetid("", 18)])
    nodes = [node("Times", ["x"], ["h"], domain="own"), node("MatMul", ["h", "w"], ["out"])]
    made = net(nodes, [value("x", 4, 16)], [value("out", 4, 16)], [weight("w", 16, 16)], {}, functions=[function], domains=["own"])
    (tmp_path / "m.onnx").write_bytes(made.model.SerializeToString())
    assert rewrite_onnx(tmp_path / "m.onnx").report.strict_error < 2e-3


def test_a_model_may_replace_itself_and_its_data(given, outside):
    before = outside.with_name("in.data").stat().st_size
    ir.save(ir.from_proto(given.model), outside, external_data="in.onnx.data", size_threshold_bytes=0)
    outside.with_name("in.data").unlink()
    result = rewrite_onnx(outside, outside, external_data=True)
    assert {path.name for path in outside.parent.iterdir()} == {"in.onnx", data_of(outside).name}
    assert data_of(outside).stat().st_size < before
    assert run(result.model, given.feed)[0].shape == (4, 16)


def test_missing_and_cut_off_data_are_named(outside, tmp_path):
    data = outside.with_name("in.data")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(CaptureError, match=r"the data of w0 is cut off: .*in\.data ends before it; copy the file again"):
        rewrite_onnx(outside, tmp_path / "out.onnx")
    data.unlink()
    with pytest.raises(CaptureError, match=r"the data of w0 is missing: there is no .*in\.data; put it beside the model"):
        rewrite_onnx(outside, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_external_data_is_true_false_or_auto(given):
    with pytest.raises(PolicyError, match="external_data= takes True, False or 'auto', not 'yes'"):
        rewrite_onnx(given.model, external_data="yes")


# -- beyond one protobuf: the limit is lowered, so that a small model takes the road of a large one ---------------
@pytest.fixture
def low_limit(monkeypatch):
    monkeypatch.setattr(onnx_runtime, "MOST_BYTES", 1000)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_large_model_is_sampled_checked_run_and_measured(given, outside, tmp_path, low_limit, dtype):
    small = rewrite_onnx(given.model, dtype=dtype, calibration=given.feed)
    out = tmp_path / "out.onnx"
    result = rewrite_onnx(outside, out, dtype=dtype, calibration=given.feed, max_rel_err=0.1)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out.onnx", data_of(tmp_path / "out.onnx").name}
    assert result.report.strict_error == small.report.strict_error
    assert result.report.runtime_error == small.report.runtime_error
    assert result.report.valid
    assert colours(onnx.load(out)) == colours(small.model)
    assert result.plan.casts == small.plan.casts


def test_a_large_model_out_of_memory_and_not_written(given, low_limit, tmp_path):
    result = rewrite_onnx(ir.from_proto(given.model), calibration=given.feed)
    assert result.path is None
    assert result.report.strict_error < 2e-3
    assert run(result.model, given.feed)[0].shape == (4, 16)


def test_a_large_model_does_not_fit_one_file(given, low_limit, tmp_path):
    with pytest.raises(EmitError, match="its weights do not fit one file; leave external_data= out"):
        rewrite_onnx(given.model, tmp_path / "out.onnx", external_data=False)
    assert not list(tmp_path.iterdir())


def test_a_large_model_is_read_from_the_file_that_replaced_it(given, low_limit, tmp_path):
    path = tmp_path / "m.onnx"
    ir.save(ir.from_proto(given.model), path, external_data="m.onnx.data", size_threshold_bytes=0)
    result = rewrite_onnx(path, path, calibration=given.feed)
    held = {name: each.const_value.numpy() for name, each in result.ir_model.graph.initializers.items()}
    wanted = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in given.model.graph.initializer}
    assert all(np.array_equal(held[name], array.astype(np.float16)) for name, array in wanted.items())


@pytest.mark.slow
def test_more_than_two_gb_of_weights(tmp_path):
    """Nine 256 MB matrices: 2.4 GB in fp32, 1.2 GB in fp16. Needs 6 GB of disk and memory."""
    rows = np.random.default_rng(0).standard_normal((64, 8192)).astype(np.float32) / 90
    nodes = [onnx.helper.make_node("MatMul", [f"v{i}", f"w{i}"], [f"v{i + 1}"], name=f"mm{i}") for i in range(9)]
    graph = onnx.helper.make_graph(nodes, "big", [value("v0", 2, 8192)], [value("v9", 2, 8192)])
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10))
    for i in range(9):

        def made(i=i):
            return ir.tensor(np.tile(np.roll(rows, i, 0), (128, 1)))

        tensor = ir.LazyTensor(made, ir.DataType.FLOAT, ir.Shape((8192, 8192)), name=f"w{i}")
        held = next(v for n in model.graph for v in n.inputs if v.name == f"w{i}")
        held.const_value, held.type, held.shape = tensor, ir.TensorType(ir.DataType.FLOAT), tensor.shape
        model.graph.register_initializer(held)
    source, out = tmp_path / "in.onnx", tmp_path / "out.onnx"
    ir.save(model, source, external_data="in.data")
    assert source.with_name("in.data").stat().st_size > 2**31
    result = rewrite_onnx(source, out, external_data=True)
    assert data_of(out).stat().st_size <= 0.51 * source.with_name("in.data").stat().st_size
    assert result.report.strict_error < 2e-3
    assert result.report.valid
    assert set(colours(onnx.load(out, load_external_data=False)).values()) == {"low"}
