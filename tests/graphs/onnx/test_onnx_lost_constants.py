"""Constants that the low format cannot hold, where no sample shows what becomes of them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_help import noise, parsed, true_error

from amprewrite import rewrite_onnx
from amprewrite.tables.vocabulary import Colour

W = noise(64, 64) / 8
X = noise(32, 64)
TAKEN = "then_branch=t () => (float t) {t = Constant<value=float {1.0}>()}"


def branch(number: str) -> str:
    """An If that gives a number where the samples show one."""
    return f"e = If(b) <{TAKEN}, else_branch=s () => (float s) {{s = Constant<value=float {{{number}}}>()}}>"


@pytest.mark.parametrize(
    ("number", "then"),
    [
        pytest.param("100000.0", "f = Mul(a, small)\n d = Mul(f, e)", id="beyond the range"),
        pytest.param("1e-8", "r = Relu(a)\n v = Add(r, e)\n d = Div(a, v)", id="below it"),
    ],
)
def test_what_a_branch_gives_that_samples_do_not_take_is_looked_at(number, then):
    body = f"a = MatMul(x, W)\n {branch(number)}\n {then}\n y = Identity(d)"
    given = parsed(body, "float[32,64] x, bool b", "float[32,64] y", {"W": W, "small": np.float32(1e-2)}, {"x": X, "b": np.array(False)})
    result = rewrite_onnx(given.model)
    assert [loss.name for loss in result.report.losses if loss.kept] == ["s"]
    assert true_error(given, result) < 3e-3


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    ("number", "then"),
    [
        pytest.param("1e5", "d = Div(a, f)\n e = Mul(d, large)", id="a divisor beyond the range"),
        pytest.param("1e5", "e = Where(m, f, a)", id="a number beyond the range"),
        pytest.param("1e-6", "d = Mul(a, f)\n e = Mul(d, huge)", id="a factor below it"),
    ],
)
def test_a_fill_in_a_branch_that_no_sample_takes_is_looked_at(number, then, sampled):
    inside = f"a = MatMul(x, W)\n s = Shape(a)\n f = ConstantOfShape<value=float[1] {{{number}}}>(s)\n {then}"
    body = f"y = If(b) <then_branch=t () => (float[32,64] t) {{t = MatMul(x, W)}}, else_branch=o () => (float[32,64] e) {{{inside}}}>"
    inits = {"W": W, "large": np.float32(1e4), "huge": np.float32(5e4), "m": np.arange(64) % 2 == 0}
    given = parsed(body, "float[32,64] x, bool b", "float[32,64] y", inits, {"x": X, "b": np.array(False)})
    typed = onnx.shape_inference.infer_shapes(given.model)
    result = rewrite_onnx(typed, calibration=given.feed | {"b": np.array(True)} if sampled else None)
    assert true_error(given, result) < 3e-3


def test_a_fill_that_masks_scores_stays_low_where_no_sample_shows_it():
    inside = "a = MatMul(x, W)\n h = Shape(a)\n f = ConstantOfShape<value=float[1] {-1e9}>(h)"
    inside += "\n c = Where(m, f, a)\n s = Softmax(c)\n e = MatMul(s, W)"
    body = f"y = If(b) <then_branch=t () => (float[32,64] t) {{t = MatMul(x, W)}}, else_branch=o () => (float[32,64] e) {{{inside}}}>"
    inits = {"W": W, "m": np.arange(64) % 2 == 0}
    given = parsed(body, "float[32,64] x, bool b", "float[32,64] y", inits, {"x": X, "b": np.array(False)})
    result = rewrite_onnx(onnx.shape_inference.infer_shapes(given.model))
    assert next(node for node in result.plan.nodes if node.op == "full").colour is Colour.LOW
    assert true_error(given, result) < 3e-3


def test_a_bias_below_the_range_may_be_flushed_where_no_sample_shows_the_sum():
    taken = "else_branch=s () => (float[32,64] s) {s = Identity(x)}"
    body = f"y = If(b) <then_branch=t () => (float[32,64] t) {{t = Gemm(x, W, small)}}, {taken}>"
    inits = {"W": W, "small": np.full(64, 1e-9, np.float32)}
    given = parsed(body, "float[32,64] x, bool b", "float[32,64] y", inits, {"x": X, "b": np.array(True)})
    result = rewrite_onnx(given.model)
    assert next(node for node in result.plan.nodes if node.flops).colour is Colour.LOW
    assert true_error(given, result) < 3e-3


@pytest.mark.parametrize("number", ["0.25", "-1e9"])
def test_a_branch_may_give_what_the_format_holds_and_a_mask(number):
    body = f"a = MatMul(x, W)\n {branch(number)}\n c = Add(a, e)\n s = Softmax(c)\n y = MatMul(s, W)"
    given = parsed(body, "float[32,64] x, bool b", "float[32,64] y", {"W": W}, {"x": X, "b": np.array(True)})
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert not any(loss.kept for loss in result.report.losses)
    assert true_error(given, result) < 3e-3


@pytest.mark.parametrize(
    "blocked",
    [
        pytest.param("b = Where(m, zero, far)\n c = Add(a, b)", id="once"),
        pytest.param("b = Where(m, zero, far)\n d = Where(n, zero, far)\n f = Add(a, b)\n c = Add(f, d)", id="twice"),
        pytest.param("b = Where(m, zero, far)\n f = Add(a, b)\n c = Where(n, f, far)", id="twice, filled"),
        pytest.param("f = Where(m, a, far)\n b = Where(n, zero, far)\n c = Add(f, b)", id="filled and added to"),
    ],
)
def test_a_row_that_is_blocked_whole_is_finite(blocked):
    given = parsed(
        f"a = MatMul(x, W)\n {blocked}\n s = Softmax(c)\n y = MatMul(s, W)",
        "float[32,64] x, bool[32,64] m, bool[32,64] n", "float[32,64] y",
        {"W": -np.abs(W), "zero": np.float32(0), "far": np.float32(-1e9)},
        {"x": 8 * np.abs(X), "m": np.indices((32, 64))[0] > 7, "n": np.indices((32, 64))[0] > 3},
    )  # fmt: skip
    result = rewrite_onnx(given.model)
    assert {node.colour for node in result.plan.nodes if node.role == "op" and node.dtype.startswith("f")} == {Colour.LOW}
    assert np.isfinite(true_error(given, result))


@pytest.mark.parametrize(
    ("reads", "want"),
    [
        pytest.param("b = Add(a, far)\n c = Softmax(b)\n y = MatMul(c, W)", -30704, id="a mask of scores"),
        pytest.param("b = Max(a, far)\n c = Softmax(b)\n y = MatMul(c, W)", -65504, id="a bound of scores"),
        pytest.param("b = Where(m, a, far)\n c = Relu(b)\n y = MatMul(c, W)", -65504, id="of values"),
    ],
)
def test_less_than_half_of_the_lowest_is_for_masks_of_scores_alone(reads, want):
    given = parsed(
        f"a = MatMul(x, W)\n {reads}", "float[32,64] x, bool[32,64] m", "float[32,64] y",
        {"W": W, "far": np.where(np.arange(64) > 40, -1e9, 0)[None].astype(np.float32)}, {"x": X, "m": X > 0},
    )  # fmt: skip
    held = {t.name: onnx.numpy_helper.to_array(t) for t in rewrite_onnx(given.model).model.graph.initializer}
    assert held["far"].min() == want


@pytest.mark.parametrize("first", ["s", "h"])
def test_a_state_that_starts_beyond_the_range_is_kept_in_the_body_of_a_loop(first):
    body = f"""
        n = Constant<value=int64 {{3}}>()
        go = Constant<value=bool {{1}}>()
        y = Loop(n, go, start) <body=b (int64 i, bool c, float[8,64] s) => (bool c2, float[8,64] s2) {{
            c2 = Identity(c)
            h = Identity(s)
            m = MatMul({first}, W)
            k = Constant<value=float {{2000}}>()
            s2 = Mul(m, k)
        }}>
        z = Add(x, y)"""
    given = parsed(body, "float[8,64] x", "float[8,64] y, float[8,64] z", {"W": W, "start": X[:8] * np.float32(1e-10)}, {"x": X[:8]})
    assert true_error(given, rewrite_onnx(given.model)) < 3e-3


def test_a_sequence_beyond_the_range_is_kept_in_the_body_of_a_scan():
    body = """
        y, z = Scan <num_scan_inputs=1, body=b (float[8,64] s, float[8,64] u) => (float[8,64] s2, float[8,64] o) {
            m = MatMul(u, W)
            k = Constant<value=float {1e-6}>()
            m2 = Mul(m, k)
            s2 = Add(m2, s)
            o = Identity(s2)
        }> (x, steps)"""
    steps = np.abs(noise(5, 8, 64)) * np.float32(1e6)
    given = parsed(body, "float[8,64] x", "float[8,64] y, float[5,8,64] z", {"W": W, "steps": steps}, {"x": X[:8]})
    result = rewrite_onnx(given.model)
    assert {loss.name for loss in result.report.losses if loss.kept} == {"steps", "k"}
    assert true_error(given, result) < 3e-3


@pytest.mark.parametrize(
    ("number", "test"),
    [
        pytest.param(-1e-8, "c = Greater(r, k)", id="above a negative number that vanishes"),
        pytest.param(1e-8, "c = Less(r, k)", id="below one that vanishes"),
        pytest.param(1e-8, "c = LessOrEqual(k, r)", id="the constant first"),
    ],
)
def test_a_comparison_with_a_constant_that_vanishes_is_made_in_fp32(number, test):
    body = f"a = MatMul(x, W)\n r = Relu(a)\n {test}\n f = Cast<to=1>(c)\n y = MatMul(f, W)"
    given = parsed(body, "float[32,64] x", "float[32,64] y", {"W": W, "k": np.float32(number)}, {"x": X})
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert true_error(given, result) < 3e-3
    assert [loss.name for loss in result.report.losses if loss.kept] == ["k"]
    assert sum(not cast.weight and cast.to == "fp32" for cast in result.plan.casts) == 2, "of what is compared, and of the output"


def test_a_comparison_with_a_constant_that_the_format_holds_reads_low():
    body = "a = MatMul(x, W)\n c = Greater(a, k)\n f = Where(c, a, k)\n y = MatMul(f, W)"
    given = parsed(body, "float[32,64] x", "float[32,64] y", {"W": W, "k": np.float32(0.125)}, {"x": X})
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert sum(not cast.weight for cast in result.plan.casts) == 2


MASKED = "a = MatMul(x, W)\n b = Where(m, k, a)\n s = Softmax(b)"


@pytest.mark.parametrize(
    "test",
    [
        pytest.param("c = Less(b, t)", id="with a number as large"),
        pytest.param("h = Reshape(b, shape)\n c = Less(h, t)", id="of a view"),
        pytest.param("l = Where(m, t, a)\n c = Less(b, l)", id="with a mask of other numbers"),
    ],
)
def test_what_tells_masked_values_from_others_sees_them_as_they_are(test):
    body = f"{MASKED}\n {test}\n f = Cast<to=1>(c)\n p = MatMul(s, W)\n q = MatMul(f, W)\n y = Add(p, q)"
    inits = {"W": W, "k": np.float32(-1e9), "t": np.float32(-1e8), "shape": np.array([32, 64])}
    given = parsed(body, "float[32,64] x, bool[32,64] m", "float[32,64] y", inits, {"x": X, "m": noise(32, 64) < -0.5})
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert true_error(given, result) < 3e-3
    assert {loss.name for loss in result.report.losses if loss.kept} >= {"k"}


FILLED = "a = MatMul(x, W)\n h = Where(m, far, a)"
TOLD = {
    "a product": f"{FILLED}\n d = Mul(h, tiny)",
    "a quotient": f"{FILLED}\n d = Div(h, huge)",
    "a divisor": f"{FILLED}\n n = Neg(h)\n r = Relu(n)\n s = Add(r, one)\n d = Div(huge, s)",
    "a sum": f"{FILLED}\n s = Add(h, huge)\n d = Mul(s, tiny)",
    "a difference": f"{FILLED}\n c = ReduceMax <keepdims=1> (h)\n s = Sub(h, c)\n d = Mul(s, tiny)",
    "a sum with a mask": "a = MatMul(x, W)\n k = Where(m, far, zero)\n s = Add(a, k)\n d = Mul(s, tiny)",
    "a mean": f"{FILLED}\n s = ReduceMean <keepdims=1> (h)\n p = Mul(s, tiny)\n d = Add(a, p)",
    "a logarithm of its size": f"{FILLED}\n p = Abs(h)\n q = Add(p, one)\n d = Log(q)",
    "a bound beyond the range": f"{FILLED}\n c = Clip(h, million, )\n d = Mul(c, small)",
    "a bound within it": f"{FILLED}\n c = Max(h, within)\n d = Mul(c, small)",
    "greater than": f"{FILLED}\n g = Greater(h, million)\n f = Cast<to=1>(g)\n d = Mul(a, f)",
    "moved": f"{FILLED}\n t = Transpose <perm=[0, 1]> (h)\n i = Identity(t)\n d = Mul(i, tiny)",
    "one softmax and a product": f"{FILLED}\n s = Softmax(h)\n p = Mul(h, tiny)\n d = Add(s, p)",
    "from a branch": f"a = MatMul(x, W)\n {branch('-1e9')}\n h = Add(a, e)\n d = Mul(h, tiny)",
    "through a branch": f"{FILLED}\n o = If(b) <then_branch=t () => (float[32,64] t) {{t = Identity(h)}}, "
    "else_branch=s () => (float[32,64] s) {s = Identity(h)}>\n d = Mul(o, tiny)",
}
NUMBERS = {
    "far": -1e9, "huge": 1e9, "tiny": 1e-9, "small": 1e-5, "million": -1e6, "within": -5e4, "one": 1.0, "zero": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("hidden", [True, False], ids=["hidden in samples", "in none"])
@pytest.mark.parametrize("way", TOLD)
def test_a_number_that_masks_is_itself_where_it_is_computed_with(way, hidden):
    """It is finite in the end, so that nothing would show that the end of fp16's range was taken for it."""
    inits = {"W": W, **{name: np.float32(number) for name, number in NUMBERS.items()}}
    mask = noise(32, 64) < -0.5
    feed = {"x": X, "m": mask, "b": np.array(False)}
    given = parsed(f"{TOLD[way]}\n y = MatMul(d, W)", "float[32,64] x, bool[32,64] m, bool b", "float[32,64] y", inits, feed)
    seen = feed if hidden else {"x": X, "m": np.zeros_like(mask), "b": np.array(True)}
    assert true_error(given, rewrite_onnx(given.model, calibration=seen)) < 3e-3


@pytest.mark.parametrize(
    "then",
    [
        pytest.param("b = Max(a, far)", id="bounded"),
        pytest.param("b = Clip(a, far, )", id="clipped"),
        pytest.param("c = Where(m, far, a)\n b = Relu(c)", id="filled"),
        pytest.param("c = Where(m, far, zero)\n d = Add(a, c)\n b = Relu(d)", id="added to"),
    ],
)
def test_data_beside_a_mask_does_not_become_the_end_of_the_range(then):
    """Beyond what samples showed, a product would read 65504 for what is larger, and give what fits: an infinity shows at least."""
    inits = {"W": W, "far": np.finfo(np.float32).min, "zero": np.float32(0), "k": np.float32(1e5), "small": np.float32(1e-5)}
    feed = {"x": 100 * X, "m": noise(32, 64) < -0.5}
    body = f"a = MatMul(x, W)\n {then}\n e = Mul(b, k)\n f = MatMul(e, W)\n y = Mul(f, small)"
    given = parsed(body, "float[32,64] x, bool[32,64] m", "float[32,64] y", inits, feed)
    error = true_error(given, rewrite_onnx(given.model, calibration={**feed, "x": X / 1000}))
    assert error < 3e-3 or not np.isfinite(error)


@pytest.mark.parametrize("pole", ["r = Reciprocal(s)", "r = Div(one, s)"])
def test_a_value_that_comes_to_a_pole_is_not_flushed_where_it_is_made(pole):
    """A few elements of it would become zero: fp32 at the pole comes too late, and one of them makes an infinity."""
    body = f"a = MatMul(x, W)\n s = Mul(a, a)\n {pole}\n t = Mul(r, tiny)\n q = MatMul(s, W)\n y = Add(q, t)"
    inits = {"W": W, "tiny": np.float32(1e-4), "one": np.float32(1)}
    given = parsed(body, "float[32,64] x", "float[32,64] y", inits, {"x": X * np.float32(3e-3)})
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert next(node for node in result.plan.nodes if node.name == "mul").colour is Colour.HIGH
    assert np.isfinite(true_error(given, result))


def test_attention_that_takes_a_mask_of_numbers_takes_its_end():
    """The lowest number blocks a position in ONNX's own attention as it does in front of a softmax."""
    body = "q = MatMul(x, W)\n r = Reshape(q, heads)\n m = Where(b, zero, far)\n s = Attention(r, r, r, m)\n y = Relu(s)"
    inits = {"W": W, "zero": np.float32(0), "far": np.float32(-1e5), "heads": np.array([1, 1, 32, 64])}
    given = parsed(
        body, "float[32,64] x, bool[32,32] b", "float[1,1,32,64] y", inits, {"x": X, "b": np.tri(32, dtype=bool)}, opset=23
    )  # fmt: skip
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert next(node for node in result.plan.nodes if node.op == "where").colour is Colour.LOW
    assert true_error(given, result) < 3e-3


@pytest.mark.parametrize("leaves", [True, False])
def test_a_mask_that_leaves_the_model_is_the_number_that_it_was(leaves):
    outs = "float[32,64] y, float[32,64] b" if leaves else "float[32,64] y"
    inits = {"W": W, "k": np.float32(-1e9)}
    given = parsed(f"{MASKED}\n y = MatMul(s, W)", "float[32,64] x, bool[32,64] m", outs, inits, {"x": X, "m": noise(32, 64) < -0.5})
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert true_error(given, result) < 3e-3
    planned = {node.op: node.colour.value for node in result.plan.regions[0].nodes}
    assert planned["where"] == ("high" if leaves else "low")
    assert planned["matmul"] == "low"


def test_the_shape_of_a_constant_loses_nothing():
    body = "a = MatMul(x, W)\n s = Shape(k)\n f = Cast<to=1>(s)\n y = Mul(a, f)"
    given = parsed(body, "float[32,64] x", "float[32,64] y", {"W": W, "k": np.full(3, 1e-9, np.float32)}, {"x": X})
    assert rewrite_onnx(given.model, calibration=given.feed).report.losses == ()
