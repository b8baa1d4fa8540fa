"""What files hold beside plain nets, and what users get wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx_help import F16, F32, HAND, I64, colours, const, gemm_chain, graph, net, node, noise, ops, run, value, weight

from amprewrite import AmpRewriteWarning, CaptureError
from amprewrite.api.onnx.convert import rewrite_onnx


def stored(model: onnx.ModelProto) -> dict[str, int]:
    return {tensor.name: tensor.data_type for tensor in model.graph.initializer}


# -- structure ---------------------------------------------------------------------------
def test_names_docs_and_metadata_are_kept():
    given = gemm_chain(node("Relu", ["h"], ["mid"], name="act", doc_string="keep me"))
    given.model.metadata_props.add(key="who", value="me")
    given.model.graph.node[1].metadata_props.add(key="scope", value="a.b")
    made = rewrite_onnx(given.model).model
    assert [v.name for v in made.graph.output] == ["out"]
    act = next(n for n in made.graph.node if n.name == "act")
    assert act.doc_string == "keep me"
    assert {p.key for p in act.metadata_props} == {"scope", "amprewrite.colour", "amprewrite.reason"}
    assert {p.key: p.value for p in made.metadata_props} == {"who": "me"}
    assert set(stored(made)) == {"w0", "w1"}


@pytest.mark.parametrize("name", ["h__raw", "h__down", "h__raw_", "h__raw_down", "x__raw"])
def test_values_may_have_names_that_rounding_would_choose(name):
    given = gemm_chain(node("Tanh", ["h"], [name]), result=name)
    result = rewrite_onnx(given.model, calibration=given.feed, keep_io=False)
    assert 0 < result.report.strict_error < 1e-2


def test_an_output_that_is_read_inside_keeps_its_name_and_type():
    nodes = [node("MatMul", ["x", "w"], ["y"], name="a"), node("MatMul", ["y", "w"], ["z"], name="b")]
    given = net(nodes, [value("x", 4, 16)], [value("y", 4, 16), value("z", 4, 16)], [weight("w", 16, 16)], {"x": noise(4, 16)})
    result = rewrite_onnx(given.model)
    assert [(v.name, v.type.tensor_type.elem_type) for v in result.model.graph.output] == [("y", F32), ("z", F32)]
    assert ops(result.model)["Cast"] == 3
    assert stored(result.model) == {"w": F16}


@pytest.mark.parametrize("said", [value("x", 16), helper.make_tensor_value_info("x", F32, None)], ids=["another", "none"])
@pytest.mark.parametrize("as_file", [False, True])
def test_an_input_that_is_an_output_keeps_its_shape_whatever_the_output_says(as_file, said, tmp_path):
    """Without a shape of the input ONNX Runtime aborted the process."""
    feed, outs = {"x": noise(4, 16)}, [value("out", 4, 16), said]
    given = net([node("MatMul", ["x", "w"], ["out"])], [value("x", 4, 16)], outs, [weight("w", 16, 16)], feed)
    onnx.save(given.model, tmp_path / "model.onnx")
    made = rewrite_onnx(tmp_path / "model.onnx" if as_file else given.model).model
    out, x = run(made, feed)
    assert out.shape == (4, 16) and np.array_equal(x, feed["x"])


def test_a_constant_read_in_both_formats_is_stored_twice_and_never_cast():
    given = gemm_chain(node("Add", ["h", "c"], ["a"], name="add"), node("Exp", ["a"], ["e"]), node("Mul", ["e", "c"], ["mid"]),
                       inits=[const("c", np.full(16, 0.3))])  # fmt: skip
    made = rewrite_onnx(given.model, overrides={"add": "allow", "mul": "deny"}).model
    assert stored(made) == {"w0": F16, "w1": F16, "c": F32, "c_fp16": F16}


def test_constant_nodes_are_stored_low():
    tensor = const("k", np.full(16, 0.5))
    made = rewrite_onnx(gemm_chain(node("Constant", [], ["k"], value=tensor), node("Mul", ["h", "k"], ["mid"])).model).model
    held = next(n for n in made.graph.node if n.op_type == "Constant")
    assert held.attribute[0].t.data_type == F16


@pytest.mark.parametrize("opset", [18, 21])
def test_quantised_parts_are_left_alone(opset):
    """From opset 19 on, a QuantizeLinear may read low values, with a scale of their type. Its scale stays that of the DequantizeLinear."""
    given = gemm_chain(
        node("QuantizeLinear", ["h", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["dq"]),
        node("MatMul", ["dq", "w2"], ["mid"], name="int8"),
        inits=[const("s", 0.02), const("z", 0, np.int8), weight("w2", 16, 16)],
        opset=opset,
    )
    made = rewrite_onnx(given.model).model
    assert colours(made)["int8"] == "high"
    assert stored(made)["s"] == stored(made)["w2"] == F32
    assert len({each.input[1] for each in made.graph.node if "quantize" in each.op_type.lower()}) == 1


def test_unknown_domains_are_listed_walls():
    given = net(
        [node("MatMul", ["x", "w"], ["h"], name="a"), node("Strange", ["h"], ["s"], domain="acme", name="b"),
         node("MatMul", ["s", "w"], ["out"], name="c")],
        [value("x", 4, 16)], [value("out", 4, 16)], [weight("w", 16, 16)], {}, domains=["acme"],
    )  # fmt: skip
    result = rewrite_onnx(given.model, verify=False)
    assert any("acme::Strange is on no list (1 nodes)" in note for note in result.report.notes)
    assert any("no sample run" in note for note in result.report.notes)
    assert colours(result.model) == {"a": "low", "b": "high", "c": "low"}


def calls(second: str, opset: int) -> onnx.ModelProto:
    """A call of a function of two ops, of an opset of its own."""
    inside = [node("MatMul", ["a", "b"], ["t"]), node(second, ["t", "b"] if second == "MatMul" else ["t"], ["c"])]
    function = helper.make_function("local", "Twice", ["a", "b"], ["c"], inside, [helper.make_opsetid("", opset)])
    return net([node("Twice", ["x", "w"], ["out"], domain="local")], [value("x", 4, 16)], [value("out", 4, 16)],
               [weight("w", 16, 16)], {}, functions=[function], domains=["local"]).model  # fmt: skip


@pytest.mark.parametrize("opset", [18, 17, 13, 19])
def test_local_functions_are_inlined(opset):
    result = rewrite_onnx(calls("MatMul", opset))
    assert "1 local functions were inlined" in result.report.notes
    assert ops(result.model) == {"MatMul": 2, "Cast": 2}


def test_a_model_that_names_no_opset_takes_that_of_its_functions():
    model = calls("ReduceMean", 18)
    del model.opset_import[0]
    assert {each.domain: each.version for each in rewrite_onnx(model).model.opset_import} == {"local": 1, "": 18}


def test_a_function_of_another_opset_at_which_its_ops_mean_something_else_is_refused():
    said = "function Twice is of opset 17 and the model of 18, and ReduceMean changed in between; inline it with"
    with pytest.raises(CaptureError, match=said):
        rewrite_onnx(calls("ReduceMean", 17))


def test_inner_io_may_be_low():
    result = rewrite_onnx(gemm_chain(node("Relu", ["h"], ["mid"])).model, keep_io=False)
    assert {v.type.tensor_type.elem_type for v in (*result.model.graph.input, *result.model.graph.output)} == {F16}
    assert "Cast" not in ops(result.model)


def test_a_branch_may_give_a_captured_value():
    then = graph([node("Identity", ["h"], ["t"])], "then", [], [value("t", 4, 16)])
    other = graph([node("Exp", ["h"], ["e"])], "else", [], [value("e", 4, 16)])
    given = gemm_chain(node("If", ["yes"], ["mid"], then_branch=then, else_branch=other), inits=[const("yes", True, np.bool_)])
    result = rewrite_onnx(given.model, calibration=given.feed)
    np.testing.assert_allclose(run(result.model, given.feed)[0], run(given.model, given.feed)[0], rtol=0, atol=2e-2)


def test_initialisers_listed_as_inputs_become_constants():
    given = gemm_chain(node("Relu", ["h"], ["mid"]))
    given.model.graph.input.append(value("w0", 16, 16))
    given.model.ir_version = 3
    assert stored(rewrite_onnx(given.model).model)["w0"] == F16


def test_strings_pass_through_untouched():
    text = onnx.TensorProto.STRING
    nodes = [
        node("MatMul", ["x", "w"], ["out"], name="a"),
        node("ArgMax", ["out"], ["best"], axis=1, keepdims=0),
        node("Gather", ["labels", "best"], ["label"]),
        node("Identity", ["said"], ["again"]),
    ]
    inits = [weight("w", 16, 16), helper.make_tensor("labels", text, [16], [f"class {at}".encode() for at in range(16)])]
    outs = [value("out", 4, 16), value("label", 4, dtype=text), value("again", 2, dtype=text)]
    given = net(nodes, [value("x", 4, 16), value("said", 2, dtype=text)], outs, inits, {"x": noise(4, 16), "said": np.array(["A", "b"])})
    for calibration in (None, given.feed):
        result = rewrite_onnx(given.model, calibration=calibration)
        assert colours(result.model)["a"] == "low" and result.report.strict_error < 2e-3
        assert not any("no sample run" in note for note in result.report.notes)
        (_, label, again), (_, wanted, _) = run(result.model, given.feed), run(given.model, given.feed)
        assert list(label) == list(wanted) and list(again) == ["A", "b"]


@pytest.mark.parametrize("op", ["Concat", "ScatterND"])
def test_an_empty_constant_is_a_constant_like_any_other(op):
    """As that of a cache that holds nothing yet."""
    made = {"Concat": node(op, ["h", "empty"], ["mid"], name="op", axis=0), "ScatterND": node(op, ["h", "at", "empty"], ["mid"], name="op")}
    given = gemm_chain(made[op], inits=[const("empty", np.zeros((0, 16))), const("at", np.zeros((0, 1)), np.int64)])
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert colours(result.model)["op"] == "low"
    np.testing.assert_allclose(run(result.model, given.feed)[0], run(given.model, given.feed)[0], rtol=0, atol=2e-2)


# -- masks --------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_fully_masked_row_gives_what_it_gave(dtype):
    nodes = [
        node("MatMul", ["x", "wq"], ["q"], name="q"),
        node("Transpose", ["q"], ["k"], perm=[1, 0]),
        node("MatMul", ["q", "k"], ["scores"], name="scores"),
        node("Where", ["mask", "zero", "lowest"], ["bias"]),
        node("Add", ["scores", "bias"], ["masked"]),
        node("Softmax", ["masked"], ["p"]),
        node("MatMul", ["p", "q"], ["out"], name="mix"),
    ]
    inits = [weight("wq", 16, 16), const("zero", 0.0), const("lowest", np.finfo(np.float32).min)]
    mask = np.ones((4, 4), bool)
    mask[1] = False
    mask[2, 2:] = False
    ins = [value("x", 4, 16), value("mask", 4, 4, dtype=onnx.TensorProto.BOOL)]
    given = net(nodes, ins, [value("out", 4, 16)], inits, {"x": noise(4, 16), "mask": mask})
    result = rewrite_onnx(given.model, calibration=given.feed, dtype=dtype)
    assert all(colour == "low" for name, colour in colours(result.model).items() if name in ("q", "scores", "mix"))
    assert len([cast for cast in result.plan.casts if not cast.weight]) == 2
    assert result.report.strict_error is not None
    assert result.report.strict_error < (3e-3 if dtype == "fp16" else 3e-2)


# -- ranges -------------------------------------------------------------------------------
def test_an_epsilon_that_would_vanish_keeps_its_chain_high():
    given = HAND["underflow"]()
    low = colours(rewrite_onnx(given.model, calibration=given.feed).model)
    assert low["tiny"] == low["scale"] == low["add_eps"] == "high"


@pytest.mark.parametrize(("size", "scale", "low"), [(1e-12, 1.0, True), (1e-6, 1.0, True), (1e-12, 1e-9, False), (1e5, 1.0, False)])
def test_a_bias_that_drowns_in_its_product_may_be_flushed(size, scale, low):
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv"),
        node("LayerNormalization", ["c", "one", "b"], ["n"], name="norm"),
        node("Flatten", ["n"], ["f"]),
        node("Gemm", ["f", "v", "g"], ["out"], name="gemm"),
    ]
    kernel = numpy_helper.from_array((noise(8, 3, 1) * scale).astype(np.float32), "w")
    biases = [numpy_helper.from_array(np.full(8, size, np.float32), name) for name in ("b", "g")]
    inits = [kernel, numpy_helper.from_array(np.ones(8, np.float32), "one"), weight("v", 64, 8), *biases]
    given = net(nodes, [value("x", 2, 3, 8)], [value("out", 2, 8)], inits, {"x": noise(2, 3, 8)})
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert (colours(result.model)["conv"] == "low") == low
    if scale == 1.0 and low:
        assert colours(result.model)["gemm"] == "low"
        assert result.report.strict_error is not None and result.report.strict_error < 2e-3


@pytest.mark.parametrize("doubled", [False, True])
def test_a_divisor_that_vanishes_in_part_keeps_its_op_high(doubled):
    sizes = numpy_helper.from_array(np.array([1, 1e-7, 1e-9, 1, 1, 1, 1e-8, 1], np.float32), "sizes")
    between = [node("Add", ["sizes", "sizes"], ["twice"])] if doubled else []
    nodes = [
        node("Gemm", ["x", "w0"], ["h"], name="first"),
        node("Mul", ["h", "sizes"], ["small"]),
        *between,
        node("Div", ["small", "twice" if doubled else "sizes"], ["ratio"], name="div"),
        node("Gemm", ["ratio", "w1"], ["out"], name="last"),
    ]
    inits = [weight("w0", 8, 8), weight("w1", 8, 8), sizes]
    given = net(nodes, [value("x", 4, 8)], [value("out", 4, 8)], inits, {"x": noise(4, 8)})
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert colours(result.model)["div"] == "high"
    assert result.report.strict_error is not None and result.report.strict_error < 2e-3


def test_ops_denied_for_their_range_run_low_where_it_is_kept():
    given = gemm_chain(node("Pow", ["h", "two"], ["mid"], name="pow"), inits=[const("two", 2.0)])
    assert colours(rewrite_onnx(given.model, calibration=given.feed).model)["pow"] == "low"
    far = {"x": given.feed["x"] * 200}
    assert colours(rewrite_onnx(given.model, calibration=far).model)["pow"] == "high"
    for op in ("square", "Pow"):
        assert colours(rewrite_onnx(given.model, calibration=given.feed, overrides={op: "deny"}).model)["pow"] == "high"


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_an_override_by_onnx_name_is_for_all_names_that_the_op_has(reduction):
    inits = [const("at", np.zeros((1, 16)), np.int64), const("new", np.ones((1, 16)))]
    given = gemm_chain(node("ScatterElements", ["h", "at", "new"], ["mid"], name="put", reduction=reduction), inits=inits)
    for word, colour in (("allow", "low"), ("deny", "high")):
        result = rewrite_onnx(given.model, calibration=given.feed, overrides={"ScatterElements": word})
        assert colours(result.model)["put"] == colour


@pytest.mark.parametrize("overrides", [{"Pow": "deny", "Sqrt": "allow"}, {"Sqrt": "allow", "Pow": "deny"}])
def test_an_override_for_an_op_goes_before_that_for_an_op_that_may_be_it(overrides):
    nodes = [node("Abs", ["h"], ["a"]), node("Sqrt", ["a"], ["r"], name="root"), node("Pow", ["r", "two"], ["mid"], name="pow")]
    given = gemm_chain(*nodes, inits=[const("two", 2.0)])
    low = colours(rewrite_onnx(given.model, calibration=given.feed, overrides=overrides).model)
    assert (low["root"], low["pow"]) == ("low", "high")


# -- what models are -----------------------------------------------------------------------------
def test_a_model_in_fp16_already_comes_out_as_it_was():
    nodes = [node("MatMul", ["x", "w"], ["out"], name="a")]
    held = onnx.numpy_helper.from_array(noise(16, 16).astype(np.float16), "w")
    given = net(nodes, [value("x", 4, 16, dtype=F16)], [value("out", 4, 16, dtype=F16)], [held], {})
    result = rewrite_onnx(given.model)
    assert any("nothing to rewrite" in note for note in result.report.notes)
    assert ops(result.model) == {"MatMul": 1}


def test_open_dims_may_be_empty_at_run_time():
    nodes = [node("MatMul", ["x", "w"], ["h"], name="a"), node("Relu", ["h"], ["out"])]
    given = net(nodes, [value("x", "n", 16)], [value("out", "n", 16)], [weight("w", 16, 16)], {})
    assert run(rewrite_onnx(given.model).model, {"x": noise(0, 16)})[0].shape == (0, 16)


def test_scatters_that_add_up_stay_fp32():
    scatter = node("ScatterND", ["h", "at", "more"], ["mid"], name="scatter", reduction="add")
    given = gemm_chain(scatter, inits=[const("at", [[0]], np.int64), const("more", np.ones((1, 16)))])
    assert colours(rewrite_onnx(given.model).model)["scatter"] == "high"


def test_sequences_in_a_loop_are_walled_off():
    body = graph(
        [node("SequenceInsert", ["s_in", "h"], ["s_out"]), node("Identity", ["c_in"], ["c_out"])],
        "body",
        [value("i", dtype=I64), value("c_in", dtype=onnx.TensorProto.BOOL), onnx.ValueInfoProto(name="s_in")],
        [value("c_out", dtype=onnx.TensorProto.BOOL), onnx.ValueInfoProto(name="s_out")],
    )
    given = gemm_chain(
        node("SequenceEmpty", [], ["empty"]),
        node("Loop", ["n", "yes", "empty"], ["rows"], body=body),
        node("ConcatFromSequence", ["rows"], ["mid"], axis=0),
        inits=[const("n", 2, np.int64), const("yes", True, np.bool_)],
    )
    given.model.graph.output[0].CopyFrom(value("out", 8, 16))
    result = rewrite_onnx(given.model, calibration=given.feed)
    assert run(result.model, given.feed)[0].shape == (8, 16)
    assert colours(result.model)["first"] == colours(result.model)["last"] == "low"


def test_integers_that_are_no_mask_are_not_made_low_unseen():
    nodes = [node("Cast", ["ids"], ["f"], to=F32, name="cast"), node("MatMul", ["f", "w"], ["out"], name="a")]
    given = net(nodes, [value("ids", 4, 16, dtype=I64)], [value("out", 4, 16)], [weight("w", 16, 16)], {})
    large = {"ids": np.full((4, 16), 3001)}
    assert colours(rewrite_onnx(given.model, calibration=large).model)["cast"] == "high"


# -- opsets and types ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("op", "dtype", "given_opset", "opset"),
    [("Relu", "fp16", 13, 13), ("Relu", "bf16", 13, 13), ("Softplus", "fp16", 18, 18), ("Softplus", "bf16", 18, 22)],
)
def test_the_opset_is_raised_only_where_a_type_needs_it(op, dtype, given_opset, opset):
    given = gemm_chain(node(op, ["h"], ["mid"], name="act"), opset=given_opset)
    result = rewrite_onnx(given.model, dtype=dtype, calibration=given.feed)
    assert result.model.opset_import[0].version == opset
    assert any("opset raised" in note for note in result.report.notes) == (opset != given_opset)
    assert result.report.strict_error < 3e-2


def test_no_opset_is_raised_beyond_what_runtimes_load():
    """Einsum takes bf16 from opset 28 on only, which no runtime in use loads: it stays fp32 and says so."""
    given = gemm_chain(node("Einsum", ["h", "w2"], ["mid"], name="ein", equation="ij,jk->ik"), inits=[weight("w2", 16, 16)])
    result = rewrite_onnx(given.model, dtype="bf16", calibration=given.feed)
    assert result.model.opset_import[0].version == 18
    assert "Einsum of opset 18 takes no bf16" in result.plan.explain("ein")


def test_a_cast_that_the_model_had_is_aimed_at_the_low_format():
    given = gemm_chain(
        node("Cast", ["ids"], ["f"], to=F32, name="own"), node("Mul", ["h", "f"], ["mid"], name="mul"), inits=[const("ids", 2, np.int64)]
    )
    result = rewrite_onnx(given.model, calibration=given.feed)
    own = next(each for each in result.model.graph.node if each.name == "own")
    assert own.attribute[0].i == F16
    assert len([cast for cast in result.plan.casts if not cast.weight]) == ops(result.model)["Cast"] - 1 == 2


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_draw_whose_result_has_no_operand_s_type_stays_fp32(dtype):
    """The result of Bernoulli has a type variable of its own, and without `dtype` the operand's type, which is always fp32."""
    given = gemm_chain(node("Sigmoid", ["h"], ["p"]), node("Bernoulli", ["p"], ["b"], name="draw"), node("Mul", ["h", "b"], ["mid"]))
    result = rewrite_onnx(given.model, dtype=dtype)
    assert result.report.valid and colours(result.model)["draw"] == "high"


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_what_was_mixed_already_stays_right(dtype):
    given = HAND["casts"]()
    once = rewrite_onnx(given.model, dtype="fp16", calibration=given.feed)
    again = rewrite_onnx(once.model, dtype=dtype, calibration=given.feed)
    assert again.report.valid
    assert again.report.strict_error < (2e-3 if dtype == "fp16" else 2e-2)


# -- what sample runs decide ------------------------------------------------------------------------
def test_a_difference_that_magnifies_rounding_is_not_made_of_low_values():
    between = [node("Mul", ["h", "k"], ["a"], name="large"), node("Reshape", ["a", "shape"], ["v"], name="view"),
               node("Mul", ["h", "l"], ["b"], name="near"), node("Sub", ["v", "b"], ["mid"], name="back")]  # fmt: skip

    def given_with(k: float, less: float) -> Any:
        inits = [const("k", np.full(16, k)), const("l", np.full(16, k - less)), const("shape", [4, 16], np.int64)]
        return gemm_chain(*between, inits=inits)

    given = given_with(1000.3, 1.0)
    result = rewrite_onnx(given.model, calibration=given.feed)
    low = colours(result.model)
    assert [low[name] for name in ("first", "large", "view", "near", "back", "last")] == ["low", "high", "high", "high", "high", "low"]
    assert "magnified by a difference (back stays within" in result.plan.explain("back")
    assert result.report.strict_error < 2e-3
    apart = given_with(2.3, 1.0)
    assert set(colours(rewrite_onnx(apart.model, calibration=apart.feed).model).values()) == {"low"}


def test_an_exp_runs_low_where_it_is_seen_to_be_small():
    given = gemm_chain(node("Sigmoid", ["h"], ["s"]), node("Exp", ["s"], ["mid"], name="exp"))
    assert colours(rewrite_onnx(given.model, calibration=given.feed).model)["exp"] == "low"
    assert colours(rewrite_onnx(given.model, calibration=given.feed, overrides={"exp": "deny"}).model)["exp"] == "high"
    assert colours(rewrite_onnx(given.model, calibration=given.feed, lists="autocast").model)["exp"] == "high"
    wide = gemm_chain(node("Mul", ["h", "k"], ["s"]), node("Exp", ["s"], ["mid"], name="exp"), inits=[const("k", 3.0)])
    assert colours(rewrite_onnx(wide.model, calibration=wide.feed).model)["exp"] == "high"


def test_casts_to_fp8_that_differ_in_what_is_beyond_the_range_stay_apart():
    casts = [
        node("Cast", ["h"], ["a"], to=onnx.TensorProto.FLOAT8E4M3FN, saturate=1),
        node("Cast", ["h"], ["b"], to=onnx.TensorProto.FLOAT8E4M3FN, saturate=0),
        node("Cast", ["a"], ["c"], to=F32), node("Cast", ["b"], ["d"], to=F32),
    ]  # fmt: skip
    outputs = [value("c", 8, 64), value("d", 8, 64)]
    x = {"x": 300 * noise(8, 64)}
    given = net([node("MatMul", ["x", "w"], ["h"]), *casts], [value("x", 8, 64)], outputs, [weight("w", 64, 64)], x, opset=19)
    made = rewrite_onnx(given.model, calibration=x).model
    nans = [np.isnan(result).sum() for result in run(made, x)]
    assert nans[0] == 0
    assert nans[1] > 0


def test_a_branch_may_hold_its_result_and_no_node():
    then = graph([], "then", [], [value("held", 4, 16)], [weight("held", 4, 16)])
    otherwise = graph([node("MatMul", ["x", "w"], ["z"])], "otherwise", [], [value("z", 4, 16)])
    nodes = [node("If", ["c"], ["y"], then_branch=then, else_branch=otherwise), node("MatMul", ["y", "w"], ["out"])]
    given = net(
        nodes, [value("x", 4, 16), value("c", dtype=onnx.TensorProto.BOOL)], [value("out", 4, 16)], [weight("w", 16, 16)],
        {"x": noise(4, 16), "c": np.array(True)},
    )  # fmt: skip
    made = rewrite_onnx(given.model, calibration=given.feed).model
    np.testing.assert_allclose(run(made, given.feed)[0], run(given.model, given.feed)[0], rtol=0.02, atol=0.02)


def test_a_constant_may_lie_beside_the_file(tmp_path):
    held = numpy_helper.from_array(noise(16, 16), "held")
    (tmp_path / "held.bin").write_bytes(held.raw_data)
    held.ClearField("raw_data")
    held.data_location = onnx.TensorProto.EXTERNAL
    held.external_data.add(key="location", value="held.bin")
    nodes = [node("Constant", [], ["w"], value=held), node("MatMul", ["x", "w"], ["out"])]
    given = net(nodes, [value("x", 4, 16)], [value("out", 4, 16)], [], {"x": noise(4, 16)})
    onnx.save(given.model, tmp_path / "model.onnx")
    made = rewrite_onnx(tmp_path / "model.onnx").model
    expected = given.feed["x"] @ np.frombuffer((tmp_path / "held.bin").read_bytes(), np.float32).reshape(16, 16)
    np.testing.assert_allclose(run(made, given.feed)[0], expected, rtol=0.02, atol=0.02)


def test_a_result_that_overflows_in_a_body_is_told():
    def block(result: str) -> list[onnx.NodeProto]:
        return [
            node("MatMul", ["x", "large"], [f"{result}_a"]),
            node("Mul", [f"{result}_a", "small"], [f"{result}_b"]),
            node("MatMul", [f"{result}_b", "w"], [result]),
        ]

    branches = {f"{name}_branch": graph(block(name), name, [], [value(name, 4, 16)]) for name in ("then", "else")}
    inits = [weight("w", 16, 16), weight("large", 16, 16, scale=1.5e4), const("small", 1e-4)]
    given = net(
        [node("If", ["c"], ["out"], **branches)],
        [value("x", 4, 16), value("c", dtype=onnx.TensorProto.BOOL)],
        [value("out", 4, 16)],
        inits,
        {"x": noise(4, 16), "c": np.array(True)},
    )
    with pytest.warns(AmpRewriteWarning, match="bodies of If, Loop and Scan"):
        result = rewrite_onnx(given.model, calibration=given.feed)
    assert not np.isfinite(result.report.strict_error)


def test_a_list_of_tensors_in_a_node_stays_in_the_file():
    own = node("Own", ["h"], ["mid"], name="own", domain="mine", tables=[numpy_helper.from_array(noise(2, 2), "t")])
    nodes = [node("MatMul", ["x", "w"], ["h"]), own]
    given = net(nodes, [value("x", 4, 16)], [value("mid", 4, 16)], [weight("w", 16, 16)], {}, domains=["mine"])
    made = rewrite_onnx(given.model, verify=False).model
    assert [attribute for each in made.graph.node if each.op_type == "Own" for attribute in each.attribute] == list(own.attribute)
