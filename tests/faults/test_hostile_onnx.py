"""ONNX files and samples that were made to hurt: each gets a clear error or a right answer, quickly, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import random
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_help import BF16, BOOL, F16, F32, I64, const, gemm_chain, graph, node, noise, value, weight
from tally import Tally

from amprewrite import CaptureError, EmitError, PolicyError
from amprewrite.api.cli.main import main
from amprewrite.api.onnx.convert import rewrite_onnx

PATIENCE = 60.0
"""Seconds that no file may take, on a machine where others work, too."""


def made(nodes, ins, outs, inits=(), opset: int = 18, functions=(), extra=()) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in extra)]
    return helper.make_model(graph(nodes, "g", ins, outs, list(inits)), opset_imports=opsets, ir_version=9, functions=list(functions))


def relu() -> onnx.ModelProto:
    return gemm_chain(node("Relu", ["h"], ["mid"], name="act")).model


# -- external data ------------------------------------------------------------------------
def external(folder: Path, location: str, **more: int) -> Path:
    """A model in `folder` whose weight lies at `location`."""
    tensor = TensorProto(name="w", data_type=F32, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    for key, word in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(word))
    model = made([node("MatMul", ["x", "w"], ["y"])], [value("x", 4, 4)], [value("y", 4, 4)], [tensor])
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("kind", ["dots", "absolute", "link", "hard link", "folder link", "nothing", "pipe", "negative", "short"])
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, kind: str) -> None:
    secret, folder = tmp_path / "secret.bin", tmp_path / "model"
    secret.write_bytes(bytes(64))
    folder.mkdir()
    locations = {"dots": "../secret.bin", "absolute": str(secret), "nothing": "", "folder link": "out/secret.bin"}
    location, more = locations.get(kind, "w.bin"), {}
    if kind == "link":
        (folder / "w.bin").symlink_to(secret)
    elif kind == "hard link":
        os.link(secret, folder / "w.bin")
    elif kind == "folder link":
        (folder / "out").symlink_to(tmp_path)
    elif kind == "pipe":
        os.mkfifo(folder / "w.bin")
    elif kind in ("negative", "short"):
        (folder / "w.bin").write_bytes(bytes(64))
        more = {"offset": -8} if kind == "negative" else {"length": 8}
    path = external(folder, location, **more)
    with pytest.raises(CaptureError, match=r"m\.onnx") as caught:
        rewrite_onnx(path, folder / "out.onnx")
    assert "please report" not in str(caught.value)
    assert not (folder / "out.onnx").exists()


def test_external_data_of_a_constant_node_is_checked_too(tmp_path: Path) -> None:
    tensor = TensorProto(name="k", data_type=F32, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../secret.bin")
    model = made([node("Constant", [], ["k"], value=tensor), node("Add", ["x", "k"], ["y"])], [value("x", 4)], [value("y", 4)])
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(CaptureError, match="no path inside the model's folder"):
        rewrite_onnx(path)


def branching(branch: onnx.GraphProto, folder: Path) -> Path:
    """A model with a function of its own, in which an If has `branch` twice."""
    taken = node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    function = helper.make_function("own", "f", ["x", "c"], ["y"], [taken], [helper.make_opsetid("", 18)])
    call = node("f", ["x", "c"], ["y"], domain="own")
    path = folder / "m.onnx"
    model = made([call], [value("x", 4), value("c", dtype=BOOL)], [value("y", 4)], functions=[function], extra=["own"])
    path.write_bytes(model.SerializeToString())
    return path


def branch_with(location: str = "", twice: bool = False, gap: bool = False) -> onnx.GraphProto:
    tensor = const("k", np.ones(4, np.float32))
    if location:
        tensor = TensorProto(name="k", data_type=F32, dims=[4], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=location)
    last = node("Sum", ["s", ""], ["z"]) if gap else node("Relu", ["s"], ["z"])
    nodes = [node("Constant", [], ["k"], value=tensor), node("Add", ["x", "k"], ["s"]), last]
    return graph(nodes, "body", [], [value("z", 4)], [const("w", np.ones(4, np.float32))] * (2 if twice else 1))


def test_subgraphs_inside_functions_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "ok.bin").write_bytes(np.ones(4, np.float32).tobytes())
    for branch, says in (
        (branch_with("../secret.bin"), "no path inside the model's folder"),
        (branch_with(twice=True), "two initialisers named w"),
        (branch_with(gap=True), "has an operand without a name"),
    ):
        with pytest.raises(CaptureError, match=says):
            rewrite_onnx(branching(branch, tmp_path))
    rewrite_onnx(branching(branch_with("ok.bin"), tmp_path))


# -- sizes, functions, loops -------------------------------------------------------------------
def bomb(depth: int) -> onnx.ModelProto:
    """A file of some hundred bytes that functions multiply to 2**depth nodes."""
    functions = []
    for level in range(depth):
        inner = f"f{level - 1}" if level else "Relu"
        domain = "bomb" if level else ""
        nodes = [node(inner, ["a"], ["b"], domain=domain), node(inner, ["b"], ["c"], domain=domain)]
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("bomb", 1)]
        functions.append(helper.make_function("bomb", f"f{level}", ["a"], ["c"], nodes, opsets))
    top = node(f"f{depth - 1}", ["x"], ["y"], domain="bomb")
    return made([top], [value("x", 4)], [value("y", 4)], functions=functions, extra=["bomb"])


def looping(trips: int) -> onnx.ModelProto:
    body = graph(
        [node("Relu", ["s"], ["t"]), node("Identity", ["c"], ["keep"])], "body",
        [value("i", dtype=I64), value("c", dtype=BOOL), value("s", 4)], [value("keep", dtype=BOOL), value("t", 4)],
    )  # fmt: skip
    inits = [const("n", trips, np.int64), const("yes", True, np.bool_)]
    return made([node("Loop", ["n", "yes", "x"], ["y"], body=body)], [value("x", 4)], [value("y", 4)], inits)


def huge_initializer() -> onnx.ModelProto:
    tensor = TensorProto(name="w", data_type=F32, dims=[2**20, 2**20], raw_data=bytes(16))
    return made([node("MatMul", ["x", "w"], ["y"])], [value("x", 1, 2**20)], [value("y", 1, 2**20)], [tensor])


def negative_initializer() -> onnx.ModelProto:
    tensor = TensorProto(name="w", data_type=F32, dims=[-1, 4], raw_data=bytes(64))
    return made([node("MatMul", ["x", "w"], ["y"])], [value("x", 4, 4)], [value("y", 4, 4)], [tensor])


def circular_functions() -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("c", 1)]
    functions = [helper.make_function("c", a, ["a"], ["b"], [node(b, ["a"], ["b"], domain="c")], opsets) for a, b in ("fg", "gf")]
    return made([node("f", ["x"], ["y"], domain="c")], [value("x", 4)], [value("y", 4)], functions=functions, extra=["c"])


def circular_nodes() -> onnx.ModelProto:
    nodes = [node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]), node("Neg", ["b"], ["y"])]
    return made(nodes, [value("x", 4)], [value("y", 4)])


def nowhere() -> onnx.ModelProto:
    return made([node("Add", ["x", "gone"], ["y"])], [value("x", 4)], [value("y", 4)])


REFUSED: dict[str, Callable[[], onnx.ModelProto]] = {
    "a function bomb": lambda: bomb(40), "functions in a circle": circular_functions, "nodes in a circle": circular_nodes,
    "a huge initialiser": huge_initializer, "a negative size": negative_initializer, "a value from nowhere": nowhere,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_model_is_refused_without_blaming_us(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(REFUSED[name]().SerializeToString())
    started = time.monotonic()
    with pytest.raises(CaptureError) as caught:
        rewrite_onnx(path, tmp_path / "out.onnx")
    assert "please report" not in str(caught.value) and "\n" not in str(caught.value)
    assert time.monotonic() - started < PATIENCE
    assert [each.name for each in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize("limit, shown", [(1, 1), pytest.param("auto", 5, marks=pytest.mark.slow)])
def test_a_loop_without_end_is_not_run_for_ever(limit: object, shown: int) -> None:
    started = time.monotonic()
    result = rewrite_onnx(looping(2**62), time_limit=limit)
    assert time.monotonic() - started < PATIENCE
    assert any(f"takes longer than {shown} s; time_limit= (--time-limit) allows more" in note for note in result.report.notes)


def test_a_time_limit_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.process_time()
    with pytest.raises(PolicyError, match=r"takes longer than 0\.2 s; time_limit="):
        rewrite_onnx(looping(2**62), calibration={"x": noise(4)}, time_limit=0.2)
    assert time.process_time() - started < 4
    monkeypatch.setattr("amprewrite.graphs.onnx.run.onnx_runtime.SECONDS", 1e-9)
    slow = looping(30_000)
    with pytest.raises(PolicyError, match="takes longer than"):
        rewrite_onnx(slow, calibration={"x": noise(4)})
    for limit in (60, None):
        assert rewrite_onnx(slow, calibration={"x": noise(4)}, time_limit=limit).report.strict_error is not None


def test_a_rewritten_model_that_is_too_slow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amprewrite.graphs.onnx.run.compare.ROUNDING", 1e-9)
    with pytest.raises(EmitError, match=r"the rewritten model is too slow to check: .*time_limit= \(--time-limit\) allows more"):
        rewrite_onnx(looping(30_000), calibration={"x": noise(4)}, time_limit=30)


@pytest.mark.parametrize("limit", [0, -1, True, float("nan"), float("inf"), "none", [5]])
def test_a_time_limit_that_is_none_is_refused(limit: object) -> None:
    with pytest.raises(PolicyError, match="time_limit= takes seconds"):
        rewrite_onnx(relu(), time_limit=limit)


def test_the_command_line_takes_a_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, samples = tmp_path / "m.onnx", tmp_path / "in.npz"
    onnx.save(looping(2**62), source)
    np.savez(samples, x=noise(4))
    words = ["convert", str(source), str(tmp_path / "out.onnx"), "--dtype", "fp16", "--calibration", str(samples), "--time-limit"]
    assert main([*words, "0.2"]) == 2
    assert "takes longer than 0.2 s; time_limit= (--time-limit) allows more" in capsys.readouterr().err
    onnx.save(looping(3), source)
    assert main([*words, "none"]) == 0
    for word in ("0", "nan", "soon"):
        with pytest.raises(SystemExit):
            main([*words, word])


def test_an_input_that_no_memory_holds_is_not_made_up() -> None:
    model = made([node("Relu", ["x"], ["y"])], [value("x", 2**40)], [value("y", 2**40)])
    result = rewrite_onnx(model)
    assert any("is declared with" in note for note in result.report.notes)


def test_arrays_that_no_input_takes_are_not_read(tmp_path: Path) -> None:
    """A small archive may hold gigabytes: only headers of what fits are looked at."""
    path = tmp_path / "in.npz"
    np.savez(path, x=noise(4, 16))
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("more.npy", "w", force_zip64=True) as entry:
        np.lib.format.write_array_header_1_0(entry, {"descr": "<f4", "fortran_order": False, "shape": (2**26,)})
        for _ in range(2**8):
            entry.write(bytes(2**20))
    before = peak()
    with pytest.raises(PolicyError, match="has x, more"):
        rewrite_onnx(relu(), calibration=path)
    assert peak() - before < 2**17, "all of it was read"


def peak() -> int:
    """The most memory that this process ever took, in kB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# -- what used to fail -----------------------------------------------------------------------
@pytest.mark.parametrize(("op", "attributes"), [("Einsum", {"equation": "ij,jk->ik"}), ("Concat", {"axis": 0}), ("Max", {})])
def test_an_operand_left_out_of_a_list_is_refused(op: str, attributes: dict[str, object]) -> None:
    """ONNX Runtime's Einsum reads memory that is not there and takes the process with it; the checker is content."""
    nodes = [helper.make_node(op, ["x", ""], ["y"], name="n", **attributes)]
    made = graph(nodes, "g", [value("x", 2, 8)], [value("y", 2, 8)])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    with pytest.raises(CaptureError, match=rf"{op} n has an operand without a name, which may not be left out"):
        rewrite_onnx(model, None, dtype="fp16")


def test_nodes_in_any_order_are_put_in_order() -> None:
    model = made([node("Relu", ["a"], ["y"]), node("Neg", ["x"], ["a"])], [value("x", 2, 8)], [value("y", 2, 8)], opset=13)
    for dtype in ("fp16", "bf16"):
        assert rewrite_onnx(model, dtype=dtype).report.valid


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_sequence_may_be_a_result(dtype: str) -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("SequenceConstruct", ["y", "x"], ["s"])]
    model = made(nodes, [value("x", 2, 8)], [helper.make_tensor_sequence_value_info("s", F32, None)])
    assert rewrite_onnx(model, dtype=dtype).report.strict_error is not None


@pytest.mark.parametrize("opset", [13, 15])
def test_branches_of_old_opsets_take_bf16_or_stay(opset: int) -> None:
    then = graph([node("MatMul", ["x", "w"], ["a"])], "then", [], [value("a", 8, 8)])
    other = graph([node("MatMul", ["w", "x"], ["b"])], "else", [], [value("b", 8, 8)])
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0), node("Greater", ["sum", "zero"], ["c"]),
        node("If", ["c"], ["r"], then_branch=then, else_branch=other), node("MatMul", ["r", "w"], ["y"]),
    ]  # fmt: skip
    model = made(nodes, [value("x", 8, 8)], [value("y", 8, 8)], [weight("w", 8, 8), const("zero", 0.0)], opset=opset)
    report = rewrite_onnx(model, dtype="bf16").report
    assert report.valid and report.strict_error < 0.02


def test_a_loop_may_have_its_own_fp16() -> None:
    half = numpy_helper.from_array(np.float16(0.5), "half")
    body = graph(
        [
            node("Cast", ["s"], ["a"], to=F16), node("Constant", [], ["k"], value=half), node("Add", ["a", "k"], ["b"]),
            node("Cast", ["b"], ["d"], to=F32), node("Tanh", ["d"], ["e"]), node("Identity", ["c"], ["keep"]),
        ],
        "body", [value("i", dtype=I64), value("c", dtype=BOOL), value("s", 2, 8)], [value("keep", dtype=BOOL), value("e", 2, 8)],
    )  # fmt: skip
    nodes = [node("Loop", ["n", "yes", "x"], ["y"], body=body), node("MatMul", ["x", "w"], ["z"])]
    inits = [const("n", 3, np.int64), const("yes", True, np.bool_), weight("w", 8, 8)]
    report = rewrite_onnx(made(nodes, [value("x", 2, 8)], [value("y", 2, 8), value("z", 2, 8)], inits)).report
    assert report.valid and report.strict_error < 2e-3


def test_bf16_inputs_and_outputs_are_no_error() -> None:
    model = made([node("Identity", ["x"], ["y"])], [value("x", 2, 8)], [value("y", 2, 8)], opset=21)
    result = rewrite_onnx(model, dtype="bf16", keep_io=False, overrides={"Identity": "allow"})
    assert result.report.valid and result.report.strict_error < 0.01 and result.report.runtime_error is None
    assert result.model.graph.output[0].type.tensor_type.elem_type == BF16


def test_an_error_of_the_callers_own_samples_is_handed_on() -> None:
    def samples():
        yield {"x": noise(4, 16)}
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        rewrite_onnx(relu(), calibration=samples())


# -- damage ------------------------------------------------------------------------------------
def convert_all(tally: Tally, folder: Path, contents: Iterable[bytes]) -> None:
    """Rewrite files: a result or an AmpRewriteError, never anything else, and never our fault."""
    source, out = folder / "m.onnx", folder / "out.onnx"
    for number, content in enumerate(contents):
        source.write_bytes(content)
        tally.case(lambda: rewrite_onnx(source, out), f"case {number}")
        tally.only(folder, ("m.onnx", "out.onnx"))
    tally.settle()


def damaged(count: int, seed: int) -> Iterator[bytes]:
    """A model with some flipped bits."""
    whole, rng = gemm_chain(node("Softmax", ["h"], ["mid"], name="act")).model.SerializeToString(), random.Random(seed)
    for _ in range(count):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            place = rng.randrange(len(content)) if rng.random() < 0.5 else rng.choice(structure(whole))
            content[place] ^= 1 << rng.randrange(8)
        yield bytes(content)


def structure(whole: bytes) -> list[int]:
    """Bytes of the file that are no weights: flips there change what is asked."""
    return [*range(400), *range(len(whole) - 200, len(whole))]


@pytest.mark.parametrize("count, seed", [(30, 0), *(pytest.param(100, seed, marks=pytest.mark.slow) for seed in range(1, 13))])
def test_flipped_bits_of_a_model(tmp_path: Path, tally: Tally, count: int, seed: int) -> None:
    tally.data["row"] = "ONNX model, flipped bits"
    convert_all(tally, tmp_path, damaged(count, seed))


def wrong(count: int, seed: int) -> Iterator[bytes]:
    """A model of a few nodes in which one or two things are of another kind, missing, doubled or misnamed."""
    rng = random.Random(seed)
    body = graph([node("Relu", ["h"], ["a"])], "then", [], [value("a", 4, 16)])
    other = graph([node("Neg", ["h"], ["b"])], "else", [], [value("b", 4, 16)])
    inner = [
        node("Softmax", ["h"], ["s"], name="act", axis=-1), node("ReduceMean", ["h"], ["m"], axes=[1], keepdims=1),
        node("Sub", ["h", "m"], ["d"]), node("Constant", [], ["yes"], value=const("", True, np.bool_)),
        node("If", ["yes"], ["i"], then_branch=body, else_branch=other), node("Add", ["s", "d"], ["sum"]),
        node("Add", ["sum", "i"], ["mid"]),
    ]  # fmt: skip
    whole = gemm_chain(*inner, opset=13).model
    for _ in range(count):
        model = onnx.ModelProto()
        model.CopyFrom(whole)
        for _ in range(rng.choice((1, 1, 2))):
            with contextlib.suppress(IndexError, ValueError):  # the first change took away what the second is about
                rng.choice(CHANGES)(model, rng)
        yield model.SerializeToString()


def _tensor(model: onnx.ModelProto, rng: random.Random) -> TensorProto:
    return rng.choice(model.graph.initializer)


def _place(model: onnx.ModelProto, rng: random.Random) -> onnx.NodeProto:
    return rng.choice(model.graph.node)


def _declared(model: onnx.ModelProto, rng: random.Random) -> onnx.ValueInfoProto:
    return rng.choice([*model.graph.input, *model.graph.output])


def _other_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    held = [attribute for each in model.graph.node for attribute in each.attribute]
    new = helper.make_attribute("x", rng.choice([1, -(2**40), 1.5, "word", [1, 2], [0.5], const("t", 1.0), float("nan")]))
    attribute = rng.choice(held)
    name = attribute.name
    attribute.CopyFrom(new)
    attribute.name = name


def _other_size(model: onnx.ModelProto, rng: random.Random) -> None:
    dims = _declared(model, rng).type.tensor_type.shape.dim
    if dims:
        rng.choice(dims).dim_value = rng.choice([-1, 0, 3, 2**31, 2**62])


def _other_name(model: onnx.ModelProto, rng: random.Random) -> None:
    found = _place(model, rng)
    names = found.input if rng.random() < 0.5 and found.input else found.output
    names[rng.randrange(len(names))] = rng.choice(["", "x", "y", "mid", "nowhere", "h"])


CHANGES: list[Callable[[onnx.ModelProto, random.Random], object]] = [
    lambda model, rng: setattr(_tensor(model, rng), "data_type", rng.randrange(26)),
    lambda model, rng: _tensor(model, rng).dims.__setitem__(0, rng.choice([-1, 0, 1, 17, 2**40])),
    lambda model, rng: _tensor(model, rng).dims.append(rng.choice([0, 1, 2])),
    lambda model, rng: setattr(_tensor(model, rng), "name", rng.choice(["", "x", "mid", "elsewhere"])),
    lambda model, rng: setattr(_declared(model, rng).type.tensor_type, "elem_type", rng.randrange(26)),
    lambda model, rng: setattr(_declared(model, rng), "name", rng.choice(["", "x", "mid", "elsewhere"])),
    lambda model, rng: _declared(model, rng).ClearField("type"),
    lambda model, rng: setattr(_place(model, rng), "op_type", rng.choice(["", "Loop", "Cast", "Concat", "Scan", "Nothing", "Gemm"])),
    lambda model, rng: setattr(_place(model, rng), "domain", rng.choice(["ai.onnx.ml", "com.microsoft", "of.nobody"])),
    lambda model, rng: _place(model, rng).input.append(rng.choice(["", "x", "mid"])),
    lambda model, rng: _place(model, rng).ClearField(rng.choice(["input", "output", "attribute"])),
    lambda model, rng: model.graph.node.pop(rng.randrange(len(model.graph.node))),
    lambda model, rng: model.graph.node.append(_place(model, rng)),
    lambda model, rng: setattr(model.opset_import[0], "version", rng.choice([-1, 0, 1, 6, 12, 99, 2**40])),
    lambda model, rng: setattr(model, "ir_version", rng.choice([-1, 0, 1, 3, 99])),
    lambda model, rng: model.ClearField(rng.choice(["graph", "opset_import"])),
    _other_attribute, _other_size, _other_name,
]  # fmt: skip


@pytest.mark.parametrize("count, seed", [(20, 0), *(pytest.param(100, seed, marks=pytest.mark.slow) for seed in range(1, 7))])
def test_models_of_wrong_types_and_names(tmp_path: Path, tally: Tally, count: int, seed: int) -> None:
    tally.data["row"] = "ONNX model, wrong types"
    convert_all(tally, tmp_path, wrong(count, seed))


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_damaged_samples(tmp_path: Path, tally: Tally, count: int) -> None:
    tally.data["row"] = "samples (.npz)"
    path, model, rng = tmp_path / "in.npz", relu(), random.Random(count)
    np.savez(path, x=noise(4, 16))
    whole = path.read_bytes()
    for _ in range(count):
        content = bytearray(whole)
        place = rng.randrange(len(content)) if rng.random() < 0.5 else rng.choice(structure(whole))
        content[place % len(content)] ^= 1 << rng.randrange(8)
        path.write_bytes(content if rng.random() < 0.8 else content[: rng.randrange(len(content))])
        tally.case(lambda: rewrite_onnx(model, calibration=path))
        tally.only(tmp_path, ("in.npz",))
    tally.settle()
