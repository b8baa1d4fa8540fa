"""Wide products: bf16 operands with an fp32 result, asked for by an override or an edited plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import amprewrite
from amprewrite.graphs.fx.ops.wide_products import wide_linear
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.vocabulary import Edit

WIDE = {"module:head": "wide"}


class Routed(nn.Module):
    """A hidden layer, then a head whose scores choose."""

    def __init__(self, width: int = 1024, experts: int = 64, bias: bool = True) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, experts, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.head(torch.relu(self.hidden(x))).sigmoid()
        return shares, shares.topk(2, -1).indices


class Transposed(Routed):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = torch.addmm(self.head.bias, torch.relu(self.hidden(x)), self.head.weight.t()).sigmoid()
        return shares, shares.topk(2, -1).indices


def low(value: Tensor) -> Tensor:
    return value.detach().bfloat16()


def written(model: Routed, x: Tensor) -> Tensor:
    """The head's result, written out: an fp32 product of rounded operands."""
    hidden = torch.relu(nn.functional.linear(low(x), low(model.hidden.weight), low(model.hidden.bias)))
    return hidden.float() @ low(model.head.weight).float().t() + model.head.bias.detach()


def edits(amp: Any) -> list[str]:
    return [edit.node for region in amp.plan.regions for edit in region.edits if edit.on and edit.what is Edit.WIDE_PRODUCT]


@pytest.mark.parametrize("rows", [1, 128])
def test_the_result_is_the_fp32_product_of_rounded_operands(rows: int) -> None:
    model, x = Routed(), torch.randn(rows, 1024)
    amp, plain = (amprewrite.rewrite(model, dtype="bf16", overrides=each, example_inputs=(x,)) for each in (WIDE, {}))
    wanted = written(model, x).sigmoid()
    shares, chosen = amp(x)
    assert torch.equal(shares, wanted) and torch.equal(chosen, wanted.topk(2, -1).indices)
    assert edits(amp) == ["linear_1"] and edits(plain) == []
    if rows > 1:  # the errors of a single row are a matter of luck
        exact = model(x)[0]
        assert (shares - exact).norm() < 0.95 * (plain(x)[0] - exact).norm()
    with torch.no_grad():
        assert torch.equal(amp(x)[0], wanted)


def test_gradients_are_those_of_a_bf16_product() -> None:
    x = torch.randn(4, 32, 1024, requires_grad=True)
    model = nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 64))
    amp = amprewrite.rewrite(model, dtype="bf16", overrides={"module:1": "wide"}, example_inputs=(x,))
    up = torch.randn(4, 32, 64)
    got = torch.autograd.grad(amp(x), (x, model[1].weight, model[1].bias), up)
    normed = nn.functional.layer_norm(x, (1024,))
    rows, rounded = low(up).reshape(-1, 64), low(normed).reshape(-1, 1024)
    assert all(gradient.dtype == torch.float32 for gradient in got)
    assert torch.equal(got[1], (rows.t() @ rounded).float())
    assert torch.allclose(got[2], up.sum((0, 1)), atol=1e-5)
    inner = (rows @ low(model[1].weight)).float().reshape(x.shape)
    assert torch.allclose(got[0], torch.autograd.grad(normed, x, inner)[0], atol=1e-5)


def test_second_derivatives_are_those_of_the_fp32_model() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16)), torch.randn(32, 64, requires_grad=True)
    amp = amprewrite.rewrite(model, dtype="bf16", overrides={"module:2": "wide"}, example_inputs=(x,))

    def penalty(net: nn.Module) -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().mean(), tuple(model.parameters()))

    for mine, exact in zip(penalty(amp), penalty(model), strict=True):
        assert (mine - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("kind", [Routed, Transposed])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_every_spelling_and_compiler_gives_the_same(kind: type[Routed], backend: str) -> None:
    torch._dynamo.reset()
    model, x = kind(256, 16), torch.randn(64, 256)
    asked = {"node:*linear_1": "wide"} if kind is Routed else {"node:addmm": "wide"}
    amp = amprewrite.rewrite(model, dtype="bf16", overrides=asked, backend=backend)
    shares, _ = amp(x)
    assert torch.allclose(shares, written(model, x).sigmoid(), rtol=1e-6, atol=1e-6)
    shares.sum().backward()
    assert model.head.weight.grad is not None and model.hidden.weight.grad.norm() > 0


def test_the_plan_shows_keeps_and_edits_it() -> None:
    model, x = Routed(64, 16), torch.randn(8, 64)
    amp = amprewrite.rewrite(model, dtype="bf16", overrides=WIDE, example_inputs=(x,))
    assert "linear_1 multiplies operands that are rounded to bf16, and its result is fp32" in str(amp.plan)
    assert "its result is fp32" in amp.plan.explain("head")
    assert "heavy op left high" not in amp.plan.explain("head") + amp.plan.explain() + amp.plan.summary()
    assert "heavy op left high: linear_1" in amprewrite.plan(model, (x,), dtype="bf16", overrides={"module:head": "high"}).explain()
    plan = amprewrite.CastPlan.from_json(amp.plan.to_json())
    plain = amprewrite.plan(model, (x,), dtype="bf16")
    assert "edit new: linear_1 multiplies" in plain.diff(plan)
    for given in (plan, plain.edit({"head": "wide"}), plain.edit({"linear_1": "wide"})):
        followed = amprewrite.rewrite(model, plan=given, example_inputs=(x,))
        assert torch.allclose(followed(x)[0], written(model, x).sigmoid(), rtol=1e-6)
        assert edits(followed) == ["linear_1"]
    assert edits(amprewrite.rewrite(model, plan=plan.edit({"head": "high"}), example_inputs=(x,))) == []
    off = amprewrite.rewrite(model, plan=plan.switch_off("wide product"), example_inputs=(x,))
    hidden = torch.relu(nn.functional.linear(low(x), low(model.hidden.weight), low(model.hidden.bias))).float()
    assert torch.allclose(off(x)[0], model.head(hidden).sigmoid(), rtol=1e-6)


def test_verify_rounds_as_the_model_runs() -> None:
    model, x = Routed(256, 16), torch.randn(64, 256)
    amp = amprewrite.rewrite(model, dtype="bf16", overrides=WIDE, example_inputs=(x,))
    report = amprewrite.verify(amp, (x,))
    (row,) = [row for row in report.rows if row.name == "linear_1"]
    hidden = torch.relu(nn.functional.linear(low(x), low(model.hidden.weight), low(model.hidden.bias))).float()
    exact = model.head(hidden)
    assert row.introduced == pytest.approx(((written(model, x) - exact).norm() / exact.norm()).item(), rel=0.05)
    assert 0.0005 < row.introduced < row.accumulated < 0.01


def test_torch_s_rules_for_cuda_take_the_product() -> None:
    with FakeTensorMode(), torch.no_grad():
        x, w = (torch.empty(rows, 1024, dtype=torch.bfloat16, device="cuda") for rows in (128, 50))
        made = wide_linear(x.unflatten(0, (4, 32)), w, torch.empty(50, device="cuda"))
    assert made.dtype == torch.float32 and made.shape == (4, 32, 50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": {"module:norm": "wide"}, "dtype": "bf16"}, "no product of rows and a matrix"),
        ({"overrides": {"linear": "wide"}, "dtype": "bf16"}, "is not understood"),
        ({"overrides": {"module:head": "wide"}, "dtype": "fp16"}, "need dtype='bf16'"),
    ],
)
def test_errors_say_what_to_do(options: dict[str, Any], message: str) -> None:
    class Normed(Routed):
        def __init__(self) -> None:
            super().__init__(32, 16)
            self.norm = nn.LayerNorm(32)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(self.norm(x))

    with pytest.raises(PolicyError, match=message):
        amprewrite.rewrite(Normed(), example_inputs=(torch.randn(8, 32),), **options)


def test_exports_have_the_same_numbers_and_onnx_says_that_it_reads_fp32(tmp_path: Path) -> None:
    model, x = Routed(64, 16).eval(), torch.randn(8, 64)
    amp = amprewrite.rewrite(model, dtype="bf16", overrides=WIDE, example_inputs=(x,)).eval()
    exported = amp.export_program((x,))
    assert torch.allclose(exported.module()(x)[0], written(model, x).sigmoid(), rtol=1e-6)
    report = amp.export_onnx(tmp_path / "routed.onnx", (x,)).report
    assert "wide products read fp32 in ONNX files" in str(report)
    with pytest.raises(PolicyError, match="use 'fp32' instead"):
        amprewrite.rewrite_onnx(tmp_path / "routed.onnx", dtype="bf16", overrides=WIDE)
