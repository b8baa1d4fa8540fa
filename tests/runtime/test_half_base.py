"""Parameters in half precision that are frozen: LoRA over a half-precision base, mixed models, and wholly half ones."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from runtime_help import MLP, data, low, matmul_dtypes, mlp
from torch import nn
from versions import differs_in_2_11

import amprewrite
from amprewrite import PolicyError

HALF = [torch.bfloat16, torch.float16]


class Lora(nn.Module):
    """As PEFT's: the adapter computes in its own dtype, the result has the base's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        result = self.base(x)
        x = x.to(self.down.weight.dtype)
        return (result + self.up(self.down(x)) * 2).to(result.dtype)


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm(x)
        y = F.scaled_dot_product_attention(y[None], y[None], y[None])[0]
        return x + self.down(F.gelu(self.up(y)))


def frozen(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), Block(), Block(), nn.Linear(16, 20)).to(dtype)
    return model.requires_grad_(False)


def lora(dtype: torch.dtype) -> nn.Module:
    model = frozen(dtype)
    for block in (model[1], model[2]):
        block.down = Lora(block.down)
    return model


IDS = torch.arange(12).view(2, 6) % 20


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    F.cross_entropy(model(IDS).float().flatten(0, 1), IDS.flatten()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def error(got: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    got, exact = (torch.cat([each.detach().float().flatten() for each in every]) for every in (got, exact))
    return float((got - exact).norm() / exact.norm())


@pytest.mark.parametrize("base", HALF)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", None])
def test_lora_over_a_half_base(base, dtype):
    model = lora(base)
    exact = copy.deepcopy(model).float()
    wanted, own, truth = model(IDS), gradients(model), gradients(exact)
    own = [each.clone() for each in own]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # holds the frozen parameters, too
    amp = amprewrite.rewrite(model, dtype=dtype, optimizer=optimizer)
    got = amp(IDS)
    assert got.dtype == wanted.dtype == base
    grads = gradients(amp)
    assert {each.dtype for each in grads} == {torch.float32} and len(grads) == len(truth) == 4
    floor = 2e-3 if base is torch.float16 and dtype == "fp16" else 1e-2
    assert error([got], [exact(IDS)]) <= max(2 * error([wanted], [exact(IDS)]), floor)
    assert error(grads, truth) <= max(2 * error(own, truth), floor)
    before = F.cross_entropy(got.float().flatten(0, 1), IDS.flatten())
    for _ in range(3):
        gradients(amp)
        optimizer.step()
    assert F.cross_entropy(amp(IDS).float().flatten(0, 1), IDS.flatten()) < before


def test_the_plan_says_what_is_in_half_precision():
    amp = low(lora(torch.bfloat16), example_inputs=(IDS,))
    text = str(amp.plan)
    assert "15 of 19 parameters are bf16 already and frozen: ops that compute in bf16 stay as they are" in text
    assert "are in half precision already" in text and "heavy op left high" not in text
    node = next(node for node in amp.plan.nodes if node.op == "linear" and node.module == "1.up")
    assert node.sentence().startswith(f"{node.name} in 1.up is never cast because the model computes it in half precision itself (bf16)")
    assert {node.module for node in amp.plan.nodes if node.op == "linear" and node.colour.value == "low"} == {
        f"{block}.down.{part}" for block in (1, 2) for part in ("down", "up")
    }


@pytest.mark.parametrize("base", HALF)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_wholly_half_model_runs_as_it_is(base, dtype):
    model = frozen(base)
    amp = low(model, dtype=dtype)
    assert torch.equal(amp(IDS), model(IDS))
    assert not amp.plan.casts and "there is nothing to gain from rewriting it" in str(amp.plan)


class Mixed(nn.Module):
    """One part in half precision, between parts in fp32; values of both formats meet."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(32, 4)
        self.inner = nn.Linear(16, 16).to(dtype).requires_grad_(False)
        self.shift = nn.Parameter(torch.randn(16).to(dtype), requires_grad=False)
        self.dtype = dtype

    def forward(self, x):
        y = self.norm(self.first(x))
        z = self.inner(y.to(self.inner.weight.dtype))
        z = F.softmax(z, dim=-1, dtype=torch.float32).to(z.dtype) * z
        both = torch.cat([y + self.shift, z], -1)
        where = torch.where(both > 0, both, z.mean())
        return self.last(where), z, both


@pytest.mark.parametrize("base", HALF)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("pad", ["never", "always"])
def test_a_model_with_one_half_part_keeps_its_dtypes(base, dtype, pad):
    model, x = Mixed(base), data()
    exact = copy.deepcopy(model).float()
    amp = low(model, dtype=dtype, strict=True, pad=pad)
    torch.optim.SGD(amp.parameters(), 0.0).step()
    got, wanted, truth = amp(x), model(x), exact(x)
    assert [each.dtype for each in got] == [each.dtype for each in wanted] == [torch.float32, base, torch.float32]
    assert error(list(got), list(truth)) <= max(2 * error(list(wanted), list(truth)), 1e-2)
    assert matmul_dtypes(amp, x) == {base, torch.bfloat16 if dtype == "bf16" else torch.float16}
    got[0].square().mean().backward()
    own = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    exact(x)[0].square().mean().backward()
    truth = [p.grad for name, p in exact.named_parameters() if p.grad is not None]
    assert len(own) == len(truth) and error(own, truth) < 2e-2 and {each.dtype for each in own} == {torch.float32}


def test_half_parameters_to_be_trained_are_refused():
    model = mlp()
    model.second.half()
    with pytest.raises(PolicyError, match=r"second\.weight is fp16 already and is to be trained.*model\.float\(\).*freeze it"):
        low(model)
    model.second.requires_grad_(False)
    model.second.register_forward_pre_hook(lambda module, args: (args[0].half(),))
    assert low(model)(data()).dtype == torch.float16


@differs_in_2_11("a parameter that asks for gradients is captured no second time")
def test_unfreezing_a_half_part_later_says_that_there_are_no_master_weights():
    class Halves(MLP):
        def forward(self, x):
            return self.second(torch.relu(self.first(x)).to(torch.bfloat16))

    model = Halves()
    model.second.bfloat16().requires_grad_(False)
    amp = low(model)
    amp(data())
    model.second.requires_grad_(True)
    with pytest.warns(amprewrite.AmpRewriteWarning, match=r"second\.weight .* bf16 now: the fp32 master weights are gone"):
        amp(data())
