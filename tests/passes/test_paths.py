"""What is returned is on the path: its value, memory, identity and gradient are those of the fp32 model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from path_programs import Clip, Generated, dynamo_keeps_hooks, generate, observe, same
from tiers import long_beyond
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amprewrite

WAYS = [{"dtype": "bf16"}, {"dtype": "fp16", "loss_scale": 16.0}, {"dtype": "bf16", "loss_scale": 16.0}]
way = pytest.mark.parametrize("options", WAYS, ids=["bf16", "fp16 scaled", "bf16 scaled"])


# -- generated programs ---------------------------------------------------------------------------
def differs(seed: int, lists: str, grad: bool, options: dict[str, Any], loss: float = 1.0) -> list[str] | None:
    """What of a generated program differs from fp32; None if fp32 itself cannot run it, or it leaves the exact integers."""
    plain = Generated(*generate(seed), breaks=seed % 3 == 0)
    model = copy.deepcopy(plain)
    try:
        want = observe(plain, plain, grad, loss=loss)
    except RuntimeError:
        return None
    flat = [leaf for leaf in torch.utils._pytree.tree_leaves(want) if isinstance(leaf, Tensor)]
    if max(leaf.abs().max() for leaf in flat) > 200:
        return None
    torch._dynamo.reset()
    amp = amprewrite.rewrite(model, lists=lists, **options)
    got = observe(amp, model, grad, want.get("written"), loss)
    return [key for key in want if not same(want[key], got.get(key))]


@pytest.mark.parametrize("lists", ["default", "tf", "autocast", "o2", "o3"])
@way
@pytest.mark.long
def test_generated_programs_are_those_of_fp32(options: dict[str, Any], lists: str) -> None:
    first = 1000 * WAYS.index(options) + sum(map(ord, lists))
    found = {seed: differs(seed, lists, seed % 5 != 0, options) for seed in range(first, first + 5)}
    assert any(different is not None for different in found.values())
    assert not {seed: different for seed, different in found.items() if different}


@pytest.mark.parametrize("lists", ["default", "autocast", "o2"])
@pytest.mark.long
def test_gradients_below_fp16_are_as_exact_as_large_ones(lists: str) -> None:
    """With powers of two for the loss and its scale nothing rounds: a gradient that differs met fp16 without the scale."""
    first = 40_000 + sum(map(ord, lists))
    options = {"dtype": "fp16", "loss_scale": 2.0**24}
    found = {seed: differs(seed, lists, True, options, loss=2.0**-28) for seed in range(first, first + 12)}
    assert any(different is not None for different in found.values())
    assert not {seed: different for seed, different in found.items() if different}


# -- one by one -------------------------------------------------------------------------------------
class Bits(nn.Module):
    """Returns an input's memory, reached over its bits."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.contiguous().view(torch.int32).view(torch.float32)
        return y, y.contiguous()


@pytest.mark.parametrize("lists", ["default", "o2"])
def test_memory_reached_over_bits_leaves_as_itself(lists: str) -> None:
    x = torch.ones(4, 4)
    first, second = amprewrite.rewrite(Bits(), dtype="bf16", lists=lists)(x)
    x[0, 0] = 8.0
    assert first[0, 0] == second[0, 0] == 8.0


class Feature(nn.Module):
    """Returns a feature that the rest of the network reads, once low and once in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        feature = self.a(x)
        return feature, self.b(torch.relu(feature)) + feature.logsumexp(-1, keepdim=True)


@way
def test_the_gradient_of_a_returned_feature(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Feature(), torch.ones(2, 4)
    gradients = []
    for each in (model, amprewrite.rewrite(copy.deepcopy(model), **options)):
        feature, y = each(x)
        (gradient,) = torch.autograd.grad(y.sum(), feature, retain_graph=True)
        feature.retain_grad()
        (y.sum() + feature.square().sum()).backward()
        gradients.append([gradient, feature.grad])
    for want, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("read", [True, False], ids=["read", "only returned"])
@way
def test_the_gradient_of_a_returned_value_is_that_behind_its_hooks(options: dict[str, Any], read: bool) -> None:
    if not dynamo_keeps_hooks():
        pytest.skip("torch.compile of this torch hands out a hooked value from before its hooks, whoever uses it")

    class Hooked(Feature):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            feature = self.a(x)
            feature.register_hook(lambda gradient: gradient.clamp(-1, 1))
            feature.register_hook(lambda gradient: gradient * 2)
            return feature, self.b(torch.relu(feature if read else self.a(2 * x)))

    torch.manual_seed(0)
    model, x = Hooked(), torch.ones(2, 4)
    gradients = []
    for each in (model, amprewrite.rewrite(copy.deepcopy(model), **options)):
        feature, y = each(x)
        feature.retain_grad()
        (y.sum() - 3 * feature.sum()).backward()
        gradients.append(feature.grad)
    assert torch.equal(*gradients) and (gradients[0] == -2).any()


def test_logits_that_only_the_loss_reads_cost_no_cast() -> None:
    """The loss is taken in fp32 anyway: the copy that it reads is the one that is returned."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.a(x)
            return logits.logsumexp(-1).sum(), logits

    amp = amprewrite.rewrite(Head(), dtype="bf16")
    amp(torch.randn(2, 4))
    assert [cast for cast in amp.plan.regions[0].casts if cast.value == "linear"] != []
    assert sum(not cast.weight for cast in amp.plan.regions[0].casts) == 2  # of x, and of the logits


@way
def test_a_write_to_an_input_has_its_gradient(options: dict[str, Any]) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.shift = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            torch._dynamo.graph_break()
            h.add_(self.shift)
            h[..., 0] = 1.0
            return self.b(h)

    torch.manual_seed(0)
    model, x = Writes(), torch.randn(8, 4)
    other = copy.deepcopy(model)
    model(x).sum().backward()
    amprewrite.rewrite(other, **options)(x).sum().backward()
    for want, got in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=0.02, atol=0.1)


@way
def test_a_custom_backward_sees_the_true_gradient(options: dict[str, Any]) -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Clip.apply(self.a(x)))

    model, x = Clipped(), torch.ones(2, 4)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    amprewrite.rewrite(model, **options)(x).mul(0.25).sum().backward()
    assert model.a.weight.grad is not None
    assert torch.equal(model.a.weight.grad, torch.full((4, 4), 2.0))  # 1 each: nothing is cut; times 2 rows


@pytest.mark.parametrize("lists", ["default", "tf"])
def test_a_write_to_the_result_of_a_checkpoint(lists: str) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            v = checkpoint(self.a, x, use_reentrant=False)
            u = torch.cat([v, v.detach()], -1).chunk(2, -1)[1]
            v.diagonal().add_(10)
            return u, v

    torch.manual_seed(0)
    model, x = Written(), torch.randn(4, 4, 5)
    want = model(x)
    got = amprewrite.rewrite(model, dtype="bf16", lists=lists)(x)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_a_checkpoint_that_writes_its_input() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.a(x)

            def body(y: Tensor) -> Tensor:
                y.fill_(3.0)
                return y * 2

            with torch.no_grad():
                out = checkpoint(body, h, use_reentrant=False)
            return out, h + 1

    out, after = amprewrite.rewrite(Writes(), dtype="bf16")(torch.randn(2, 4))
    assert torch.equal(out, torch.full((2, 4), 6.0))
    assert torch.equal(after, torch.full((2, 4), 4.0))

class Checkpointed(nn.Module):
    """Returns results of a checkpoint, made by `how`, and reads the last of them."""

    def __init__(self, how: Callable[[Checkpointed, Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        results = self.how(self, x)
        return *results, saved_less(self.b, results[-1])


def saved_less(function: Callable[..., Any], *inputs: Tensor) -> Any:
    return checkpoint(function, *inputs, use_reentrant=False)


def one(model: Checkpointed, x: Tensor) -> tuple[Tensor, ...]:
    return (saved_less(lambda t: model.a(t).relu(), x),)


def behind_a_write(model: Checkpointed, x: Tensor) -> tuple[Tensor, ...]:
    written = saved_less(model.b, x)
    written[..., 0].add_(2)
    return (saved_less(lambda t: model.a(t).relu(), written),)


def in_a_checkpoint(model: Checkpointed, x: Tensor) -> tuple[Tensor, ...]:
    return (saved_less(lambda t: saved_less(lambda s: model.a(s).relu(), model.b(t)), x),)


def read_inside(model: Checkpointed, x: Tensor) -> tuple[Tensor, ...]:
    def part(t: Tensor) -> tuple[Tensor, Tensor]:
        t = model.a(t)
        return t, t.relu()

    result: tuple[Tensor, ...] = saved_less(part, x)
    return result


def read_in_a_checkpoint(model: Checkpointed, x: Tensor) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = saved_less(lambda t: read_inside(model, t), x)
    return result


def bounded(model: Checkpointed, x: Tensor) -> tuple[Tensor, ...]:
    return (saved_less(lambda t: model.a(t).tanh(), x),)


def as_it_is(model: Checkpointed, x: Tensor) -> tuple[Tensor, ...]:
    """The first result is the checkpoint's own input, which its body reads."""
    result: tuple[Tensor, ...] = saved_less(lambda t: (t, model.b(t)), model.a(x))
    return result


def contiguous_already(model: Checkpointed, x: Tensor) -> tuple[Tensor, ...]:
    """The first result is the tensor that `b` reads."""
    value = model.a(x)
    return value.contiguous(), model.b(value)


CHECKPOINTED = [as_it_is, contiguous_already, one, behind_a_write, in_a_checkpoint, read_inside, read_in_a_checkpoint, bounded]


def gradients_of(model: nn.Module, x: Tensor, factor: float = 1.0) -> list[Tensor]:
    """The gradients of all results, the input and the weights. `factor` scales the loss down, and they are scaled up again."""
    x = x.clone().requires_grad_()
    results = model(x)
    for result in results:
        result.retain_grad()
    (factor * sum(place * result.square().sum() for place, result in enumerate(results, 1))).backward()
    return [each.grad / factor for each in (*results, x, *model.parameters())]


@pytest.mark.parametrize("lists", long_beyond(1, ["default", "o3"]))
@pytest.mark.parametrize("how", CHECKPOINTED, ids=lambda how: how.__name__)
@way
def test_the_gradient_of_what_a_checkpoint_returns(options: dict[str, Any], how: Any, lists: str) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(how), torch.randn(2, 4, 4)
    amp = amprewrite.rewrite(copy.deepcopy(model), lists=lists, **options)
    for want, got in zip(gradients_of(model, x), gradients_of(amp, x), strict=True):
        assert (got - want).norm() < 0.05 * want.norm()  # a path that is missed is 0.3 off


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", [read_inside, read_in_a_checkpoint, bounded], ids=lambda how: how.__name__)
def test_small_gradients_of_what_a_checkpoint_returns(how: Any, backend: str) -> None:
    """The body stands outside of the graph's loss scaling, so it scales by itself: unscaled, fp16 holds none of these gradients."""
    torch.manual_seed(0)
    model, x = Checkpointed(how), torch.randn(2, 4, 4)
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", lists="o3", loss_scale=65536.0, backend=backend)
    wanted, found = (gradients_of(model, x)[-5:], gradients_of(amp, x, factor=1e-8)[-5:])  # a compiler has no paths between results
    for want, got in zip(wanted, found, strict=True):
        assert (got - want).norm() < 0.05 * want.norm()


def test_bits_are_those_of_fp32() -> None:
    class Bits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.a(x)
            return y.view(torch.int32), torch.view_as_complex(y.view(-1, 4, 2)), y.view(torch.float32)

    amp = amprewrite.rewrite(Bits(), dtype="bf16")
    with torch.no_grad():
        bits, pairs, plain = amp(torch.randn(4, 8))
    assert bits.shape == (4, 8) and pairs.dtype == torch.complex64
    assert torch.equal(bits.view(torch.float32), plain)
    assert torch.equal(torch.view_as_real(pairs).view(4, 8), plain)


def test_a_transform_beside_a_write() -> None:
    class Transformed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            h.add_(1)
            _, slope = torch.func.jvp(lambda t: t * 2, (x,), (x,))
            bent = torch.func.grad(lambda t: t.square().sum())(x)
            return h + slope + bent + torch.func.vmap(lambda t: t * 3)(x) + torch.func.jacrev(lambda t: t.sum(0))(x).sum((0, 1))

    torch.manual_seed(0)
    model, x = Transformed(), torch.randn(2, 4)
    with torch.no_grad():
        want = model(x)
        amp = amprewrite.rewrite(model, dtype="bf16")
        torch.testing.assert_close(amp(x), want, rtol=0.02, atol=0.05)
    assert any(node.name == "linear" and node.dtype == "bf16" for node in amp.plan.regions[0].nodes)


class Inner(nn.Module):
    """Takes the gradient of an energy with respect to a value that it reads low and in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        energy = self.b(torch.relu(h)).sum() + h.logsumexp(-1).sum()
        return torch.autograd.grad(energy, h, create_graph=True)[0]


@pytest.mark.parametrize("captured", [False, True], ids=["between graphs", "in the graph"])
@way
def test_gradients_that_the_model_takes(options: dict[str, Any], captured: bool) -> None:
    torch.manual_seed(0)
    model, x = Inner(), torch.randn(2, 4).requires_grad_()
    other = copy.deepcopy(model)
    want = model(x)
    want.square().sum().backward()
    with torch._dynamo.config.patch(trace_autograd_ops=captured):
        amp = amprewrite.rewrite(other, **options)
        got = amp(x)
        got.square().sum().backward()
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.01)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=0.05, atol=0.02)
    if captured and "loss_scale" in options:
        assert "takes gradients itself" in str(amp.plan)


class Jacobian(nn.Module):
    """Takes a Jacobian of an op on a low value, which is cast for it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.jacrev(lambda t: (t * t).sum(-1))(self.a(x)[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_value_that_a_transform_reads_from_outside_is_cast_outside(dtype: str) -> None:
    model, x = Jacobian(), torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(amprewrite.rewrite(model, dtype=dtype)(x), model(x), rtol=0, atol=2e-2)


def test_a_transform_of_a_view_whose_memory_is_written() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            turned = x.mT
            turned.mul_(2)
            slopes = torch.func.jacrev(lambda t: (t * t).sum(-1))(turned[0])
            turned.sub_(self.w, alpha=2)
            return slopes, self.a(x)

    torch.manual_seed(0)
    model, x = Written(), torch.randn(2, 3, 4)
    for options in WAYS:
        torch._dynamo.reset()
        found = []
        for net in (model, amprewrite.rewrite(copy.deepcopy(model), **options)):
            leaf = x.clone().requires_grad_()
            slopes, out = net(leaf + 0)
            (slopes.sum() + out.sum()).backward()
            found.append((slopes, out, leaf.grad, net.w.grad))
            net.zero_grad()
        for got, want in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)
        assert not net.plan.skipped


def test_a_view_of_an_input_that_is_written_without_gradients() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            row = torch.select(x, 0, 0)
            with torch.no_grad():
                x.mul_(2)
            return self.a(x.fmax(row))

    torch.manual_seed(0)
    model, x = Written(), torch.randn(2, 4)
    found = []
    for net in (model, amprewrite.rewrite(copy.deepcopy(model), dtype="bf16")):
        leaf = x.clone().requires_grad_()
        net(leaf + 0).sum().backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0], rtol=0.02, atol=0.02)
    assert not net.plan.skipped and any(node.dtype == "bf16" for node in net.plan.regions[0].nodes)


def test_a_view_that_is_made_and_written_without_gradients_of_what_has_some() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            row = x.squeeze(-2)
            row *= 2
            return row, self.a(x)

    model, x = Written(), torch.randn(2, 4)
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16")
    with torch.no_grad():
        want, got = (net(x.clone().requires_grad_() + 0) for net in (model, amp))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=0.01, atol=0.01)
    assert not amp.plan.skipped


class Transformed(nn.Module):
    """Results of two transforms, one behind the other, and a view of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        slope = torch.func.grad(lambda t: torch.tanh(self.a(t)).sum())(x)
        doubled = torch.func.vmap(lambda t: t * 2)(slope)
        return slope, slope.view(-1), doubled, doubled.mT


@way
def test_the_gradient_of_what_a_transform_returns(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Transformed()
    found = []
    for net in (model, amprewrite.rewrite(copy.deepcopy(model), **options)):
        results = net(torch.tensor([[1.0, 2.0], [3.0, -1.0]]))
        for each in results:
            each.retain_grad()
        sum((1 - 3 * place) * each.sum() for place, each in enumerate(results)).backward()
        found.append([each.grad for each in results])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


GIVE_BACK = {
    "itself": lambda t: t,
    "contiguous": torch.Tensor.contiguous,
    "flatten": lambda t: t.flatten(1),
    "to its own dtype": lambda t: t.to(torch.float32),
    "a checkpoint": lambda t: checkpoint(lambda inner: inner, t, use_reentrant=False),
    "two of them": lambda t: t.contiguous().flatten(1),
}
"""Ops that give their operand itself."""


class ReadInside(nn.Module):
    """Two results of a checkpoint, of which the body makes one from the other; the other leaves as an op gives it back."""

    def __init__(self, give_back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.give_back = nn.Linear(4, 4), give_back

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        def body(t: Tensor) -> tuple[Tensor, Tensor]:
            made = self.a(t)
            return made, made.relu()

        made, rest = checkpoint(body, x, use_reentrant=False)
        return self.give_back(made), rest.squeeze(1)


@pytest.mark.parametrize("give_back", GIVE_BACK.values(), ids=GIVE_BACK)
@way
def test_the_gradient_of_a_result_that_a_checkpoint_reads(options: dict[str, Any], give_back: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = ReadInside(give_back), torch.randn(3, 4)
    found = []
    for each in (model, amprewrite.rewrite(copy.deepcopy(model), **options)):
        results = each(x)
        for result in results:
            result.retain_grad()
        (results[1].sum() - 2 * results[0].sum()).backward()
        found.append([result.grad for result in results])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


READ_BACK = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "softmin": lambda x: nn.functional.softmin(x, -1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "exp": torch.exp,
    "sqrt": lambda x: (x.square() + 1).sqrt(),
    "norm": lambda x: x.norm(dim=-1),
    "std_mean": lambda x: torch.std_mean(x, -1)[0],
    "checkpointed tanh": lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
}
"""Ops whose backward reads their result."""


class Ends(nn.Module):
    """Gives what each of these ops makes of its input, and of what a layer makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [op(each) for op in READ_BACK.values() for each in (x, self.a(x))]


@pytest.mark.parametrize("lists", ["default", "tf", "o3"])
@way
def test_a_second_backward_gives_results_their_gradient(options: dict[str, Any], lists: str) -> None:
    torch.manual_seed(0)
    model, start = Ends(), torch.randn(4, 4)
    gradients = []
    for each in (model, amprewrite.rewrite(model, lists=lists, **options)):
        x = start.clone().requires_grad_()
        results = each(x)
        for result in results:
            result.retain_grad()
        (slope,) = torch.autograd.grad(sum(result.square().sum() for result in results), x, create_graph=True)
        slope.square().sum().backward()
        gradients.append([result.grad for result in results])
    for want, got in zip(*gradients, strict=True):
        assert (got - want).norm() <= 0.05 * want.norm()


CHOOSE = [torch.relu, torch.sgn, torch.amax, torch.amin, torch.max, torch.min, torch.median, torch.nanmedian]


@pytest.mark.parametrize("op", CHOOSE, ids=lambda op: op.__name__)
def test_ops_that_compare_their_result_give_it_no_gradient(op: Any) -> None:
    x = torch.tensor([[1.0, 3.0, -2.0]], requires_grad=True)
    result = op(x)
    (slope,) = torch.autograd.grad(result, x, torch.ones_like(result, requires_grad=True), create_graph=True)
    through = torch.autograd.grad(slope.sum(), result, allow_unused=True)[0] if slope.requires_grad else None
    assert through is None or not through.any()
