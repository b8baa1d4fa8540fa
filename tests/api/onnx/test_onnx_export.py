"""Export of rewritten models: the plain twin's file under the same passes, names and types kept."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from onnx_help import F16, F32, ONE_PASS, differs_before_ort_1_27, export, ops, run
from tiers import long_beyond
from torch import nn

import amprewrite
from amprewrite import CaptureError, EmitError, PolicyError
from amprewrite.api.onnx.convert import export_onnx, rewrite_onnx
from amprewrite.graphs.onnx.run.compare import strict_outputs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.last = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.norm(self.first(x)))
        return self.last(y if shift is None else y + shift)


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    return Block().eval()


@pytest.fixture(scope="module")
def made(block, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "block.onnx"
    dims = {"x": {0: torch.export.Dim("batch")}}
    amp = amprewrite.rewrite(block, dtype="fp16", overrides={"gelu": "deny", "module:last": "fp32"})
    return export_onnx(amp, path, (torch.randn(4, 16),), {}, dynamic_shapes=dims)


def test_the_file_is_half_the_size_with_fp32_io_and_open_batch(made):
    model = onnx.load(made.path)
    onnx.checker.check_model(model, full_check=True)
    assert [v.name for v in model.graph.input] == ["x"]
    assert {v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)} == {F32}
    assert run(model, {"x": np.zeros((7, 16), np.float32)})[0].shape == (7, 8)


def test_the_policy_of_the_rewrite_decides(made):
    by_op = {node.op: node for node in made.plan.nodes if node.role == "op"}
    assert by_op["gelu"].colour.value == "high"
    assert all(node.colour.value == "high" for node in made.plan.find("last") if node.flops)
    types = {t.name: t.data_type for t in onnx.load(made.path).graph.initializer}
    assert types["first.weight"] == F16
    assert types["last.weight"] == F32


def test_both_roads_agree(block, tmp_path):
    x = torch.randn(4, 16)
    amp = amprewrite.rewrite(block, dtype="fp16")
    one = export_onnx(amp, tmp_path / "m.onnx", None, {"x": x})
    other = rewrite_onnx(export(block, {"x": x}).model, calibration={"x": x.numpy()})
    assert ops(one.model) == ops(other.model)
    feed = {"x": x.numpy()}
    np.testing.assert_array_equal(run(one.model, feed)[0], run(other.model, feed)[0])
    np.testing.assert_allclose(run(one.model, feed)[0], block(x).detach().numpy(), atol=5e-3)


def test_inputs_go_by_keyword(block, tmp_path):
    amp = amprewrite.rewrite(block, dtype="fp16")
    kwargs = {"x": torch.randn(4, 16), "shift": torch.randn(4, 32)}
    result = export_onnx(amp, tmp_path / "m.onnx", (), kwargs)
    assert {v.name for v in result.model.graph.input} == {"x", "shift"}
    assert result.report.strict_error is not None
    assert result.report.strict_error < 5e-3


class Epsilon(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.norm(dim=-1, keepdim=True) + 1e-8)


def test_an_epsilon_that_the_exporter_drops_is_kept(tmp_path):
    x = torch.zeros(2, 4)
    result = export_onnx(amprewrite.rewrite(Epsilon().eval(), dtype="fp16"), tmp_path / "m.onnx", (x,))
    assert np.isfinite(run(result.model, {"x": x.numpy()})[0]).all()


class Untraceable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp() if x.sum() > 0 else x.cos()


def test_mistakes_get_an_answer_and_leave_nothing(block, tmp_path):
    amp = amprewrite.rewrite(block, dtype="fp16")
    with pytest.raises(PolicyError, match="needs example inputs"):
        export_onnx(amp, tmp_path / "m.onnx")
    with pytest.raises(PolicyError, match=r"not Tensor: write \(x,\)"):
        export_onnx(amp, tmp_path / "m.onnx", torch.randn(4, 16))  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"takes a model from amprewrite\.rewrite"):
        export_onnx(block, tmp_path / "m.onnx", (torch.randn(4, 16),))
    with pytest.raises(EmitError, match="make the folder first"):
        export_onnx(amp, tmp_path / "a" / "m.onnx", (torch.randn(4, 16),))
    with pytest.raises(CaptureError, match=r"torch\.onnx\.export cannot export Untraceable"):
        export_onnx(amprewrite.rewrite(Untraceable(), dtype="fp16"), tmp_path / "m.onnx", (torch.randn(4, 16),))
    assert not list(tmp_path.iterdir())


def test_every_option_is_taken(block, tmp_path):
    amp, x = amprewrite.rewrite(block, dtype="fp16"), torch.randn(4, 16)
    result = amp.export_onnx(
        tmp_path / "m.onnx", (x,), opset=20, dynamic_shapes={"x": {0: torch.export.Dim("rows")}}, keep_io=False,
        external_data=True, plan_path=tmp_path / "m.json", max_rel_err=1e-2,
    )  # fmt: skip
    model = onnx.load(result.path)
    assert model.opset_import[0].version == 20
    assert model.graph.input[0].type.tensor_type.elem_type == F16
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "m.json", *(path.name for path in tmp_path.glob("m.onnx.*.data"))}
    unverified = amp.export_onnx(tmp_path / "n.onnx", (x,), verify=False)
    assert not unverified.report.valid
    assert unverified.report.strict_error is None


def test_calibration_goes_before_the_example_inputs(block, tmp_path):
    amp, x = amprewrite.rewrite(block, dtype="fp16"), torch.randn(4, 16)
    result = export_onnx(amp, tmp_path / "m.onnx", (x,), calibration=({"x": x.numpy() * np.float32(k)} for k in range(1, 4)))
    assert result.report.samples == 3
    assert export_onnx(amp, tmp_path / "m.onnx", (x,)).report.samples == 1
    with pytest.raises(PolicyError, match="the model's inputs are x"):
        export_onnx(amp, tmp_path / "m.onnx", (x,), calibration={"y": x.numpy()})


def test_an_opset_that_the_exporter_does_not_know_is_refused(block, tmp_path):
    with pytest.raises(CaptureError, match="writes opset 18 where 3 was asked for"):
        export_onnx(amprewrite.rewrite(block, dtype="fp16"), tmp_path / "m.onnx", (torch.randn(4, 16),), opset=3)
    with pytest.raises(PolicyError, match="takes a number such as 20"):
        export_onnx(amprewrite.rewrite(block, dtype="fp16"), tmp_path / "m.onnx", (torch.randn(4, 16),), opset="newest")
    assert not list(tmp_path.iterdir())


class KeptOut(nn.Module):
    """Angles of rotary embeddings as transformers computes them, and a product under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("rates", 10000 ** -(torch.arange(32) / 32.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = 500 + 100 * x[:, None, :, 0]
        with torch.no_grad():
            y = self.first(x)
            with torch.autocast("cpu", enabled=False):
                angles = (self.rates[None, :, None].expand(len(x), -1, 1) @ places).transpose(1, 2)
                turned = torch.cat([angles.cos(), angles.sin()], -1)
        return self.last(y * turned)


@pytest.mark.parametrize(
    ("dtype", "most", "called"),
    long_beyond(2, [("bf16", 1e-2, True), ("fp16", 2e-3, False), ("fp16", 2e-3, True), ("bf16", 1e-2, False)]),
)
def test_a_region_without_autocast_stays_fp32_in_the_file(dtype, most, called, tmp_path):
    torch.manual_seed(0)
    model, x = KeptOut().eval(), torch.randn(2, 64, 64)
    amp = amprewrite.rewrite(model, dtype=dtype)
    if called:
        amp(x)
    result = export_onnx(amp, tmp_path / "kept.onnx", (x,))
    made, expected = strict_outputs(result.ir_model, [{"x": x.numpy()}])[0][0], model(x).detach().numpy()
    assert np.linalg.norm(made - expected) < most * np.linalg.norm(expected)
    assert [note for note in result.report.notes if "disables torch.autocast" in note]
    high = [node.name for node in result.plan.nodes if node.flops and node.dtype == "fp32"]
    assert len(high) == 1, "the products of no_grad run low"


def test_a_table_of_indices_is_not_rounded(tmp_path):
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(5000.0).flip(0))
            self.rows, self.last = nn.Embedding(5000, 64), nn.Linear(64, 64)

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            return self.last(self.rows(self.table[i].long()))

    torch.manual_seed(0)
    model, i = Lookup().eval(), torch.arange(32) * 150
    result = export_onnx(amprewrite.rewrite(model, dtype="bf16"), tmp_path / "table.onnx", (i,))
    made, expected = strict_outputs(result.ir_model, [{"i": i.numpy()}])[0][0], model(i).detach().numpy()
    assert np.linalg.norm(made - expected) < 1e-2 * np.linalg.norm(expected)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x[:, -1] + self.first(x[:, 0] / 300)))


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centres, self.last = nn.Parameter(2 + 0.1 * torch.randn(40, 64)), nn.Linear(40, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.exp(-torch.cdist(x, self.centres)))


@differs_before_ort_1_27(ONE_PASS)
@pytest.mark.parametrize(("dtype", "most"), [("bf16", 1e-2), ("fp16", 2e-3)])
@pytest.mark.parametrize("kind", [Rows, Distances])
def test_what_is_exact_in_the_model_is_exact_in_the_file(kind, dtype, most, tmp_path):
    torch.manual_seed(0)
    model = kind().eval()
    x = torch.randn(64, 6, 64) + 300 if kind is Rows else model.centres.detach().repeat(2, 1) + 0.02 * torch.randn(80, 64)
    result = export_onnx(amprewrite.rewrite(model, dtype=dtype), tmp_path / "exact.onnx", (x,))
    made, expected = strict_outputs(result.ir_model, [{"x": x.numpy()}])[0][0], model(x).detach().numpy()
    assert np.linalg.norm(made - expected) < most * np.linalg.norm(expected)


class Options(nn.Module):
    """Takes a dict, one key of which is the name of another argument."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 8)

    def forward(self, x, opts=None, mask=None, scale=1.0):
        y = self.last(x if isinstance(x, torch.Tensor) else x["x"])
        y = y if opts is None else y * opts["mask"]
        return scale * (y if mask is None else y + mask)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        pytest.param((torch.randn(4, 16), {"mask": torch.full((8,), 3.0)}), {}, id="a dict named like an argument"),
        pytest.param(({"x": torch.randn(4, 16)},), {}, id="a dict alone"),
        pytest.param(({"x": torch.randn(4, 16)},), {"scale": 2.0}, id="a dict and a keyword argument"),
        pytest.param((torch.randn(4, 16), {"mask": torch.ones(8)}, torch.ones(8)), {}, id="a dict in between"),
    ],
)
def test_a_dict_at_the_end_is_an_argument_like_any_other(args, kwargs, tmp_path):
    model = Options().eval()
    result = amprewrite.rewrite(model, dtype="fp16").export_onnx(tmp_path / "m.onnx", args, kwargs)
    assert result.report.notes == ()
    names = [value.name for value in onnx.load(tmp_path / "m.onnx").graph.input]
    feed = dict(zip(names, (leaf.numpy() for leaf in torch.utils._pytree.tree_leaves(args)), strict=True))
    wanted = model(*args, **kwargs).detach().numpy()
    np.testing.assert_allclose(run(onnx.load(tmp_path / "m.onnx"), feed)[0], wanted, rtol=0, atol=2e-2)


class Converts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.last(x.float()) * scale.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_example_inputs_may_be_low(dtype, tmp_path):
    args = (torch.randn(4, 16).to(dtype).T.contiguous().T, torch.tensor(0.5).to(dtype))
    result = amprewrite.rewrite(Converts().eval(), dtype="bf16").export_onnx(tmp_path / "m.onnx", args)
    assert result.report.valid


class Exported(nn.Module):
    """Computes something else when it is exported, or draws. Its second result is large."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.last, self.draws = nn.Linear(16, 8), draws

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.last(x)
        made = y + torch.randn_like(y) if self.draws else y * (2.0 if torch.compiler.is_exporting() else 1.0)
        return made, 1e4 * y


@pytest.mark.parametrize("training", [True, False])
def test_a_file_that_draws_says_so_beside_its_error(training):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Dropout", ["y", "rate", "training"], ["z"])]
    held = {"w": np.eye(16, dtype=np.float32), "rate": np.float32(0.5), "training": np.array(training)}
    shapes = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [8, 16]) for name in ("x", "z")]
    graph = helper.make_graph(nodes, "g", shapes[:1], shapes[1:], [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in held.items()])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    notes = amprewrite.rewrite_onnx(made, dtype="fp16").report.notes
    assert any("draws random numbers (Dropout)" in note for note in notes) is training


def test_an_export_that_computes_something_else_is_refused_but_for_a_draw(tmp_path):
    with pytest.raises(CaptureError, match="does not compute what Exported does on the example inputs"):
        amprewrite.rewrite(Exported(False).eval(), dtype="fp16").export_onnx(tmp_path / "m.onnx", (torch.randn(4, 16),))
    assert not list(tmp_path.iterdir())
    result = amprewrite.rewrite(Exported(True).eval(), dtype="fp16").export_onnx(tmp_path / "m.onnx", (torch.randn(4, 16),))
    assert any("results are random" in note for note in result.report.notes)
