"""Models whose products read fp8 copies: bit for bit the peers' recipes, no more copies than needed, and verified as they run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_help import LINEARS, RECIPES
from tiers import long_beyond
from torch import Tensor, nn
from torch.nn.functional import linear as torch_linear
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.graphs.fx.ops import quantised_products
from amprewrite.graphs.fx.ops.quantised_products import quantise, quantise_matrix
from amprewrite.tables.errors import AmpRewriteError, PlanError, PolicyError

transformers = pytest.importorskip("transformers")
PRESET = pytest.mark.parametrize("preset", RECIPES)
IDS = torch.arange(48).reshape(2, 24) % 37


def always(preset: str) -> dict[str, str]:
    """What the recipe of a preset takes, at any price."""
    return {"preset": preset, "module:*": "fp8"}


def llama(layers: int = 1) -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), {"input_ids": IDS, "labels": IDS, "use_cache": False}


def bert() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertModel(config), {"input_ids": IDS}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.up, self.down = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.q(h) * self.k(h)
        return x + self.down(nn.functional.gelu(self.up(x)))


X = torch.randn(2, 17, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


def step(model: nn.Module, kwargs: dict[str, Any]) -> list[Tensor]:
    """The result of a training step, and the gradients."""
    given = model(**kwargs)
    loss = given.loss if getattr(given, "loss", None) is not None else given.last_hidden_state.square().mean()
    model.zero_grad()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def swapping(linear: Callable[..., Tensor], recipe: str) -> tuple[Callable[..., Any], list[Tensor]]:
    """A backend that runs a bf16 graph with every product that fp8 kernels take made by `linear`; and a list of the weights of those."""
    swapped: list[Tensor] = []

    def made(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype is not torch.bfloat16 or w.shape[0] % 16 or w.shape[1] % 16:
            return torch_linear(x, w, bias)
        swapped.append(w)
        return linear(x, w, bias, recipe)

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        for node in module.graph.nodes:
            if node.target in (torch_linear, torch._C._nn.linear):
                node.target = made
        module.recompile()
        return module.forward

    return backend, swapped


def as_it_is(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return module.forward


def quantised(amp: nn.Module) -> list[Any]:
    return [region.quantised for region in amp.plan.regions]


# numbers ------------------------------------------------------------------------------------------------------------------


@PRESET
@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize("model", long_beyond(1, [llama, bert, vit]))
def test_a_step_is_bit_for_bit_the_recipe(model: Any, linear: str, preset: str) -> None:
    if linear == "torchao":
        pytest.importorskip("torchao.float8.config")
    plain, kwargs = model()
    backend, swapped = swapping(LINEARS[linear], RECIPES[preset])
    wanted = step(amprewrite.rewrite(plain, dtype="bf16", backend=backend), kwargs)
    amp = amprewrite.rewrite(plain, dtype="bf16", products=always(preset), backend=as_it_is)
    got = step(amp, kwargs)
    assert sum(1 for each in quantised(amp) for _ in each.chosen) == len(swapped) >= 6
    assert len(got) == len(wanted) and all(torch.equal(mine, theirs) for mine, theirs in zip(got, wanted, strict=True))
    low = step(amprewrite.rewrite(plain, dtype="bf16", backend=as_it_is), kwargs)
    assert not torch.equal(got[1], low[1])


@pytest.mark.parametrize(("preset", "copies"), long_beyond(1, [("fp8", 72), ("fp8-rowwise", 144), ("fp8-safe", 100)]))
def test_a_llama_of_four_layers_makes_no_more_copies_than_it_needs(preset: str, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, kwargs = llama(4)
    amp = amprewrite.rewrite(plain, dtype="bf16", products={**always(preset), "module:lm_head": "bf16"})
    loss = amp(**kwargs).loss  # captures
    made = []
    monkeypatch.setattr(quantised_products, "quantise_matrix", lambda *args: made.append(args) or quantise_matrix(*args))
    loss = amp(**kwargs).loss
    forward = len(made)
    loss.backward()
    assert sum(len(each.copies) for each in quantised(amp)) == len(made) == copies
    assert forward == sum(copy.role != "g" for each in quantised(amp) for copy in each.copies)


@PRESET
def test_verify_rounds_as_the_model_runs(preset: str) -> None:
    block = Block()
    amp = amprewrite.rewrite(block, dtype="bf16", products=always(preset), example_inputs=(X,))
    report, low = amprewrite.verify(amp, (X,)), amprewrite.verify(amprewrite.rewrite(block, dtype="bf16", example_inputs=(X,)), (X,))
    exact = block(X)
    assert report.output_error == pytest.approx(((amp(X) - exact).norm() / exact.norm()).item(), rel=0.02)
    assert report.output_error > 3 * low.output_error
    copies = [row for row in report.rows if row.name.endswith("-> e4m3")]
    assert len(copies) == 7 and all(0.01 < row.introduced < 0.04 for row in copies)
    (product,) = [row for row in report.rows if row.name == "linear"]
    assert product.inputs == ("layer_norm -> e4m3", "q.weight -> e4m3", "q.bias -> bf16")


@PRESET
def test_debug_sees_the_errors_of_gradients(preset: str) -> None:
    block = Block()
    amp = amprewrite.rewrite(block, dtype="bf16", products=always(preset), example_inputs=(X,))
    report = amprewrite.debug(amp, (X,))
    real = torch.autograd.grad(amp(X).square().mean(), list(amp.parameters()))
    exact = torch.autograd.grad(block(X).square().mean(), list(block.parameters()))
    for (name, found), mine, theirs in zip(report.gradients.items(), real, exact, strict=True):
        assert found == pytest.approx(((mine - theirs).norm() / theirs.norm()).item(), rel=0.25), name


def test_a_penalty_on_gradients_can_be_trained() -> None:
    def penalty(model: nn.Module) -> list[Tensor]:
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [p for p in model.parameters() if p.dim() == 2]))

    block = Block()
    for mine, theirs in zip(penalty(amprewrite.rewrite(block, dtype="bf16", products="fp8-all")), penalty(block), strict=True):
        assert (mine - theirs).norm() / theirs.norm() < 0.15


def test_checkpoints_recompute_the_same_copies() -> None:
    class Held(nn.Module):
        def __init__(self, kept: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block, self.kept = Block(), kept

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False) if self.kept else self.block(x)

    grads = []
    for kept in (False, True):
        amp = amprewrite.rewrite(Held(kept), dtype="bf16", products="fp8-all")
        amp(X).square().mean().backward()
        assert sum(1 for each in quantised(amp) for _ in each.chosen) == 4
        grads.append([p.grad for p in amp.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("backend", long_beyond(1, ["aot_eager", "inductor"]))
def test_a_compiler_gives_the_same_to_a_rounding(backend: str) -> None:
    block = Block()
    found = []
    for each in ("eager", backend):
        amp = amprewrite.rewrite(block, dtype="bf16", products="fp8-all", backend=each)
        y = amp(X)
        found.append([y.detach(), *torch.autograd.grad(y.square().mean(), list(amp.parameters()))])
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() <= 0.1 * theirs.norm()  # fp8 steps are wide: a flip of the last bf16 bit may take one


def test_an_exported_program_has_the_same_numbers() -> None:
    block = Block().eval()
    amp = amprewrite.rewrite(block, dtype="bf16", products="fp8-all").eval()
    with torch.no_grad():
        wanted = amp(X)
        program = amp.export_program((X,))
        assert torch.equal(program.module()(X), wanted)


def test_an_onnx_file_without_calibration_says_that_it_has_no_fp8(tmp_path: Path) -> None:
    pytest.importorskip("onnx_ir")
    amp = amprewrite.rewrite(Block().eval(), dtype="bf16", products="fp8-all")
    report = amp.export_onnx(tmp_path / "block.onnx", (X,)).report
    assert any("an ONNX file has fp8 products if calibration= gives their scales" in note for note in report.notes)


@pytest.mark.parametrize(("share", "some"), [(0.8, True), (0.05, False)])
def test_a_tolerance_counts_the_errors_of_fp8(share: float, some: bool) -> None:
    """What fp8 rounds too far is kept in fp32; where that is every product, the plan says so."""
    block = Block()
    options: dict[str, Any] = {"dtype": "bf16", "products": "fp8-all", "example_inputs": (X,)}
    tolerance = share * amprewrite.verify(amprewrite.rewrite(block, **options), (X,)).output_error
    amp = amprewrite.rewrite(block, tolerance=tolerance, **options)
    assert amprewrite.verify(amp, (X,)).output_error <= tolerance
    assert any(any(each.chosen) for each in quantised(amp)) == some
    assert ("runs nothing in fp8: the accuracy" in str(amp.plan)) != some


def test_copies_of_the_model_and_its_plan_survive() -> None:
    amp = amprewrite.rewrite(Block(), dtype="bf16", products="fp8-all", example_inputs=(X,))
    for other in (copy.deepcopy(amp), pickle.loads(pickle.dumps(amp))):
        assert torch.equal(other(X), amp(X))
    plan = amprewrite.CastPlan.from_json(amp.plan.to_json())
    assert plan.to_json() == amp.plan.to_json()
    assert torch.equal(amprewrite.rewrite(copy.deepcopy(amp), plan=plan)(X), amp(X))


# weights that do not change -------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the matrices that are cast to fp8."""
    made: list[tuple[int, ...]] = []

    def cast(matrix: Tensor, *args: Any) -> Any:
        made.append(tuple(matrix.shape))
        return quantise_matrix(matrix, *args)

    monkeypatch.setattr(quantised_products, "quantise_matrix", cast)
    return made


ROWS = [(34, 32), (34, 32), (34, 64)]
"""The values that products of the block read: q and k share one."""


@PRESET
@pytest.mark.parametrize("backend", long_beyond(1, ["eager", "aot_eager"]))
def test_a_frozen_model_quantises_its_weights_once(preset: str, backend: str, counted: list[tuple[int, ...]]) -> None:
    block = Block().eval()
    amp = amprewrite.rewrite(block, dtype="bf16", products=always(preset), backend=backend).eval()
    with torch.no_grad():
        wanted = amp(X)
        amp.freeze(X)
        assert torch.equal(amp(X), wanted)
        counted.clear()
        assert torch.equal(amp(X), wanted)
        assert counted == (ROWS if backend == "eager" else [])
        fresh = Block().eval()
        amp.unfreeze(fresh.state_dict())
        wanted = amprewrite.rewrite(fresh, dtype="bf16", products=always(preset), backend=backend).eval()(X)
        assert torch.equal(amp(X), wanted)
        amp.freeze(X)
        assert torch.equal(amp(X), wanted)


def test_a_compiler_gets_the_quantised_weights_of_a_frozen_model_as_inputs() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def kept(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(module)
        assert len(module.graph.find_nodes(op="placeholder")) == len(inputs)
        return module.forward

    amp = amprewrite.rewrite(Block().eval(), dtype="bf16", products="fp8-all", backend=kept).eval()
    with torch.no_grad():
        amp.freeze(X)
    assert [[node.args[1] for node in graph.graph.nodes if node.target is quantise] for graph in graphs] == [
        ["x", "w", "w", "x", "w", "x", "w"],
        ["x", "x", "x"],
    ]


def saturated(block: Block, x: Tensor, ranges: Any) -> Tensor:
    """The result of the block if the inputs of its products are cast with the scales of `ranges`; emulated by hand."""
    largest = {name: found.amax for name, found in ranges.regions[0].values.items()}

    def product(linear: nn.Linear, value: Tensor, name: str) -> Tensor:
        low, scale = value.bfloat16().float(), torch.tensor(448 / largest[name], dtype=torch.float32)
        copy = (low * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
        w8 = quantise(linear.weight.bfloat16(), "w", "tensorwise", ("out",)).straight
        return ((copy @ w8.values().t()).bfloat16() + linear.bias.bfloat16()).float()

    h = block.norm(x)
    x = x + product(block.q, h, "layer_norm") * product(block.k, h, "layer_norm")
    return x + product(block.down, nn.functional.gelu(product(block.up, x, "add")), "gelu")


@pytest.mark.parametrize("way", ["plain", "frozen", "exported", "compiled", "its plan"])
@torch.no_grad()
def test_a_calibration_gives_constant_scales(way: str) -> None:
    block = Block().eval()
    ranges = amprewrite.calibrate(block, [X])
    options: dict[str, Any] = {"dtype": "bf16", "products": "fp8-all", "backend": "aot_eager" if way == "compiled" else "eager"}
    amp = amprewrite.rewrite(block, calibration=ranges, **options).eval()
    run: Any = amp
    if way == "frozen":
        amp.freeze(X)
    elif way == "exported":
        run = amp.export_program((X,)).module()
    elif way == "its plan":
        amp(X)
        run = amprewrite.rewrite(block, plan=amprewrite.CastPlan.from_json(amp.plan.to_json())).eval()
    for scale in (1, 30):  # beyond the range values saturate
        wanted = saturated(block, scale * X, ranges)
        assert (run(scale * X) - wanted).norm() < 0.02 * wanted.norm()
    dynamic = amprewrite.rewrite(block, **options).eval()(30 * X)
    assert (dynamic - wanted).norm() > 0.1 * wanted.norm()
    if way == "plain":
        exact = block(30 * X)
        assert "fp8 copy layer_norm -> e4m3 with a constant scale, for values up to" in str(run.plan)
        found = amprewrite.verify(run, (30 * X,)).output_error
        assert found == pytest.approx(((run(30 * X) - exact).norm() / exact.norm()).item(), rel=0.05)


def test_training_computes_its_scales_whatever_was_calibrated() -> None:
    block = Block()
    amp = amprewrite.rewrite(block, dtype="bf16", products="fp8-all", calibration=amprewrite.calibrate(block, [X]), example_inputs=(X,))
    assert amp.plan.regions[0].training and "constant scale" not in str(amp.plan)


@pytest.mark.parametrize("backend", long_beyond(1, ["eager", "aot_eager"]))
def test_weights_that_are_kept_until_a_step_are_quantised_once_until_then(backend: str, counted: list[tuple[int, ...]]) -> None:
    amp = amprewrite.rewrite(Block().eval(), dtype="bf16", products="fp8-all", backend=backend, cache_weights="step").eval()
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.5)
    with torch.no_grad():
        before = amp(X)
        counted.clear()
        assert torch.equal(amp(X), before)
        assert counted == (ROWS if backend == "eager" else [])
    amp(X).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        after = amp(X)
        fresh = Block().eval()
        fresh.load_state_dict(amp.state_dict())
        assert torch.equal(after, amprewrite.rewrite(fresh, dtype="bf16", products="fp8-all", backend=backend).eval()(X))
    assert not torch.equal(after, before)


# plans --------------------------------------------------------------------------------------------------------------------


def test_plans_that_were_not_asked_for_fp8_do_not_know_of_it() -> None:
    plan = amprewrite.plan(Block(), (X,), dtype="bf16")
    assert "e4m3" not in str(plan) + plan.listing() and "GEMM" not in str(plan) and "quantised" not in plan.to_json()


def test_a_plan_names_what_each_gemm_reads_and_every_copy_with_its_readers() -> None:
    plan = amprewrite.plan(Block(), (X,), dtype="bf16", products="fp8-all")
    text = str(plan)
    assert "product linear: out e4m3 x e4m3, grad_in e5m2 x e4m3, grad_weight e5m2 x e4m3 because the preset asks" in text
    assert "fp8 copy layer_norm -> e4m3 for linear.out, linear.grad_weight, linear_1.out, linear_1.grad_weight, kept for backward" in text
    assert "fp8: 12 of 12 GEMMs of 4 products, 100 % of forward FLOPs; 11 copies" in text
    assert "its grad_weight runs in e5m2 x e4m3 because" in plan.explain("linear_3")
    assert "linear = linear(layer_norm:e4m3, self.weight:e4m3, self.bias:bf16)" in plan.listing()


def test_an_edited_plan_is_followed() -> None:
    block = Block()
    plan = amprewrite.plan(block, (X,), dtype="bf16", products="fp8-all")
    edited = plan.edit({"linear_3.grad_weight": "bf16", "up": "bf16", "gelu": "high"})
    amp = amprewrite.rewrite(block, plan=edited, example_inputs=(X,))
    (found,) = quantised(amp)
    assert [str(gemm) for gemm in found.of("linear_3").gemms] == ["out e4m3 x e4m3", "grad_in e5m2 x e4m3", "grad_weight bf16"]
    assert not found.of("linear_2").fp8 and found.of("linear").fp8
    assert "linear_3.grad_weight: e5m2 x e4m3 -> bf16 (the given plan says so)" in plan.diff(amp.plan)
    assert plan.diff(amprewrite.rewrite(block, plan=plan, example_inputs=(X,)).plan) == ""
    again = edited.edit({"up": "fp8", "linear_3.grad_weight": "fp8", "gelu": "low"})
    assert plan.diff(amprewrite.rewrite(block, plan=again, example_inputs=(X,)).plan) == ""


def test_a_plan_of_a_model_that_was_evaluated_first_keeps_fp8_in_the_backward() -> None:
    block = Block()
    amp = amprewrite.rewrite(block, dtype="bf16", products="fp8-all")
    with torch.no_grad():
        amp(X)
    amp(X)
    followed = amprewrite.rewrite(block, plan=amp.plan)
    followed(X)
    (found,) = quantised(followed)
    assert [str(gemm) for gemm in found.of("linear_3").gemms] == ["out e4m3 x e4m3", "grad_in e5m2 x e4m3", "grad_weight e5m2 x e4m3"]


def test_a_product_that_is_edited_to_fp32_reads_no_fp8() -> None:
    plan = amprewrite.plan(Block(), (X,), dtype="bf16", products="fp8-all")
    edited = plan.edit({"linear_1": "high"})
    (before,), (after,) = ([region.quantised for region in each.regions] for each in (plan, edited))
    assert before.of("linear_1") is not None and after.of("linear_1") is None
    assert [each.node for each in after.products] == [each.node for each in before.products if each.node != "linear_1"]
    assert not any(reader.startswith("linear_1.") for copy in after.copies for reader in copy.readers)
    every = plan.edit({each.node: "high" for each in before.products})
    assert amprewrite.CastPlan.from_json(every.to_json()) == every


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        ({"gelu": "fp8"}, "holds no product"),
        ({"linear.up": "fp8"}, "no node and no module"),
        ({"linear": "fp9"}, "neither 'low' nor 'high'"),
    ],
)
def test_an_edit_that_names_no_product_is_an_error(edit: dict[str, str], error: str) -> None:
    plan = amprewrite.plan(Block(), (X,), dtype="bf16", products="fp8-all")
    with pytest.raises(PlanError, match=error):
        plan.edit(edit)


def test_a_recipe_says_what_cannot_be_edited() -> None:
    plan = amprewrite.plan(Block(), (X,), dtype="bf16", products=always("fp8-safe"))
    with pytest.raises(PlanError, match="leaves it in bf16"):
        plan.edit({"linear.grad_weight": "fp8"})


# options ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"products": "fp9"}, "no preset"),
        ({"products": {"preset": 8}}, "no preset"),
        ({"products": {"up": "fp8"}}, "keys are"),
        ({"products": {"module:up": "e4m3"}}, "not understood"),
        ({"products": {"module:dwn": "fp8"}}, "did you mean module:down"),
        ({"products": {"node:linar": "fp8"}}, "did you mean node:linear"),
        ({"products": "fp8", "dtype": "fp16"}, "needs dtype='bf16'"),
        ({"dtype": "fp8"}, "products='fp8'"),
        ({"dtype": torch.float8_e4m3fn}, "not a format"),
    ],
)
def test_wrong_options_say_what_is_right(options: dict[str, Any], error: str) -> None:
    with pytest.raises(AmpRewriteError, match=error):
        amprewrite.rewrite(Block(), **{"dtype": "bf16", **options})(X)


def test_a_plan_leaves_no_choice_of_products() -> None:
    plan = amprewrite.plan(Block(), (X,), dtype="bf16")
    with pytest.raises(PolicyError, match="plan= says which products"):
        amprewrite.rewrite(Block(), plan=plan, products="fp8")


def test_a_preset_that_converts_nothing_says_why_and_what_to_do() -> None:
    said = r"runs none of 12 GEMMs in fp8: 12 because without a compiler the host takes longer .* backend='inductor', .* 'module:encoder"
    with pytest.raises(PolicyError, match=said):
        amprewrite.rewrite(Block(), dtype="bf16", products="fp8", device="h100")(X)
    with pytest.raises(PolicyError, match="runs none of 12 GEMMs in fp8: 12 because its copies would cost more"):
        amprewrite.rewrite(Block(), dtype="bf16", products="fp8", device="h100", backend="aot_eager")(X)


def test_a_device_without_fp8_keeps_bf16_and_says_so() -> None:
    block = Block()
    amp = amprewrite.rewrite(block, dtype="bf16", products="fp8")
    assert torch.equal(amp(X), amprewrite.rewrite(block, dtype="bf16")(X))
    assert "multiplies no fp8, so products run in bf16" in str(amp.plan)
    assert not any(any(each.chosen) for each in quantised(amp))


def test_rules_decide_before_presets_and_the_narrower_before_the_wider() -> None:
    rules = {"preset": "fp8-safe", "module:*": "fp8", "module:down": "bf16", "node:linear.grad_in": "bf16"}
    amp = amprewrite.rewrite(Block(), dtype="bf16", products=rules, example_inputs=(X,))
    (found,) = quantised(amp)
    assert [each.takes("out") for each in found.products] == [True, True, True, False]
    assert [gemm.fp8 for gemm in found.of("linear").gemms] == [True, False, False]
