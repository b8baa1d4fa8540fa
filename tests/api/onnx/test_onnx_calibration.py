"""Calibration data of the user: what is taken, one sample at a time, and what is refused."""

from __future__ import annotations

import re
import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_help import F32, I64, Net, colours, const, gemm_chain, net, node, noise, run, value, weight
from tiers import long_beyond

from amprewrite import EmitError, PolicyError
from amprewrite.api.onnx.convert import rewrite_onnx
from amprewrite.graphs.onnx.run.samples import KEPT


def squares(scale: float = 1.0):
    """A square of Gemm results: large inputs take it out of fp16's range."""
    given = gemm_chain(node("Pow", ["h", "two"], ["mid"], name="pow"), inits=[const("two", 2.0)])
    given.feed["x"] *= scale
    return given


def test_every_form_is_taken_and_gives_the_same_file(tmp_path):
    given = squares()
    np.savez(tmp_path / "c.npz", **given.feed)
    forms = [given.feed, [given.feed], tmp_path / "c.npz", str(tmp_path / "c.npz"), [tmp_path / "c.npz"], (f for f in [given.feed])]
    made = [rewrite_onnx(given.model, calibration=form) for form in forms]
    assert len({result.model.SerializeToString(deterministic=True) for result in made}) == 1
    assert {result.report.samples for result in made} == {1}


def test_ranges_are_those_of_all_samples():
    given = squares()
    far = {"x": given.feed["x"] * 200}
    assert colours(rewrite_onnx(given.model, calibration=given.feed).model)["pow"] == "low"
    for samples in ([given.feed, far], [far, given.feed], [given.feed] * KEPT + [far]):
        result = rewrite_onnx(given.model, calibration=iter(samples))
        assert colours(result.model)["pow"] == "high"
        assert result.report.samples == len(samples)


@pytest.mark.parametrize(("size", "scale"), [(1e5, 1e-3), (3e-7, 1e3)])
def test_the_range_of_an_input_decides_what_reads_it(size: float, scale: float) -> None:
    nodes = [node("MatMul", ["x", "w0"], ["h"], name="first"), node("MatMul", ["h", "w1"], ["out"], name="last")]
    inits = [weight("w0", 16, 16, scale=scale), weight("w1", 16, 16)]
    x = noise(4, 16)[::-1] * np.float32(size)
    x.flags.writeable = False
    given = net(nodes, [value("x", 4, 16)], [value("out", 4, 16)], inits, {"x": x})
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert colours(result.model) == {"first": "high", "last": "low"}
    assert result.report.strict_error < 2e-3


def test_made_up_inputs_show_no_range():
    given = net([node("Exp", ["x"], ["h"], name="exp"), node("MatMul", ["h", "w"], ["out"])], [value("x", 4, 16)], [value("out", 4, 16)],
                [weight("w", 16, 16)], {"x": 0.1 * noise(4, 16)})  # fmt: skip
    assert colours(rewrite_onnx(given.model).model)["exp"] == "high"


def test_any_number_of_samples_needs_the_memory_of_a_few():
    nodes = [node("MatMul", ["x", "w"], ["h"], name="a"), node("Relu", ["h"], ["out"])]
    given = net(nodes, [value("x", "n", 16)], [value("out", "n", 16)], [weight("w", 16, 16)], {})

    def peak(count: int) -> int:
        tracemalloc.start()
        result = rewrite_onnx(given.model, calibration=({"x": np.full((4000, 16), 0.01 * n, np.float32)} for n in range(count)))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert result.report.samples == count
        return most

    peak(1)  # imports
    assert peak(20 * KEPT) <= 1.2 * peak(KEPT)


def test_calibration_is_read_only_once_and_not_ahead():
    given = squares()
    taken = []

    def samples():
        for number in range(3):
            taken.append(number)
            yield given.feed

    rewrite_onnx(given.model, calibration=samples())
    assert taken == [0, 1, 2]


def test_an_error_of_the_users_own_generator_is_not_hidden():
    def samples():
        yield squares().feed
        raise KeyError("my loader")

    with pytest.raises(KeyError, match="my loader"):
        rewrite_onnx(squares().model, calibration=samples())


def damaged(tmp_path):
    path = tmp_path / "damaged.npz"
    np.savez(path, x=noise(4, 16))
    path.write_bytes(path.read_bytes()[:100])
    return path


def bare(tmp_path):
    np.save(tmp_path / "bare.npy", noise(4, 16))
    return tmp_path / "bare.npy"


REFUSED = [
    pytest.param(lambda tmp: {"y": noise(4, 16)}, "sample 0 has y; the model's inputs are x", id="another name"),
    pytest.param(lambda tmp: {}, "sample 0 has nothing; the model's inputs are x", id="no name"),
    pytest.param(lambda tmp: {"x": noise(4, 16), "y": noise(1)}, "sample 0 has x, y", id="a name too many"),
    pytest.param(lambda tmp: {"x": noise(4, 15)}, "x has shape [4, 15], the model wants [4, 16]", id="another shape"),
    pytest.param(lambda tmp: {"x": noise(4)}, "x has shape [4], the model wants [4, 16]", id="another rank"),
    pytest.param(lambda tmp: {"x": noise(4, 16).astype(np.float64)}, "x is float64, the model wants float32", id="another dtype"),
    pytest.param(lambda tmp: [{"x": noise(4, 16)}, {"x": np.ones(64, int)}], "sample 1: x is int64", id="the second of two"),
    pytest.param(lambda tmp: [], "holds no sample", id="none"),
    pytest.param(lambda tmp: [noise(4, 16)], "sample 0 is a ndarray; give a mapping with x", id="a bare array"),
    pytest.param(lambda tmp: noise(4, 16), "not ndarray", id="an array"),
    pytest.param(lambda tmp: 3, "not int", id="a number"),
    pytest.param(lambda tmp: b"x", "not bytes", id="bytes"),
    pytest.param(lambda tmp: tmp / "none.npz", "cannot be read as .npz", id="no file"),
    pytest.param(damaged, "cannot be read as .npz", id="a damaged file"),
    pytest.param(bare, "it holds a bare array", id="an npy file"),
]


@pytest.mark.parametrize(("calibration", "says"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, calibration, says):
    with pytest.raises(PolicyError, match=re.escape(says)) as caught:
        rewrite_onnx(squares().model, tmp_path / "out.onnx", calibration=calibration(tmp_path))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.onnx").exists()


def test_an_empty_batch_shows_no_range_and_measures_no_error():
    nodes = [node("MatMul", ["x", "w"], ["out"], name="a")]
    given = net(nodes, [value("x", "batch", 16)], [value("out", "batch", 16)], [weight("w", 16, 16)], {})
    result = rewrite_onnx(given.model, calibration={"x": noise(0, 16)})
    assert any("x held no finite element in a sample" in note for note in result.report.notes)
    assert (result.report.samples, result.report.strict_error, result.report.runtime_error) == (1, None, None)
    assert colours(result.model) == {"a": "low"}
    with pytest.raises(EmitError, match="max_rel_err= cannot be kept"):
        rewrite_onnx(given.model, calibration={"x": noise(0, 16)}, max_rel_err=0.5)
    both = rewrite_onnx(given.model, calibration=[{"x": noise(0, 16)}, {"x": noise(4, 16)}])
    assert both.report.strict_error is not None and 0 < both.report.strict_error < 1e-2
    with pytest.raises(PolicyError, match=r"x has shape \[3, 15\], the model wants \[batch, 16\]"):
        rewrite_onnx(given.model, calibration={"x": noise(3, 15)})


def test_samples_of_nan_show_no_range_and_measure_no_error(tmp_path):
    given = squares()
    nan = {"x": np.full((4, 16), np.nan, np.float32)}
    result = rewrite_onnx(given.model, calibration=nan)
    assert any("x held no finite element in a sample" in note for note in result.report.notes)
    assert (result.report.samples, result.report.strict_error, result.report.runtime_error) == (1, None, None)
    assert colours(result.model)["pow"] == "high"
    with pytest.raises(EmitError, match=r"cannot be kept: .* gave no finite floating number on them; pass calibration= on which it does"):
        rewrite_onnx(given.model, tmp_path / "out.onnx", calibration=nan, max_rel_err=1e-6)
    assert not list(tmp_path.iterdir())
    assert rewrite_onnx(given.model, calibration=[nan, given.feed]).report.strict_error > 0


def test_an_error_is_that_of_floating_outputs():
    """A model that gives places alone has none, and no limit of it can be kept."""
    nodes = [node("MatMul", ["x", "w"], ["h"], name="a"), node("ArgMax", ["h"], ["out"], axis=1, keepdims=0)]
    given = net(nodes, [value("x", 4, 16)], [value("out", 4, dtype=I64)], [weight("w", 16, 16)], {"x": noise(4, 16)})
    assert rewrite_onnx(given.model, calibration=given.feed).report.strict_error is None
    with pytest.raises(EmitError, match="max_rel_err= cannot be kept"):
        rewrite_onnx(given.model, calibration=given.feed, max_rel_err=0.5)


def sequence(name: str) -> onnx.ValueInfoProto:
    return helper.make_value_info(name, helper.make_sequence_type_proto(helper.make_tensor_type_proto(F32, ["n", 16])))


def over_a_sequence() -> Net:
    """The first of a sequence through a product, beside the sequence itself."""
    nodes = [node("SequenceAt", ["xs", "zero"], ["x"]), node("MatMul", ["x", "w"], ["out"], name="a"), node("Identity", ["xs"], ["same"])]
    held = [weight("w", 16, 16), const("zero", 0, np.int64)]
    return net(nodes, [sequence("xs")], [value("out", "n", 16), sequence("same")], held, {"xs": [noise(4, 16), noise(2, 16)]})


def test_a_sequence_is_a_list_of_arrays():
    given = over_a_sequence()
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert colours(result.model)["a"] == "low"
    assert result.report.strict_error is not None and 0 < result.report.strict_error < 1e-2
    got, same = run(result.model, given.feed)
    np.testing.assert_allclose(got, run(given.model, given.feed)[0], rtol=0, atol=5e-3)
    assert [each.shape for each in same] == [(4, 16), (2, 16)]
    assert rewrite_onnx(given.model).report.samples == 1  # made up


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        (noise(4, 16), "xs is a ndarray, the model wants a list of arrays"),
        (None, "xs is a NoneType, the model wants a list of arrays"),
        ([noise(4, 16), noise(4, 15)], "xs[1] has shape [4, 15], the model wants [n, 16]"),
        ([noise(4, 16).astype(np.float64)], "xs[0] is float64, the model wants float32"),
        ([None], "xs[0] is None, the model wants an array"),
    ],
)
def test_a_sequence_that_does_not_fit_is_refused(sample, says):
    with pytest.raises(PolicyError, match=re.escape(says)):
        rewrite_onnx(over_a_sequence().model, calibration={"xs": sample})


def test_a_sample_on_which_the_model_fails_is_named():
    nodes = [node("Gather", ["table", "ids"], ["e"]), node("MatMul", ["e", "w"], ["out"])]
    given = net(nodes, [value("ids", 3, dtype=I64)], [value("out", 3, 16)], [weight("table", 9, 16), weight("w", 16, 16)], {})
    with pytest.raises(PolicyError, match=r"does not run on the calibration data: .*indices"):
        rewrite_onnx(given.model, calibration={"ids": np.array([1, 2, 99])})


def test_nan_and_infinity_of_the_fp32_model_are_no_range():
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="a"), node("Log", ["h"], ["l"], name="log"), node("Where", ["m", "l", "h"], ["s"]),
        node("MatMul", ["s", "w"], ["out"], name="b"),
    ]  # fmt: skip
    given = net(nodes, [value("x", 4, 16)], [value("out", 4, 16)], [weight("w", 16, 16), const("m", False, bool)], {"x": noise(4, 16)})
    low = colours(rewrite_onnx(given.model, calibration=given.feed).model)
    assert low["a"] == low["b"] == "low"


@pytest.mark.parametrize("dtype", long_beyond(1, ["fp16", "bf16"]))
def test_a_result_whose_shape_rounding_changes_is_told_and_not_measured(dtype):
    """Rows are selected by a threshold, as in a detector: numbers just above 1 are rounded to 1, which is not above."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="a"), node("Gather", ["h", "zero"], ["s"], axis=1),
        node("Greater", ["s", "border"], ["keep"]), node("Compress", ["h", "keep"], ["rows"], axis=0),
        node("MatMul", ["h", "v"], ["out"], name="b"),
    ]  # fmt: skip
    held = [weight("w", 1024, 64), weight("v", 64, 64), const("zero", 0, np.int64), const("border", 1.0)]
    feed = {"x": noise(40_000, 1024)}
    given = net(nodes, [value("x", "n", 1024)], [value("rows", "k", 64), value("out", "n", 64)], held, feed)
    result = rewrite_onnx(given.model, dtype=dtype, calibration=feed)
    assert any("rounding changes the shapes of results (rows)" in note for note in result.report.notes)
    assert not any("gives finite numbers" in note for note in result.report.notes)
    assert 0 < result.report.strict_error < 0.01
    with pytest.raises(EmitError, match=r"max_rel_err= cannot be kept: rounding changes the shapes of results \(rows\)"):
        rewrite_onnx(given.model, dtype=dtype, calibration=feed, max_rel_err=0.1)
