"""Names of values and nodes: bodies may use a name again, and a model may have the names that a rewrite would choose."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_help import BOOL, I64, Net, const, gemm_chain, graph, net, node, noise, run, value, weight

from amprewrite import CaptureError, rewrite_onnx
from amprewrite.graphs.onnx.run.compare import relative_error
from amprewrite.graphs.onnx.run.onnx_runtime import session
from amprewrite.tables.formats import E4M3


def looped(state: str = "state", held: str = "inside", made: str = "made", *before: onnx.NodeProto) -> Net:
    """x → Loop, whose body multiplies `state` by its own constant `held` → MatMul → out."""
    nodes = [node("MatMul", [state, held], [made]), node("Tanh", [made], ["next"]), node("Identity", ["c_in"], ["c_out"])]
    ins = [value("i", dtype=I64), value("c_in", dtype=BOOL), value(state, 4, 16)]
    body = graph(nodes, "body", ins, [value("c_out", dtype=BOOL), value("next", 4, 16)], [weight(held, 16, 16, scale=0.5)])
    outer = [*before, node("Loop", ["n", "", "x"], ["y"], body=body), node("MatMul", ["y", "w"], ["out"])]
    return net(outer, [value("x", 4, 16)], [value("out", 4, 16)], [weight("w", 16, 16), const("n", 3, np.int64)], {"x": noise(4, 16)})


@pytest.mark.parametrize(
    ("state", "held", "made"), [("x", "inside", "made"), ("state", "w", "made"), ("state", "inside", "out"), ("state", "inside", "y")]
)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_body_may_use_a_name_of_the_graph_around_it(state: str, held: str, made: str, dtype: str) -> None:
    """onnx's type inference, the strict interpreter and ranges go by name, and took one of the two values for the other."""
    given = looped(state, held, made)
    onnx.checker.check_model(given.model, full_check=True)
    result = rewrite_onnx(given.model, dtype=dtype, calibration=given.feed)
    assert 0 < result.report.strict_error < 2e-2 and result.report.valid
    if dtype == "fp16":
        assert relative_error([run(given.model, given.feed)], [run(result.model, given.feed)]) < 2e-3


def test_a_cast_that_is_erased_is_not_read_as_a_value_of_the_body() -> None:
    """The body reads an outer "k" through a cast that changes nothing, and its own state is "k"."""
    outer = [node("MatMul", ["w", "w"], ["k"]), node("Cast", ["k"], ["kc"], to=onnx.TensorProto.FLOAT)]
    nodes = [node("MatMul", ["k", "kc"], ["made"]), node("Tanh", ["made"], ["next"]), node("Identity", ["c_in"], ["c_out"])]
    ins = [value("i", dtype=I64), value("c_in", dtype=BOOL), value("k", 4, 16)]
    body = graph(nodes, "body", ins, [value("c_out", dtype=BOOL), value("next", 4, 16)])
    outer += [node("Loop", ["n", "", "x"], ["out"], body=body)]
    inits, feed = [weight("w", 16, 16), const("n", 3, np.int64)], {"x": noise(4, 16)}
    given = net(outer, [value("x", 4, 16)], [value("out", 4, 16)], inits, feed)
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert relative_error([run(given.model, given.feed)], [run(result.model, given.feed)]) < 5e-3


@pytest.mark.parametrize("verify", [True, False])
def test_nodes_may_have_names_that_a_cast_would_choose(verify: bool) -> None:
    """ONNX Runtime loads no model in which two nodes have one name."""
    given = gemm_chain(node("Exp", ["h"], ["mid"], name="cast_x"))
    given.model.graph.node[0].name = "cast_mid"
    result = rewrite_onnx(given.model, verify=verify)
    assert [each.name for each in result.model.graph.node if not each.name.startswith("cast_")] == ["last"]
    assert {"cast_x", "cast_mid"} < {each.name for each in result.model.graph.node}
    assert relative_error([run(given.model, given.feed)], [run(result.model, given.feed)]) < 5e-3


def test_nodes_of_one_name_get_names_of_their_own() -> None:
    given = gemm_chain(node("Relu", ["h"], ["mid"], name="same"))
    for each in given.model.graph.node:
        each.name = "same"
    with pytest.raises(Exception, match="two nodes with same node name"):
        session(given.model)
    result = rewrite_onnx(given.model)
    assert result.report.runtime_error is not None and result.report.runtime_error < 2e-3


@pytest.mark.parametrize("inside", [False, True])
def test_two_constants_of_one_name_are_refused(inside: bool) -> None:
    """onnx.checker accepts them, ONNX Runtime reads the last one, and onnx_ir dropped it silently."""
    given = looped()
    held = given.model.graph.node[0].attribute[0].g if inside else given.model.graph
    name = held.initializer[0].name
    held.initializer.append(weight("another", 16, 16))
    held.initializer[-1].name = name
    with pytest.raises(CaptureError, match=f"the model has two initialisers named {name}, of which only one can be meant; export it again"):
        rewrite_onnx(given.model)


def test_fp8_products_take_names_that_are_free() -> None:
    taken = ["x_fp16_scale", "w0_scale", f"w1_{E4M3.name}", f"x_fp16_{E4M3.name}"]
    extra = [node("Identity", ["h"], [name], name=f"quantise_{name}") for name in taken]
    given = gemm_chain(node("Relu", ["h"], ["mid"], name="dequantise_mid"), *extra, node("Sum", taken, ["total"]))
    given.model.graph.output.append(value("total", 4, 16))
    result = rewrite_onnx(given.model, products="fp8-all", calibration=given.feed, dtype="fp16")
    onnx.checker.check_model(result.model, full_check=True)
    assert sum(each.op_type == "QuantizeLinear" for each in result.model.graph.node) == 2
    made = [name for each in result.model.graph.node for name in each.output]
    assert set(taken) < set(made) and len(made) == len(set(made))
