"""fp8 products in ONNX files: QuantizeLinear and DequantizeLinear in e4m3, with scales from calibration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx_help import Net, cond_if, const, loop, net, node, noise, value, weight
from tiers import long_beyond
from torch import Tensor, nn

import amprewrite
from amprewrite.api.onnx import job
from amprewrite.graphs.onnx.run.compare import strict_outputs
from amprewrite.graphs.onnx.write.apply_plan import insert_quantised, scale_for
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import parse_format

E4M3 = onnx.TensorProto.FLOAT8E4M3FN


class Block(nn.Module):
    """Two products read one value, and a third one their sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.gate = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(torch.relu(self.up(h) + self.gate(h)))


def exported(block: Block, x: Tensor, path: Path, products: Any = "fp8-all", **options: Any) -> Any:
    amp = amprewrite.rewrite(block, dtype="bf16", products=products).eval()
    return amp.export_onnx(path, (x,), **{"calibration": [{"x": x.numpy()}], **options})


def scales(model: onnx.ModelProto) -> dict[str, tuple[Tensor, Tensor]]:
    """(scale of x, scale of w) of each product in fp8, in the order of the file."""
    made = {name: node for node in model.graph.node for name in node.output}
    held = {each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).astype(np.float32)) for each in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    return {node.name: tuple(held[made[name].input[1]] for name in node.input) for node in products}  # type: ignore[misc]


def rounded(value: Tensor, scale: Tensor) -> Tensor:
    fp8 = (value.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return (fp8 * scale).bfloat16().float()


def emulated(block: Block, x: Tensor, found: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The file's numbers, written out."""
    (of_h, of_up), (_, of_gate), (of_act, of_down) = found

    def product(value: Tensor, linear: nn.Linear, by: Tensor, of: Tensor) -> Tensor:
        made = (rounded(value, by) @ rounded(linear.weight.bfloat16(), of).t()).bfloat16()
        return made if linear.bias is None else made + linear.bias.bfloat16()

    h = block.norm(x).bfloat16()
    act = torch.relu(product(h, block.up, of_h, of_up) + product(h, block.gate, of_h, of_gate))
    return x + product(act, block.down, of_act, of_down).float()


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(("width", "tokens"), long_beyond(1, [(1024, 128), (64, 16)]))
@torch.no_grad()
def test_the_file_computes_what_its_scales_say_as_exactly_as_the_frozen_model(width: int, tokens: int, tmp_path: Path) -> None:
    block, x = Block(width).eval(), torch.randn(2, tokens, width)
    result = exported(block, x, tmp_path / "block.onnx")
    model = onnx.load(tmp_path / "block.onnx")
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("QuantizeLinear") == 2 and kinds.count("DequantizeLinear") == 5
    assert sum(each.data_type == E4M3 and list(each.dims) == [width, width] for each in model.graph.initializer) == 3
    assert model.opset_import[0].version == 21 and result.report.valid

    (got,) = strict_outputs(result.ir_model, [{"x": x.numpy()}])[0]
    exact, ours = block(x), torch.from_numpy(got)
    assert distance(ours, emulated(block, x, list(scales(model).values()))) < 1e-3
    frozen = amprewrite.rewrite(block, dtype="bf16", products="fp8-all", example_inputs=(x,)).eval()
    frozen.freeze()
    assert 0.9 * distance(frozen(x), exact) < distance(ours, exact) < 1.1 * distance(frozen(x), exact)
    assert distance(ours, exact) == pytest.approx(result.report.strict_error, rel=0.02)


@torch.no_grad()
def test_onnx_s_own_evaluator_reads_the_file(tmp_path: Path) -> None:
    block, x = Block(64).eval(), torch.randn(2, 16, 64)
    exported(block, x, tmp_path / "block.onnx")
    model = onnx.load(tmp_path / "block.onnx")
    evaluator = ReferenceEvaluator(model)
    assert distance(torch.from_numpy(evaluator.run(None, {"x": x.numpy()})[0]), block(x)) < 0.02


@torch.no_grad()
def test_values_beyond_the_samples_saturate(tmp_path: Path) -> None:
    block, x = Block(64).eval(), torch.randn(2, 16, 64)
    block.norm = nn.Identity()  # the products read the input of the file
    result = exported(block, x, tmp_path / "block.onnx", calibration=[{"x": 0.2 * x.numpy()}])
    (got,) = strict_outputs(result.ir_model, [{"x": x.numpy()}])[0]
    found = list(scales(onnx.load(tmp_path / "block.onnx")).values())
    assert 0.2 * x.abs().max() / 448 <= found[0][0] <= 0.2 * x.abs().max() / 448 * (1 + 2**-7)
    assert distance(torch.from_numpy(got), emulated(block, x, found)) < 1e-3
    assert distance(torch.from_numpy(got), block(x)) > 0.05


@pytest.mark.parametrize("preset", ["fp8-safe", "fp8-rowwise"])
def test_recipes_with_scales_of_rows_have_one_scale_a_tensor_in_a_file(preset: str, tmp_path: Path) -> None:
    result = exported(Block(32).eval(), torch.randn(4, 32), tmp_path / "block.onnx", {"preset": preset, "module:*": "fp8"})
    assert result.report.strict_error < 0.03
    copies = result.plan.regions[0].quantised.copies
    assert len(copies) == 5 and {copy.scales for copy in copies} == {"tensor"}
    assert amprewrite.CastPlan.from_json(result.plan.to_json()) == result.plan


def test_rules_by_module_decide_in_the_file_too(tmp_path: Path) -> None:
    rules = {"preset": "fp8-all", "module:down": "bf16", "node:linear": "bf16"}
    result = exported(Block(32).eval(), torch.randn(4, 32), tmp_path / "block.onnx", rules)
    chosen = [each.node for each in result.plan.regions[0].quantised.chosen]
    assert len(chosen) == 2 and "rules of products= by node are left out" in str(result.report)
    kinds = [node.op_type for node in onnx.load(tmp_path / "block.onnx").graph.node]
    assert kinds.count("QuantizeLinear") == 1


def test_a_plan_of_a_file_is_edited_and_followed(tmp_path: Path) -> None:
    block, x = Block(32).eval(), torch.randn(4, 32)
    plan = exported(block, x, tmp_path / "block.onnx").plan
    for given, count in ((plan, 2), (plan.edit({"down": "bf16"}), 1)):
        followed = exported(block, x, tmp_path / "block.onnx", products=None, plan=given, opset=21)
        kinds = [node.op_type for node in onnx.load(tmp_path / "block.onnx").graph.node]
        assert kinds.count("QuantizeLinear") == count and len(list(followed.plan.regions[0].quantised.chosen)) == count + 1
    with pytest.raises(PolicyError, match="fp8 products need opset 21, and this file has 18"):
        exported(block, x, tmp_path / "block.onnx", products=None, plan=plan, opset=18)


def test_without_samples_the_file_reads_bf16_or_an_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, x = Block(32).eval(), torch.randn(4, 32)
    result = exported(block, x, tmp_path / "block.onnx", calibration=None)
    assert "an ONNX file has fp8 products if calibration= gives their scales" in str(result.report)
    assert not any(node.op_type == "QuantizeLinear" for node in onnx.load(tmp_path / "block.onnx").graph.node)
    with pytest.raises(PolicyError, match="opset=18 has no fp8"):
        exported(block, x, tmp_path / "block.onnx", opset=18)

    def unseen(model: Any, reading: Any, *others: Any) -> None:
        reading.ranges.clear()
        insert_quantised(model, reading, *others)

    monkeypatch.setattr(job, "insert_quantised", unseen)
    with pytest.raises(PolicyError, match=r"no sample shows the range of .*: pass calibration="):
        exported(block, x, tmp_path / "block.onnx")


# -- files of other sources, and fp16 --------------------------------------------------------------
LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def written_fp32(block: Block, x: Tensor, path: Path, opset: int = 18) -> Path:
    made = torch.onnx.export(block, (x,), dynamo=True, verbose=False, opset_version=opset)
    assert made is not None
    made.save(path)
    return path


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("width", "tokens"), long_beyond(1, [(1024, 128), (64, 16)]))
@torch.no_grad()
def test_a_file_from_elsewhere_takes_fp8_products(width: int, tokens: int, dtype: str, tmp_path: Path) -> None:
    block, x = Block(width).eval(), torch.randn(2, tokens, width)
    source = written_fp32(block, x, tmp_path / "fp32.onnx")
    result = amprewrite.rewrite_onnx(
        source, tmp_path / "fp8.onnx", dtype=dtype, products="fp8-all", calibration=[{"x": x.numpy()}], max_rel_err=0.05
    )
    model = onnx.load(tmp_path / "fp8.onnx")
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("QuantizeLinear") == 2 and kinds.count("DequantizeLinear") == 5 and model.opset_import[0].version == 21
    assert "opset raised from 18 to 21" in str(result.report)
    (got,) = strict_outputs(result.ir_model, [{"x": x.numpy()}])[0]
    found, low = list(scales(model).values()), LOW[dtype]

    def product(value: Tensor, linear: nn.Linear, by: Tensor, of: Tensor) -> Tensor:
        x8, w8 = (
            ((v.float() / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s).to(low).float()
            for v, s in ((value, by), (linear.weight.to(low), of))
        )
        made = (x8 @ w8.t()).to(low)
        return made if linear.bias is None else made + linear.bias.to(low)

    h = block.norm(x).to(low)
    act = torch.relu(product(h, block.up, *found[0]) + product(h, block.gate, *found[1]))
    assert distance(torch.from_numpy(got), x + product(act, block.down, *found[2]).float()) < 1e-3
    if dtype == "fp16":  # ONNX Runtime's CPU provider has these kernels for fp16, not for bf16
        assert result.report.runtime_error == pytest.approx(result.report.strict_error, rel=0.05)


@torch.no_grad()
def test_a_model_in_fp16_is_exported_with_fp8_products(tmp_path: Path) -> None:
    block, x = Block(64).eval(), torch.randn(2, 16, 64)
    amp = amprewrite.rewrite(block, dtype="fp16").eval()
    result = amp.export_onnx(
        tmp_path / "block.onnx", (x,), products={"preset": "fp8-all", "module:down": "fp16"}, calibration=[{"x": x.numpy()}]
    )
    assert [node.op_type for node in onnx.load(tmp_path / "block.onnx").graph.node].count("QuantizeLinear") == 1
    assert result.report.runtime_error == pytest.approx(result.report.strict_error, rel=0.05)
    edited = result.plan.edit({"up": "fp16", "down": "fp8"})
    followed = amp.export_onnx(tmp_path / "block.onnx", (x,), plan=edited, opset=21, calibration=[{"x": x.numpy()}])
    assert {each.node for each in followed.plan.regions[0].quantised.chosen} != {
        each.node for each in result.plan.regions[0].quantised.chosen
    }


@pytest.mark.parametrize("given", [cond_if, loop])
def test_products_in_bodies_read_no_fp8(given: Callable[[], Net]) -> None:
    made = given()
    result = amprewrite.rewrite_onnx(made.model, dtype="fp16", products="fp8-all", calibration=made.feed)
    chosen = {each.node for each in result.plan.regions[0].quantised.chosen}
    assert "first" in chosen and chosen <= {"first", "last"}
    assert any("products in bodies of If, Loop and Scan (" in note for note in result.report.notes)


@pytest.mark.parametrize("exact", [True, False])
def test_a_constant_that_is_multiplied_by_a_weight_is_stored_in_fp8(exact: bool) -> None:
    """As learnt queries are. A sample run shows no range of them, and needs to show none."""
    queries = const("q", np.eye(64) * 2) if exact else weight("q", 64, 64)
    nodes = [
        node("MatMul", ["q", "w0"], ["h"], name="queries"), node("MatMul", ["x", "w1"], ["g"], name="keys"),
        node("Add", ["h", "g"], ["s"], name="add"), node("MatMul", ["s", "w2"], ["out"], name="last"),
    ]  # fmt: skip
    inits = [queries, *(weight(f"w{index}", 64, 64) for index in range(3))]
    given = net(nodes, [value("x", 64, 64)], [value("out", 64, 64)], inits, {"x": noise(64, 64)}, 21)
    result = amprewrite.rewrite_onnx(given.model, dtype="fp16", products="fp8-all", calibration=given.feed)
    assert {each.name: each.data_type for each in result.model.graph.initializer}["q_e4m3"] == E4M3
    assert sum(each.op_type == "QuantizeLinear" for each in result.model.graph.node) == 2


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("amax", [0.0, 1e-9, 3e-6, 0.01, 1.0, 447.9, 6.0e4, 65472.0, 65504.0])
def test_a_scale_neither_saturates_nor_overflows(amax: float, dtype: str) -> None:
    low = parse_format(dtype)
    scale = float(scale_for(amax, low))
    top = np.float32(scale) * np.float32(448)
    assert np.isfinite(torch.tensor(top).to(LOW[dtype]).item()) and scale > 0
    assert top >= amax or amax > low.max * (1 - 2**-7)
    assert top <= max(amax * (1 + 2**-7), 448 * low.smallest_subnormal * 2, 448 * 1e-12)


def test_prices_need_a_device_and_scales_need_samples(tmp_path: Path) -> None:
    block, x = Block(64).eval(), torch.randn(2, 16, 64)
    source, feed = written_fp32(block, x, tmp_path / "fp32.onnx"), [{"x": x.numpy()}]
    with pytest.raises(PolicyError, match=r"decides by the prices of a device with fp8 units: name it with device= \(.*h100"):
        amprewrite.rewrite_onnx(source, products="fp8", calibration=feed)
    with pytest.raises(PolicyError, match="products= needs calibration="):
        amprewrite.rewrite_onnx(source, products="fp8-all")
    with pytest.raises(PolicyError, match="device= gives prices to products= alone"):
        amprewrite.rewrite_onnx(source, device="h100")
    with pytest.raises(PolicyError, match="matches no module"):
        amprewrite.rewrite_onnx(source, products={"preset": "fp8-all", "module:dwon": "fp16"}, calibration=feed)
    small = amprewrite.rewrite_onnx(source, products="fp8", device="h100", calibration=feed)
    assert not list(small.plan.regions[0].quantised.chosen)  # products of 64 columns do not pay on any device
