"""Parameters in half precision that are frozen: LoRA over a half-precision base, mixed models, and wholly half ones."""

from __future__ import annotations

import copy
import types

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
    with pytest.raises(PolicyError, match=r"second\.weight \(2 in all\) are fp16 already.*dtype=torch\.float32.*upcast=True.*freeze"):
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


class Normed(nn.Module):
    """A net with a head that shares its table, and batch norm, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm, self.body = nn.Embedding(1024, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 1024, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(torch.relu(self.body(self.norm(self.table(x)))))


WORDS = torch.arange(256) * 3 % 1024


def compiled(model, **options):
    return torch.compile(model, backend="amprewrite", options=options)(WORDS)


WAYS_IN = {
    "rewrite": lambda model, **options: amprewrite.rewrite(model, **options),
    "in place": lambda model, **options: amprewrite.rewrite(model, inplace=True, **options),
    "plan": lambda model, **options: amprewrite.plan(model, (WORDS,), **options),
    "compile": compiled,
    "compile, behind a decorator": lambda model, **options: torch.compile(hidden(model), backend="amprewrite", options=options)(WORDS),
    "only evaluated": lambda model, **options: torch.no_grad()(compiled)(model.eval(), **options),
}


@pytest.mark.filterwarnings("error")
def test_a_model_all_in_fp64_says_that_nothing_is_rewritten():
    x, says = data().double(), "all parameters are fp64, .* nothing is rewritten: call amp.float"
    amp = low(mlp())
    with pytest.warns(amprewrite.AmpRewriteWarning, match=says):
        amp.double()
    assert amp(x).dtype == torch.float64  # told once
    with pytest.warns(amprewrite.AmpRewriteWarning, match=says):
        low(mlp().double())(x)
    part = mlp()
    part.second.double()
    low(part)


def hidden(model):
    """A function whose frame holds no module, as that of a decorator of a library."""
    held = types.SimpleNamespace(model=model)
    return lambda x: held.model.norm(held.model.table(x))


@pytest.mark.parametrize("way", WAYS_IN)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_every_way_in_gives_one_answer_to_a_half_checkpoint(way, half):
    model = Normed().to(half)
    with pytest.raises((PolicyError, torch._dynamo.exc.BackendCompilerFailed)) as raised:
        WAYS_IN[way](model, dtype="bf16")
    said = str(raised.value)
    assert "already, and fp32 parameters are the master weights" in said
    for remedy in ("from_pretrained(..., dtype=torch.float32)", "upcast=True", "model.float()", "requires_grad_(False)"):
        assert remedy in said, remedy
    assert {p.dtype for p in model.parameters()} == {half}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_masters_are_bitwise_those_of_float(inplace, half, dtype):
    model = Normed().to(half)
    want, held = copy.deepcopy(model).float(), dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = amprewrite.rewrite(model, dtype=dtype, upcast=True, inplace=inplace, optimizer=optimizer)
    for name, tensor in want.state_dict().items():
        for each in (amp, model):
            got = each.state_dict()[name]
            assert got.dtype == tensor.dtype and torch.equal(got, tensor), name
    assert all(parameter is held[name] for name, parameter in amp.named_parameters()) and amp.head.weight is amp.table.weight
    reference = amprewrite.rewrite(want, dtype=dtype)
    torch.testing.assert_close(amp(WORDS), reference(WORDS), rtol=0, atol=0)
    amp(WORDS).square().mean().backward()
    optimizer.step()
    assert any("5 parameters in" in note and "fp32 master weights" in note for note in amp.plan.notes), amp.plan.notes


def test_a_plan_says_what_an_upcast_would_run_and_converts_nothing():
    model = Normed().bfloat16()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    plan = amprewrite.plan(model, (WORDS,), dtype="bf16", upcast=True)
    assert any("upcast" in note for note in plan.notes) and any(node.op == "linear" for node in plan.nodes)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_an_upcast_that_fails_leaves_the_model_half():
    model = Normed().bfloat16()
    model.table.weight.grad = torch.ones_like(model.table.weight)
    with pytest.raises(Exception, match="out of range"):
        amprewrite.rewrite(model, dtype="bf16", upcast=True, example_inputs=(WORDS + 4096,))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} == {model.norm.running_mean.dtype, model.table.weight.grad.dtype}


def test_a_frozen_half_base_stays_half_beside_what_is_upcast():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    model[0].requires_grad_(False)
    model[0].register_buffer("scale", torch.ones((), dtype=torch.bfloat16))
    amprewrite.rewrite(model, dtype="bf16", upcast=True)
    assert {p.dtype for p in model[0].parameters()} == {torch.bfloat16} == {model[0].scale.dtype}
    assert {p.dtype for p in model[1].parameters()} == {torch.float32}


def test_an_upcast_of_fp32_says_nothing():
    amp = amprewrite.rewrite(mlp(), dtype="bf16", upcast=True)
    amp(data())
    assert not any("upcast" in note for note in amp.plan.notes)
