"""backend="inductor-exact": the bits of eager code, forward and backward, with what may be fused fused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from runtime_help import data, mlp
from torch import Tensor, nn
from torch._inductor import config, lowering
from versions import differs_in_2_11

import amprewrite
from amprewrite.runtime.compiler import dynamo
from amprewrite.runtime.compiler.exact.spelling import decompositions, is_fusible, spell

aten, prims = torch.ops.aten, torch.ops.prims


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graphs of other tests; scalar C++, which builds in a third of the time."""
    torch._dynamo.reset()
    with config.patch({"cpp.simdlen": 1}):
        yield


class Block(nn.Module):
    """Attention and a feed-forward layer, with numbers that no low format holds and a slice whose gradient is padded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.qkv = nn.Embedding(11, 16), nn.LayerNorm(16), nn.Linear(16, 48)
        self.up, self.down = nn.Linear(16, 40), nn.Linear(40, 16)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        x = x + self.down(nn.functional.gelu(self.up(x)) * 0.3)
        return torch.softmax(x * 0.1, -1)[:, 1:] + x[:, 1:]


def trained(backend: Any, dtype: str, batches: int = 1) -> tuple[list[Tensor], Any]:
    """Outputs and gradients of a model, and the rewritten model."""
    model = Block()
    amp = amprewrite.rewrite(model, dtype=dtype, backend=backend)
    found: list[Tensor] = []
    for batch in range(batches):
        words = torch.randint(0, 11, (3 + batch, 7), generator=torch.Generator().manual_seed(batch))
        out = amp(words)
        model.zero_grad()
        out.square().mean().backward()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters())]
    return found, amp


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_results_and_gradients_are_eagers_bit_for_bit(dtype):
    wanted, _ = trained("eager", dtype)
    got, amp = trained("inductor-exact", dtype)
    assert len(amp.plan.regions) == 1 and not amp.plan.skipped
    for want, found in zip(wanted, got, strict=True):
        assert found.dtype == torch.float32 and torch.equal(found, want)


@pytest.mark.long
def test_nothing_is_registered_for_the_process():
    """A call that inductor does not know becomes a kernel's for good where it makes its own fallback."""
    before, settings = set(lowering.lowerings), config.emulate_precision_casts
    model = nn.Sequential(nn.Linear(8, 4), nn.Softplus())
    with torch.no_grad():
        amprewrite.rewrite(model, dtype="bf16", backend="inductor-exact")(data())
    assert set(lowering.lowerings) == before and config.emulate_precision_casts == settings


def test_the_plan_says_which_rounding_the_compiler_runs(monkeypatch):
    """The words follow from the name of the backend, so nothing is compiled."""
    x = data()
    monkeypatch.setattr(dynamo, "lookup_backend", lambda backend: lambda module, inputs: module.forward)

    def notes(backend: str) -> str:
        return " ".join(amprewrite.plan(mlp(), (x,), dtype="bf16", backend=backend).notes)

    assert "inductor keeps fp32 inside its kernels" in notes("inductor") and "inductor-exact" in notes("inductor")
    assert "rounded where the plan says" in notes("inductor-exact")
    assert "inductor" not in notes("eager")


# which calls are fused ----------------------------------------------------------------------------------------------------------


def called(target: Any, *operands: Any, **named: Any) -> torch.fx.Node:
    """A call in a graph of its own, with what it gives."""
    graph = torch.fx.Graph()
    args = []
    for place, operand in enumerate(operands):
        args.append(graph.placeholder(f"x{place}") if isinstance(operand, Tensor) else operand)
        if isinstance(operand, Tensor):
            args[-1].meta["val"] = operand
    node = graph.call_function(target, tuple(args), named)
    node.meta["val"] = target(*operands, **named)
    graph.output(node)
    return node


LOW, WIDE = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("fuses", "call"),
    [
        pytest.param(True, (aten.add.Tensor, LOW, LOW), id="a sum"),
        pytest.param(True, (aten.mul.Tensor, LOW, WIDE), id="low widens to fp32"),
        pytest.param(True, (aten.mul.Tensor, LOW, 0.5), id="a number that the format holds"),
        pytest.param(True, (aten.mul.Tensor, WIDE, 0.1), id="fp32 and a number"),
        pytest.param(True, (aten.where.self, LOW > 0, LOW, LOW), id="a choice"),
        pytest.param(False, (aten.rsqrt.default, LOW), id="a kernel that rounds its last elements twice"),
        pytest.param(False, (aten.mul.Tensor, LOW, 0.1), id="a number that the format rounds"),
        pytest.param(False, (aten.gt.Scalar, LOW, 0.1), id="compared with a number that the format rounds"),
        pytest.param(False, (aten.mul.Tensor, LOW, torch.tensor(0.1)), id="an fp32 number in a tensor"),
        pytest.param(False, (aten.rsqrt.default, WIDE), id="another library's root"),
        pytest.param(False, (aten.exp.default, LOW), id="an exponential"),
        pytest.param(False, (aten.sum.dim_IntList, WIDE, [0]), id="a sum over a dim"),
        pytest.param(False, (aten.mm.default, LOW, LOW.T), id="a product of matrices"),
        pytest.param(False, (aten.t.default, LOW), id="what inductor has no words for"),
    ],
)
def test_a_call_is_fused_if_its_bits_are_the_kernels(fuses, call):
    assert is_fusible(called(*call)) is fuses


def test_a_scaled_sum_is_the_kernels():
    assert not is_fusible(called(aten.add.Tensor, LOW, LOW, alpha=3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", [aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor])
def test_a_number_that_no_low_format_holds_counts_as_it_does_in_the_kernel(target, dtype):
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    node = called(target, x, 0.1)
    spell(node.graph)
    node.graph.lint()
    spelt = torch.fx.GraphModule({}, node.graph)
    assert all(is_fusible(each) for each in spelt.graph.nodes if each.op == "call_function")
    assert torch.equal(spelt(x), target(x, 0.1))


@pytest.mark.parametrize(
    ("power", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (2.0, torch.float16), (2, torch.float32), (3, torch.float32)], ids=str
)
def test_small_powers_are_products(power, dtype):
    x = torch.randn(67, generator=torch.Generator().manual_seed(0)).to(dtype)
    node = called(aten.pow.Tensor_Scalar, x, power)
    spell(node.graph)
    spelt = torch.fx.GraphModule({}, node.graph)
    assert not [each for each in spelt.graph.nodes if each.target is aten.pow.Tensor_Scalar]
    assert torch.equal(spelt(x), x.pow(power))


@pytest.mark.parametrize(("values", "power"), [([2**40, 3], 2.0), ([2, 3], 1.0), ([2**40, 3], 3.0), ([True, False], 2)])
def test_powers_that_have_another_dtype_stay_powers(values, power):
    x = torch.tensor(values)
    node = called(aten.pow.Tensor_Scalar, x, power)
    spell(node.graph)
    spelt, want = torch.fx.GraphModule({}, node.graph)(x), x.pow(power)
    assert spelt.dtype == want.dtype and torch.equal(spelt, want)


def test_a_cube_in_fp16_is_the_kernels():
    node = called(aten.pow.Tensor_Scalar, torch.ones(3).half(), 3)
    spell(node.graph)
    assert node.target is aten.pow.Tensor_Scalar and not is_fusible(node)


# memory ------------------------------------------------------------------------------------------------------------------------


class Gathered(nn.Module):
    """Rows added up at places: a result that is read after the memory it was made from has a new owner."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x).float()
        places = torch.arange(12) * 7 % 12 // 2
        summed = torch.zeros(12, 16).index_put((places,), rows, accumulate=True)
        shifted = (summed + 1.5).exp()
        return shifted.sum(-1, keepdim=True) * summed + rows


class Written(nn.Module):
    """Values written to slices, rows and blocks of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h, z = self.first(x), torch.zeros(12, 16)
        z[:, :8] = h[:, 8:].exp()
        z[3] = h[2].float()
        z[1:5, 2:6] = 3 * h[1:5, 2:6]
        out = self.second(z * 2) + z.exp()
        z.mul_(2)
        return out.tanh() * z


@pytest.mark.long
@pytest.mark.parametrize("made", [Gathered, Written])
def test_writes_are_eagers(made):
    def found(backend: str) -> list[Tensor]:
        model, x = made(), torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
        amp = amprewrite.rewrite(model, dtype="bf16", backend=backend)
        out = amp(x)
        out.square().mean().backward()
        with torch.no_grad():
            again = amp(x)
        return [out.detach(), again, *(p.grad for p in model.parameters())]

    for want, got in zip(found("eager"), found("inductor-exact"), strict=True):
        assert torch.equal(want, got)


# random numbers and sizes ------------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Two dropouts, whose scale no low format holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.drop = nn.Linear(16, 24), nn.Linear(24, 16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.drop(torch.relu(self.up(x)))))


@pytest.mark.long
@differs_in_2_11("other code for dropout")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_dropout_and_batches_of_other_sizes_are_eagers(dtype):
    def found(backend: str) -> list[Tensor]:
        model, results = Dropping(), []
        amp = amprewrite.rewrite(model, dtype=dtype, backend=backend)
        for rows in (4, 6, 9):
            x = torch.randn(rows, 3, 16, generator=torch.Generator().manual_seed(rows))
            torch.manual_seed(1)
            out = amp(x)
            model.zero_grad()
            out.square().mean().backward()
            results += [out.detach(), *(p.grad.clone() for p in model.parameters())]
        assert not amp.plan.skipped
        return results

    for want, got in zip(found("eager"), found("inductor-exact"), strict=True):
        assert torch.equal(want, got)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_all_or_nothing_stays_the_kernels(p):
    assert decompositions()[aten.native_dropout.default](WIDE, p, True) is NotImplemented


def test_the_backward_of_a_threshold_that_a_low_format_rounds_stays_the_kernels():
    rule, x = decompositions()[aten.threshold_backward.default], torch.tensor([0.0996, 0.1001, -1.0, torch.nan], dtype=torch.bfloat16)
    assert rule(torch.ones_like(x), x, 0.1) is NotImplemented
    assert torch.equal(rule(torch.ones_like(x), x, 0), aten.threshold_backward(torch.ones_like(x), x, 0))
