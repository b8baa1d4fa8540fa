"""Attention masks that lie in memory as no fused GPU kernel takes them: a bias that is looked up for each position and permuted."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.tables.vocabulary import Edit

HEADS, LENGTH, WIDTH = 4, 16, 32
Bias = Callable[["Attention", Tensor], Tensor]
FOLDER = Path(__file__).parents[3] / "examples" / "benchmarks"


class Attention(nn.Module):
    """Two layers of attention that share a learnt bias for each head and distance, as T5's do."""

    def __init__(self, bias: Bias) -> None:
        super().__init__()
        self.project, self.table, self.bias = nn.Linear(WIDTH, 3 * WIDTH), nn.Embedding(LENGTH, HEADS), bias

    def forward(self, x: Tensor) -> Any:
        bias = self.bias(self, x)
        for _ in range(2):
            q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.project(x).chunk(3, -1))
            x = self.attend(q, k, v, bias)
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2)

    def looked_up(self) -> Tensor:
        at = torch.arange(LENGTH)
        found: Tensor = self.table((at[:, None] - at[None, :]).abs())
        return found


class Summed(Attention):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).sum()


def permuted(model: Attention, x: Tensor) -> Tensor:
    return model.looked_up().permute(2, 0, 1).unsqueeze(0)


def where_allowed(model: Attention, x: Tensor) -> Tensor:
    allowed = (x[:, :, 0] > -1)[:, None, None, :].expand(-1, -1, LENGTH, -1)
    return torch.where(allowed, permuted(model, x), torch.finfo(x.dtype).min)


def mask_added(model: Attention, x: Tensor) -> Tensor:
    return permuted(model, x) * 2 + x[:, None, None, :, 0]


def one_row(model: Attention, x: Tensor) -> Tensor:
    """One bit for each query, which is never cast."""
    return (x[:, :, 0] > -9)[:, None, :, None].expand(-1, -1, -1, LENGTH)


def contiguous(model: Attention, x: Tensor) -> Tensor:
    return permuted(model, x).contiguous()


def causal(model: Attention, x: Tensor) -> Tensor:
    """Made of sizes alone: attention takes no mask at all."""
    at = torch.arange(x.shape[1])
    return (at[:, None] <= at[None, :]).t()


def written(model: Attention, x: Tensor) -> Tensor:
    bias = model.looked_up().detach().permute(2, 0, 1)[None].repeat(2, 1, 1, 1).transpose(2, 3)
    bias[:, 0] += 1
    return bias


STRIDED = [permuted, where_allowed, mask_added]
LEFT = [contiguous, causal, written]


def copied(plan: amprewrite.ModelPlan) -> list[str]:
    """The values that a plan copies for masks."""
    regions = [part for region in plan.regions for part in region.flat(region.name)]
    return [name for region in regions for name in region.edited(Edit.CONTIGUOUS_MASK)]


def planned(bias: Bias, device: str = "h100") -> amprewrite.ModelPlan:
    torch._dynamo.reset()
    return amprewrite.plan(Attention(bias), (torch.randn(2, LENGTH, WIDTH),), dtype="bf16", device=device)


@pytest.mark.parametrize("bias", [*STRIDED, one_row])
def test_a_compiler_gets_fused_attention_where_autocast_multiplies_in_fp32(bias: Bias, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    step = importlib.import_module("compiled_memory").step
    torch.manual_seed(0)
    model, feed = Summed(bias), {"x": torch.randn(2, LENGTH, WIDTH)}
    autocast, ours = (step(model, feed, "bf16", each, "h100") for each in (False, True))
    assert (autocast.wide_products, ours.wide_products) == (4, 0)
    assert ours.bytes < 0.95 * autocast.bytes


@pytest.mark.parametrize("bias", STRIDED)
def test_one_copy_serves_all_layers(bias: Bias) -> None:
    assert copied(planned(bias)) == ["permute"]


@pytest.mark.parametrize("bias", LEFT)
def test_no_copy_of_masks_that_lie_right_are_not_read_or_are_written(bias: Bias) -> None:
    assert not copied(planned(bias))


def test_no_copy_for_a_cpu() -> None:
    assert not copied(planned(permuted, "cpu"))


class Again(Attention):
    """Computes its attention anew in backward."""

    def attend(self, *given: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().attend, *given, use_reentrant=False)
        return result


@pytest.mark.parametrize("bias", STRIDED)
@pytest.mark.parametrize("kind", [Attention, Again])
def test_numbers_and_gradients_are_those_without_the_copy(bias: Bias, kind: type[Attention]) -> None:
    torch.manual_seed(0)
    model, x = kind(bias), torch.randn(2, LENGTH, WIDTH)
    plan = amprewrite.plan(model, (x,), dtype="bf16", device="h100")
    assert copied(plan)
    found = []
    for each in (plan, plan.switch_off("contiguous mask")):
        amp = amprewrite.rewrite(copy.deepcopy(model), plan=each, device="h100")
        result = amp(x)
        result.square().sum().backward()
        found.append([result, *(p.grad for p in amp.parameters() if p.grad is not None)])
        assert copied(amp.plan) == copied(each)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Returned(Attention):
    """Returns the bias, a view of the weights, and the attention itself."""

    def __init__(self) -> None:
        super().__init__(lambda model, x: model.table.weight[None].expand(LENGTH, -1, -1).permute(2, 0, 1)[None])

    def forward(self, x: Tensor) -> Any:
        bias = self.bias(self, x)
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, bias), bias


class ReturnedAgain(Returned):
    """A checkpoint returns the bias that it reads."""

    def forward(self, x: Tensor) -> Any:
        result: Any = checkpoint(super().forward, x, use_reentrant=False)
        return result


@pytest.mark.parametrize("kind", [Returned, ReturnedAgain])
def test_a_returned_bias_stays_a_view(kind: type[Returned]) -> None:
    amp = amprewrite.rewrite(kind(), dtype="bf16", device="h100")
    result, bias = amp(torch.randn(2, LENGTH, WIDTH))
    assert copied(amp.plan)
    assert bias.stride() == (HEADS, 1, 0, HEADS)
    assert kind is ReturnedAgain or bias.untyped_storage().data_ptr() == amp.table.weight.untyped_storage().data_ptr()
    (result.sum() + bias.sum()).backward()
    assert amp.table.weight.grad is not None


def test_a_plan_that_keeps_the_layout_is_followed() -> None:
    plan = planned(permuted)
    amp = amprewrite.rewrite(Attention(permuted), plan=plan.switch_off("contiguous mask"), device="h100")
    amp(torch.randn(2, LENGTH, WIDTH))
    assert not copied(amp.plan) and copied(plan) and "contiguous mask" in plan.to_json()
