"""Constants that the low format cannot hold, where no sample shows what becomes of them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_help import noise, parsed, true_error

from amprewrite import rewrite_onnx

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


@pytest.mark.parametrize("number", ["0.25", "-1e9"])
def test_a_branch_may_give_what_the_format_holds_and_a_mask(number):
    body = f"a = MatMul(x, W)\n {branch(number)}\n c = Add(a, e)\n s = Softmax(c)\n y = MatMul(s, W)"
    given = parsed(body, "float[32,64] x, bool b", "float[32,64] y", {"W": W}, {"x": X, "b": np.array(True)})
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert not any(loss.kept for loss in result.report.losses)
    assert true_error(given, result) < 3e-3


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
    assert [loss.name for loss in result.report.losses] == ["steps"]
    assert true_error(given, result) < 3e-3
