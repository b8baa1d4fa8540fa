"""A product that reads fp8 copies: bit for bit torchao's emulation, right in higher derivatives, and light on memory."""

from __future__ import annotations

import pytest
import torch
from fp8_help import LINEARS, RECIPES
from runtime_help import Sink
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from amprewrite.graphs.fx.ops.quantised_products import quantise, quantised_product
from amprewrite.graphs.fx.ops.wide_products import wide_linear
from amprewrite.tables.formats import GRAD_IN, GRAD_WEIGHT, OUT, PRESETS

PRESET = pytest.mark.parametrize("preset", RECIPES)
BF16 = torch.bfloat16


def product(x: Tensor, w: Tensor, bias: Tensor | None, preset: str, gemms: tuple[str, ...] = (), transposed: bool = False) -> Tensor:
    recipe = PRESETS[preset].recipe
    gemms = gemms or recipe.gemms
    x8, w8 = quantise(x, "x", recipe.name, gemms), quantise(w, "w", recipe.name, gemms, transposed)
    wide_x, wide_w = not {OUT, GRAD_WEIGHT} <= set(gemms), not {OUT, GRAD_IN} <= set(gemms)
    return quantised_product(x if wide_x else None, w if wide_w else None, bias, x8, w8, recipe.name, gemms, transposed)


def operands(rows: tuple[int, ...] = (4, 33), inner: int = 64, columns: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    x, w, bias = torch.randn(*rows, inner), torch.randn(columns, inner) / 8, torch.randn(columns)
    return tuple(each.to(BF16).requires_grad_() for each in (x, w, bias))  # type: ignore[return-value]


@pytest.mark.parametrize("preset", [*RECIPES, "wide"])
def test_operands_of_a_product_that_no_loss_reads_get_no_gradient(preset: str) -> None:
    x, w, bias = operands()
    made = wide_linear(x, w, bias) if preset == "wide" else product(x, w, bias, preset)
    Sink.apply(x.sum(), made)[0].backward()
    assert x.grad is not None and w.grad is None and bias.grad is None


@PRESET
@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize("transposed", [False, True])
def test_results_and_gradients_are_those_of_the_recipe(preset: str, linear: str, transposed: bool) -> None:
    x, w, bias = operands()
    gradient = torch.randn(4, 33, 96).to(BF16)
    wanted = LINEARS[linear](x, w, bias, RECIPES[preset])
    got = product(x, w.t() if transposed else w, bias, preset, transposed=transposed)
    assert torch.equal(got, wanted)
    for mine, theirs in zip(*(torch.autograd.grad(y, (x, w, bias), gradient) for y in (got, wanted)), strict=True):
        assert torch.equal(mine, theirs)


@PRESET
def test_at_a_real_size(preset: str) -> None:
    x, w, bias = operands((1024,), 1024, 1024)
    got, wanted = product(x, w, bias, preset), LINEARS["written"](x, w, bias, RECIPES[preset])
    assert torch.equal(got, wanted)
    for mine, theirs in zip(*(torch.autograd.grad(y.square().mean(), (x, w)) for y in (got, wanted)), strict=True):
        assert torch.equal(mine, theirs)


@PRESET
def test_gradients_that_can_be_differentiated_are_the_same(preset: str) -> None:
    x, w, bias = operands()
    plain = torch.autograd.grad(product(x, w, bias, preset).square().mean(), (x, w, bias))
    again = torch.autograd.grad(product(x, w, bias, preset).square().mean(), (x, w, bias), create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@PRESET
def test_a_batch_of_gradients_gives_what_each_gradient_gives(preset: str) -> None:
    leaves = operands()
    y = product(*leaves, preset)
    batch = torch.randn(3, *y.shape).to(BF16) * torch.tensor([1.0, 40.0, 0.3]).view(3, 1, 1, 1).to(BF16)
    together = torch.autograd.grad(y, leaves, batch, retain_graph=True, is_grads_batched=True)
    for place, gradient in enumerate(batch):
        for mine, theirs in zip(together, torch.autograd.grad(y, leaves, gradient, retain_graph=True), strict=True):
            torch.testing.assert_close(mine[place], theirs, rtol=0.01, atol=0.01 * float(theirs.abs().mean()))


@PRESET
def test_second_derivatives_are_near_those_of_fp32(preset: str) -> None:
    def penalty(y: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(y.float().pow(2).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(each.float().pow(2).sum() for each in first), leaves)

    x, w, bias = operands()
    exact = [each.detach().float().requires_grad_() for each in (x, w, bias)]
    found = penalty(product(x, w, bias, preset), x, w, bias)
    wanted = penalty(torch.nn.functional.linear(*exact), *exact)
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.float() - theirs).norm() / theirs.norm() < 0.06


@PRESET
def test_a_batch_of_gradients_can_be_differentiated(preset: str) -> None:
    x, w, bias = operands()
    y = product(x, w, bias, preset)
    batch = torch.randn(3, *y.shape).to(BF16)

    def penalty(of: Tensor, leaf: Tensor) -> Tensor:
        return torch.autograd.grad(of.float().square().sum(), leaf, retain_graph=True)[0].float()

    for leaf, other in ((x, w), (w, x)):
        (together,) = torch.autograd.grad(y, leaf, batch, create_graph=True, is_grads_batched=True)
        alone = sum(penalty(torch.autograd.grad(y, leaf, each, create_graph=True)[0], other) for each in batch)
        assert (penalty(together, other) - alone).norm() / alone.norm() < 0.01


@pytest.mark.parametrize("gemms", [(OUT,), (GRAD_IN,), (GRAD_WEIGHT,), (OUT, GRAD_WEIGHT), (GRAD_IN, GRAD_WEIGHT)])
def test_each_gemm_by_itself(gemms: tuple[str, ...]) -> None:
    x, w, bias = operands()
    gradient = torch.randn(4, 33, 96).to(BF16)
    low, fp8 = torch.nn.functional.linear(x, w, bias), LINEARS["written"](x, w, bias, "tensorwise")
    got = product(x, w, bias, "fp8", gemms)
    if OUT in gemms:
        assert torch.equal(got, fp8)
    else:
        assert torch.equal(got, low)
    by_low, by_fp8 = (torch.autograd.grad(y, (x, w), gradient) for y in (low, fp8))
    for gemm, mine, plain, eighth in zip((GRAD_IN, GRAD_WEIGHT), torch.autograd.grad(got, (x, w), gradient), by_low, by_fp8, strict=True):
        wanted = eighth if gemm in gemms else plain
        assert torch.allclose(mine.float(), wanted.float(), rtol=2**-7, atol=2**-6)
        assert torch.equal(mine, eighth) == (gemm in gemms)


def test_a_value_is_quantised_once_for_all_its_readers_and_gets_the_sum_of_their_gradients() -> None:
    x, w, _ = operands()
    x8 = quantise(x, "x", "tensorwise", PRESETS["fp8"].recipe.gemms)
    both = []
    for scale in (1, 2):
        w8 = quantise(w * scale, "w", "tensorwise", PRESETS["fp8"].recipe.gemms)
        both.append(quantised_product(None, None, None, x8, w8, "tensorwise", PRESETS["fp8"].recipe.gemms))
    (found,) = torch.autograd.grad(both[0].sum() + both[1].sum(), x)
    apart = [torch.autograd.grad(product(x, w * scale, None, "fp8").sum(), x)[0] for scale in (1, 2)]
    assert torch.equal(found, apart[0] + apart[1]) or torch.equal(found, apart[1] + apart[0])


def test_under_a_checkpoint_the_numbers_are_the_same() -> None:
    x, w, bias = operands()
    plain = torch.autograd.grad(product(x, w, bias, "fp8").square().mean(), (x, w, bias))
    y = checkpoint(product, x, w, bias, "fp8", use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(plain, torch.autograd.grad(y.square().mean(), (x, w, bias)), strict=True))


@pytest.mark.parametrize(("preset", "most"), [("fp8", 0.52), ("fp8-rowwise", 0.60)])
def test_the_copy_is_kept_for_backward_and_not_the_value(preset: str, most: float) -> None:
    """Bytes of storages that are saved, beside those that bf16 saves."""

    def saved(linear: object, preset: str) -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        x, w, _ = operands((256,), 128, 128)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = product(x.clone(), w.clone(), None, preset) if preset else torch.nn.functional.linear(x.clone(), w.clone())
        assert made.requires_grad
        return sum(kept.values())

    assert saved(product, preset) <= most * saved(product, "")


def test_frozen_weights_and_inputs_take_no_gradient() -> None:
    x, w, bias = operands()
    y = product(x, w.detach(), bias.detach(), "fp8")
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(product(x, w, bias, "fp8").sum(), x)[0])
    y = product(x.detach(), w, bias, "fp8")
    assert torch.autograd.grad(y.sum(), w)[0].shape == w.shape
    with torch.no_grad():
        assert torch.equal(product(x, w, bias, "fp8"), y)
