"""Sums of many small steps stay fp32 in files, too, unrolled or in the body of a loop; large steps do not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import amprewrite
from amprewrite.tables.vocabulary import Colour, Reason

WIDTH = 16
node = helper.make_node


def value(name: str, kind: int = TensorProto.FLOAT, shape: tuple[int, ...] = (4, WIDTH)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def saved(path, nodes, step: float | np.ndarray, constants: dict[str, np.ndarray] | None = None) -> str:
    weight = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8
    held = {"w": weight, "step": np.asarray(step, np.float32), **(constants or {})}
    graph = helper.make_graph(
        nodes, "g", [value("x0")], [value("y")], [numpy_helper.from_array(np.asarray(v), k) for k, v in held.items()]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return str(path)


def unrolled(path, step: float | np.ndarray, steps: int = 40, scaled: str = "Mul") -> str:
    nodes = []
    for i in range(steps):
        nodes += [node("MatMul", [f"x{i}", "w"], [f"h{i}"]), node(scaled, [f"h{i}", "step"], [f"s{i}"])]
        nodes.append(node("Add", [f"x{i}", f"s{i}"], [f"x{i + 1}"], name=f"sum{i}"))
    return saved(path, [*nodes, node("MatMul", [f"x{steps}", "w"], ["y"])], step)


def looped(path, step: float) -> str:
    body = helper.make_graph(
        [
            node("MatMul", ["x", "w"], ["h"]), node("Mul", ["h", "step"], ["s"]), node("Add", ["x", "s"], ["x1"], name="sum0"),
            node("Identity", ["go"], ["on"]),
        ],
        "body", [value("i", TensorProto.INT64, ()), value("go", TensorProto.BOOL, ()), value("x")],
        [value("on", TensorProto.BOOL, ()), value("x1")],
    )  # fmt: skip
    nodes = [node("Loop", ["turns", "true", "x0"], ["last"], body=body), node("MatMul", ["last", "w"], ["y"])]
    return saved(path, nodes, step, {"turns": np.int64(2000), "true": np.array(True)})


FILES = {
    "unrolled": lambda path: unrolled(path, 0.05),
    "divided": lambda path: unrolled(path, 20.0, scaled="Div"),
    "layer scale": lambda path: unrolled(path, np.linspace(0.02, 0.08, WIDTH)),
    "loop": lambda path: looped(path, 0.001),
}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", FILES)
def test_sums_of_many_small_steps_are_fp32_in_files(kind, dtype, tmp_path):
    feed = {"x0": np.random.default_rng(1).standard_normal((4, WIDTH)).astype(np.float32)}
    result = amprewrite.rewrite_onnx(FILES[kind](tmp_path / "m.onnx"), tmp_path / "low.onnx", dtype=dtype, calibration=feed)
    sums = [each for region in result.plan.regions for each in region.nodes if each.name.startswith("sum")]
    assert sums and all(each.colour is Colour.HIGH and each.reason is Reason.SMALL_STEPS for each in sums)
    assert result.report.strict_error < (2e-3 if dtype == "fp16" else 1e-2)


@pytest.mark.parametrize(("step", "steps"), [(1.0, 40), (np.full(WIDTH, 0.8), 40), (0.05, 4)], ids=["large", "a large layer scale", "few"])
def test_large_steps_and_few_ones_are_left_to_their_price_in_files(step, steps, tmp_path):
    result = amprewrite.rewrite_onnx(unrolled(tmp_path / "m.onnx", step, steps), tmp_path / "low.onnx", dtype="bf16")
    assert all(each.reason is not Reason.SMALL_STEPS for region in result.plan.regions for each in region.nodes)


def carried(path, steps: int = 40) -> str:
    """An average that begins with an input and takes in what a product gave: `h = 0.98 * h + 0.02 * u * c`."""
    nodes = [node("MatMul", ["x0", "w"], ["u"]), node("Identity", ["x0"], ["h0"])]
    for i in range(steps):
        nodes += [node("Mul", ["u", f"c{i}"], [f"s{i}"]), node("Mul", [f"s{i}", "step"], [f"t{i}"])]
        nodes += [node("Mul", [f"h{i}", "keep"], [f"k{i}"]), node("Add", [f"k{i}", f"t{i}"], [f"h{i + 1}"], name=f"sum{i}")]
    constants = {f"c{i}": np.float32(1 + i / 7) for i in range(steps)} | {"keep": np.float32(0.98)}
    return saved(path, [*nodes, node("MatMul", [f"h{steps}", "w"], ["y"])], 0.02, constants)


def test_running_sums_are_fp32_in_files(tmp_path):
    feed = {"x0": np.random.default_rng(1).standard_normal((4, WIDTH)).astype(np.float32)}
    result = amprewrite.rewrite_onnx(carried(tmp_path / "m.onnx"), tmp_path / "low.onnx", dtype="bf16", calibration=feed)
    sums = [each for region in result.plan.regions for each in region.nodes if each.name.startswith("sum")]
    assert len(sums) == 40 and all(each.colour is Colour.HIGH for each in sums)
    assert any(each.reason is Reason.RUNNING_SUM for each in sums)
    assert result.report.strict_error < 1e-2


def turned(path, update: list[onnx.NodeProto]) -> str:
    """A loop whose state "s" the nodes `update` change, beside a state "x" that a product changes. Its result is made of both."""
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "s"], ["hs"]), node("Tanh", ["hs"], ["x1"]), *update]
    body = helper.make_graph(
        [*nodes, node("Identity", ["go"], ["on"])],
        "body", [value("i", TensorProto.INT64, ()), value("go", TensorProto.BOOL, ()), value("x"), value("s", shape=())],
        [value("on", TensorProto.BOOL, ()), value("x1"), value("s1", shape=())],
    )  # fmt: skip
    loop = node("Loop", ["turns", "true", "x0", "s0"], ["last", "_s"], body=body)
    constants = {"turns": np.int64(100), "true": np.array(True), "s0": np.float32(1), "rate": np.float32(0.99)}
    return saved(path, [loop, node("MatMul", ["last", "w"], ["y"])], 0.01, constants)


UPDATES = {
    "time": [node("Add", ["s", "step"], ["s1"], name="update")],
    "decay": [node("Mul", ["s", "rate"], ["s1"], name="update")],
    "average": [
        node("ReduceMean", ["h"], ["m"], keepdims=0), node("Mul", ["m", "step"], ["n"]), node("Mul", ["s", "rate"], ["d"]),
        node("Add", ["d", "n"], ["s1"], name="update"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("update", UPDATES)
def test_states_that_a_loop_adds_to_or_scales_are_fp32_in_files(update, tmp_path):
    feed = {"x0": np.random.default_rng(1).standard_normal((4, WIDTH)).astype(np.float32)}
    result = amprewrite.rewrite_onnx(turned(tmp_path / "m.onnx", UPDATES[update]), dtype="bf16", calibration=feed)
    colours = {each.name: each.colour for region in result.plan.regions for each in region.nodes}
    assert colours["update"] is Colour.HIGH
    assert result.report.strict_error < 5e-3


def test_a_state_that_a_loop_appends_to_stays_low(tmp_path):
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Tanh", ["h"], ["x1"]), node("Concat", ["s", "x1"], ["s1"], axis=0, name="append")]
    body = helper.make_graph(
        [*nodes, node("Identity", ["go"], ["on"])],
        "body", [value("i", TensorProto.INT64, ()), value("go", TensorProto.BOOL, ()), value("x"), value("s", shape=("n", WIDTH))],
        [value("on", TensorProto.BOOL, ()), value("x1"), value("s1", shape=("m", WIDTH))],
    )  # fmt: skip
    nodes = [node("MatMul", ["x0", "w"], ["h0"]), node("Loop", ["turns", "true", "h0", "s0"], ["_x", "all"], body=body)]
    constants = {"turns": np.int64(9), "true": np.array(True), "s0": np.zeros((0, WIDTH), np.float32)}
    nodes += [node("MatMul", ["all", "w"], ["ys"]), node("ReduceSum", ["ys"], ["z"], keepdims=0), node("Add", ["z", "x0"], ["y"])]
    result = amprewrite.rewrite_onnx(saved(tmp_path / "m.onnx", nodes, 1.0, constants), dtype="fp16")
    colours = {each.name: each.colour for region in result.plan.regions for each in region.nodes}
    assert colours["append"] is Colour.LOW


def stream(path, blocks: int, around: bool) -> str:
    """A residual stream behind an input, with branches as large as the stream. `around`: norms stand behind the sums, not in branches."""
    nodes = []
    for i in range(blocks):
        read = f"x{i}" if around else f"n{i}"
        nodes += [node("MatMul", [read, "w"], [f"m{i}"]), node("Relu", [f"m{i}"], [f"r{i}"]), node("MatMul", [f"r{i}", "w"], [f"f{i}"])]
        norm = node("LayerNormalization", [f"s{i}" if around else f"x{i}", "one"], [f"x{i + 1}" if around else f"n{i}"], axis=-1)
        add = node("Add", [f"x{i}", f"f{i}"], [f"s{i}" if around else f"x{i + 1}"], name=f"sum{i}")
        nodes = [*nodes, add, norm] if around else [*nodes[:-3], norm, *nodes[-3:], add]
    return saved(path, [*nodes, node("MatMul", [f"x{blocks}", "w"], ["y"])], 1.0, {"one": np.ones(WIDTH, np.float32)})


@pytest.mark.parametrize(("blocks", "around", "high"), [(12, False, False), (12, True, False), (40, True, False), (40, False, True)])
def test_residual_streams_of_a_file_stay_fp32_from_32_sums_on(tmp_path, blocks, around, high):
    """A file is not compared with torch.autocast, and each cast in it is a kernel."""
    feed = {"x0": np.random.default_rng(1).standard_normal((4, WIDTH)).astype(np.float32)}
    result = amprewrite.rewrite_onnx(stream(tmp_path / "m.onnx", blocks, around), dtype="fp16", calibration=feed)
    sums = [each for region in result.plan.regions for each in region.nodes if each.name.startswith("sum")]
    assert len(sums) == blocks and any(each.reason is Reason.RUNNING_SUM for each in sums) == high
