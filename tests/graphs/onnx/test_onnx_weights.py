"""Weights are sacred: rounding to nearest even and nothing else, and what would be lost is told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx_help import F16, F32, ONE_PASS, colours, const, differs_before_ort_1_27, gemm_chain, net, node, noise, run, value, weight

from amprewrite.api.onnx.convert import rewrite_onnx
from amprewrite.graphs.onnx.read.constants import facts, loss_of, rounded
from amprewrite.tables.formats import BF16, FP16

singles = st.floats(width=32)


@given(st.lists(singles, min_size=1, max_size=20), st.sampled_from([FP16, BF16]))
def test_rounding_is_torchs_but_for_clamping(values, fmt):
    given_values = np.array(values, np.float32)
    got = rounded(given_values, fmt).astype(np.float32)
    want = torch.from_numpy(given_values).to(fmt.dtype).float().numpy()
    beyond = np.isinf(want) & np.isfinite(given_values)
    np.testing.assert_array_equal(got[~beyond], want[~beyond])
    np.testing.assert_array_equal(np.signbit(got), np.signbit(np.where(np.isnan(got), got, given_values)))
    np.testing.assert_array_equal(np.abs(got[beyond]), np.float32(fmt.max))
    assert (got[given_values == 0] == 0).all()


def lost(values, saturates: bool = False):
    return loss_of("w", facts(np.asarray(values, np.float32), FP16), FP16, saturates)


@pytest.mark.parametrize(
    ("values", "kept", "says"),
    [
        pytest.param([1e-9] * 4, True, "4 of 4 values vanish", id="all vanish"),
        pytest.param([[1.0, 1.0], [1e-9, 1e-9]], True, "2 of 4 values vanish", id="a row vanishes"),
        pytest.param([1e5, 1.0], True, "1 of 2 values exceed fp16's 65504", id="too large"),
        pytest.param([1.0] * 99 + [1e-9], False, "1 of 100 values vanish in fp16, negligible", id="one among many"),
    ],
)
def test_losses_are_told(values, kept, says):
    loss = lost(values)
    assert loss is not None
    assert loss.kept is kept
    assert says in loss.why


@pytest.mark.parametrize("values", [[65504.0, -65504.0], [0.0, -0.0], [np.inf, -np.inf], [65519.0], [0.1, 3e-5]])
def test_what_rounds_well_is_no_loss(values):
    assert lost(values) is None


def test_masks_become_the_lowest_value_but_large_weights_do_not():
    mask = facts(np.array([0, np.finfo(np.float32).min], np.float32), FP16)
    assert mask.mask
    assert not facts(np.array([3e8, 1.0], np.float32), FP16).mask
    lowest = np.array([np.finfo(np.float32).min], np.float32)
    assert rounded(lowest, FP16)[0] == -65504
    assert rounded(lowest, FP16, masks_scores=True)[0] == -30704


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_such_a_weight_keeps_its_op_high_and_is_listed(scale):
    made = gemm_chain(node("MatMul", ["h", "odd"], ["mid"], name="odd_one"), inits=[const("odd", np.eye(16) * scale)])
    result = rewrite_onnx(made.model)
    assert "odd_one runs high" in result.plan.explain("odd_one")
    assert [loss.name for loss in result.report.losses] == ["odd"]
    stored = {t.name: t.data_type for t in result.model.graph.initializer}
    assert (stored["w0"], stored["odd"]) == (F16, F32)


@pytest.mark.parametrize(
    ("fill", "then", "low"),
    [
        pytest.param(1e5, "Mul", False, id="a number"),
        pytest.param(-1e5, "Mul", False, id="a negative number"),
        pytest.param(-1e5, "Softmax", True, id="a mask of scores"),
        pytest.param(1e5, "Softmax", False, id="a number before a softmax"),
    ],
)
def test_what_is_filled_in_becomes_the_lowest_only_if_a_softmax_blocks_it(fill, then, low):
    last = node("Mul", ["filled", "tiny"], ["out"]) if then == "Mul" else node("Softmax", ["filled"], ["out"], axis=-1)
    nodes = [
        node("MatMul", ["x", "w"], ["y"]), node("Greater", ["y", "zero"], ["where"]),
        node("Where", ["where", "fill", "y"], ["filled"], name="fills"), last,
    ]  # fmt: skip
    constants = [const("fill", fill), const("zero", 0.0), const("tiny", 1e-5), weight("w", 8, 8)]
    given = net(nodes, [value("x", 4, 8)], [value("out", 4, 8)], constants, {"x": noise(4, 8)})
    made = rewrite_onnx(given.model, dtype="fp16", calibration=given.feed)
    assert (colours(made.model)["fills"] == "low") == low
    np.testing.assert_allclose(run(made.model, given.feed)[0], run(given.model, given.feed)[0], rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("op", "inputs", "low"),
    [
        pytest.param("Clip", ["y", "far_below", ""], True, id="a lower bound below the range"),
        pytest.param("Clip", ["y", "", "far_above"], True, id="an upper bound above the range"),
        pytest.param("Clip", ["y", "far_above", ""], False, id="a lower bound above the range"),
        pytest.param("Clip", ["y", "", "far_below"], False, id="an upper bound below the range"),
        pytest.param("Max", ["y", "far_above"], False, id="at least a number above the range"),
        pytest.param("Min", ["y", "far_below"], False, id="at most a number below the range"),
    ],
)
def test_a_bound_becomes_the_end_of_the_range_on_its_own_side_alone(op, inputs, low):
    nodes = [node("MatMul", ["x", "w"], ["y"]), node(op, inputs, ["bounded"], name="bounds"), node("Mul", ["bounded", "tiny"], ["out"])]
    constants = [const("far_below", -1e5), const("far_above", 1e5), const("tiny", 1e-5), weight("w", 8, 8)]
    given = net(nodes, [value("x", 4, 8)], [value("out", 4, 8)], constants, {"x": noise(4, 8)})
    made = rewrite_onnx(given.model, dtype="fp16", calibration=given.feed)
    assert (colours(made.model)["bounds"] == "low") == low
    np.testing.assert_allclose(run(made.model, given.feed)[0], run(given.model, given.feed)[0], rtol=2e-2, atol=1e-7)


@differs_before_ort_1_27(ONE_PASS)
@pytest.mark.parametrize(("bias", "colour"), [([3000.0] * 16, "high"), ([3000.0, 3010.0] * 8, "high"), (list(noise(16)), "low")])
def test_a_norm_reads_a_bias_with_an_offset_in_fp32(bias, colour):
    """Rounded with the offset, what the norm leaves would be rounding; a bias around nought is rounded as the product is."""
    made = gemm_chain(
        node("Add", ["h", "bias"], ["sum"], name="add"), node("LayerNormalization", ["sum", "one"], ["mid"], name="norm"),
        inits=[const("bias", bias), const("one", [1.0] * 16)],
    )  # fmt: skip
    found = rewrite_onnx(made.model, dtype="fp16")
    assert colours(found.model)["add"] == colour
    want, got = run(made.model, made.feed)[0], run(found.model, made.feed)[0]
    assert np.abs(got - want).max() < 3e-2 * np.abs(want).max()


@pytest.mark.parametrize(
    ("bias", "colour"), [([*noise(15), -100.0], "low"), ([*noise(8), *[float("-inf")] * 8], "low"), ([3000.0] * 15 + [0.0], "high")]
)
def test_a_softmax_reads_a_bias_with_an_offset_in_fp32_and_a_mask_low(bias, colour):
    """An exporter may fold a mask into a bias: what blocks positions loses nothing, and is no offset."""
    made = gemm_chain(
        node("Add", ["h", "bias"], ["sum"], name="add"), node("Softmax", ["sum"], ["mid"], name="softmax"), inits=[const("bias", bias)]
    )  # fmt: skip
    found = rewrite_onnx(made.model, dtype="bf16")
    assert colours(found.model)["add"] == colour


@pytest.mark.parametrize(
    "between",
    [
        [node("ReduceL2", ["h"], ["n"], name="norm", axes=[1]), node("Clip", ["n", "tiny"], ["m"], name="most")],
        [node("ReduceL2", ["h"], ["n"], name="norm", axes=[1]), node("Add", ["n", "tiny"], ["m"], name="plus")],
        [node("ReduceL2", ["h"], ["n"], name="norm", axes=[1]), node("Max", ["n", "tiny"], ["m"], name="most")],
        [
            node("Mul", ["h", "h"], ["q"], name="square"), node("ReduceMean", ["q"], ["n"], name="mean", axes=[1]),
            node("Add", ["n", "tiny"], ["a"], name="plus"), node("Sqrt", ["a"], ["m"], name="root"),
        ],
    ],
    ids=lambda nodes: nodes[-1].name + str(len(nodes)),
)  # fmt: skip
@pytest.mark.parametrize("seen", [True, False])
def test_a_row_of_zeros_that_no_sample_shows_is_divided_by_its_epsilon(between, seen):
    made = gemm_chain(*between, node("Div", ["h", "m"], ["mid"], name="share"), inits=[const("tiny", 1e-9)], opset=17)
    feed = {"x": noise(4, 16)}
    found = rewrite_onnx(made.model, dtype="fp16", calibration=feed if seen else None)
    feed["x"][2] = 0
    want, got = run(made.model, feed)[0], run(found.model, feed)[0]
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, atol=5e-3 * np.abs(want).max())
