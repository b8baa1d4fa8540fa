"""One autograd node for many weights gives each weight the copy and the gradient that a node of its own gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import amprewrite
from amprewrite.graphs.fx.ops.many_weights import cross_together
from amprewrite.graphs.fx.ops.pad_ops import pad_cast
from amprewrite.graphs.fx.ops.scale_ops import scale_gradient, unscale_gradient
from amprewrite.passes.lower import group_weights

SCALE = torch.tensor(4.0)
INVERSE = SCALE.reciprocal()
Crossed = Sequence[Tensor]
CROSSINGS: dict[str, tuple[Callable[..., Crossed], Callable[[Tensor], Tensor], Tensor]] = {
    "casts": (lambda *w: cross_together(torch.bfloat16, None, *w), lambda w: pad_cast(w, torch.bfloat16, ()), torch.tensor(1.0)),
    "scaled": (lambda *w: cross_together(torch.float16, INVERSE, *w), lambda w: pad_cast(w, torch.float16, (), INVERSE), SCALE),
    "stays": (
        lambda *w: [each.half() for each in cross_together(torch.float32, INVERSE, *w)],
        lambda w: pad_cast(w, torch.float16, (), INVERSE),
        SCALE,
    ),
    "unscales": (lambda *w: cross_together(None, INVERSE, *w), lambda w: unscale_gradient(w, INVERSE), SCALE),
}
every = pytest.mark.parametrize(("together", "alone", "scale"), CROSSINGS.values(), ids=CROSSINGS)


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]


def result(crossed: Crossed, scale: Tensor) -> Tensor:
    """A loss of two products; the third weight has no part in it."""
    first, second = crossed[:2]
    x = torch.linspace(-1, 1, 32).view(4, 8).to(first.dtype)
    return scale_gradient(((x @ first).tanh() @ second).float(), scale).square().sum()


@every
def test_copies_and_gradients_are_those_of_a_node_for_each_weight(together, alone, scale) -> None:
    ours, theirs = weights(), weights()
    for _ in range(2):  # the second backward adds to what the first one left
        low, other = together(*ours), [alone(each) for each in theirs]
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(low, other, strict=True))
        result(low, scale).backward()
        result(other, scale).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours[:2], theirs[:2], strict=True))
    assert ours[2].grad is None


@every
def test_a_frozen_weight_and_a_weight_with_a_hook_have_no_part(together, alone, scale) -> None:
    ours, theirs, seen = weights(), weights(), list[Tensor]()
    ours[1].requires_grad_(False)
    ours[2].register_hook(seen.append)
    crossed = together(*ours)
    assert not crossed[1].requires_grad
    result(crossed, scale).backward()
    result([alone(each) for each in theirs], scale).backward()
    assert torch.equal(ours[0].grad, theirs[0].grad)
    assert ours[1].grad is None and seen == []  # a shared node would call the hook with None


@every
def test_gradients_can_be_differentiated(together, alone, scale) -> None:
    def penalty(loss: Tensor, given: list[nn.Parameter]) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(loss, given[:2], create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in found), given[:2])

    ours, theirs = weights(), weights()
    found = penalty(result(together(*ours), scale), ours)
    for a, b in zip(found, penalty(result([alone(each) for each in theirs], scale), theirs), strict=True):
        assert torch.equal(a, b)


@every
def test_a_batch_of_gradients_passes(together, alone, scale) -> None:
    ours = weights()
    loss = result(together(*ours), scale)
    (batch,) = torch.autograd.grad(loss, ours[0], torch.tensor([1.0, 2.0]), is_grads_batched=True, retain_graph=True)
    (one,) = torch.autograd.grad(loss, ours[0])
    assert torch.allclose(batch, torch.stack([one, 2 * one]))


@every
def test_derivatives_of_forward_mode_pass(together, alone, scale) -> None:
    given = weights()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0].detach(), torch.ones(8, 8))
        crossed = together(dual, given[1])
        tangent = torch.autograd.forward_ad.unpack_dual(crossed[0]).tangent
        assert torch.equal(tangent, torch.ones(8, 8, dtype=tangent.dtype))


@every
def test_a_transform_around_a_call_passes(together, alone, scale) -> None:
    given = [each.detach() for each in weights()]
    batch = torch.vmap(lambda x: x @ together(*given)[0].float())(torch.eye(8))
    assert torch.equal(batch, alone(given[0]).float())


class Launches(TorchDispatchMode):
    """Counts casts, each one a launch on a GPU; a multi-tensor copy is one."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("_to_copy", "_foreach_copy_")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts count as launches on a CPU, too, and two casts are a group."""
    monkeypatch.setattr(group_weights, "WITHOUT_LAUNCHES", set())
    monkeypatch.setattr(group_weights, "LEAST", 2)


def launches(step: Callable[[], object]) -> int:
    with Launches() as seen:
        step()
    return seen.count


class Layers(nn.Sequential):
    def __init__(self, count: int, width: int) -> None:
        super().__init__(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.Tanh())))


@pytest.mark.usefixtures("launching")
def test_a_step_casts_all_small_weights_by_a_few_launches() -> None:
    """16 layers have 32 weights: two launches for all, and two for the input and the result."""
    amp = amprewrite.rewrite(Layers(16, 64), dtype="bf16")
    x = torch.randn(4, 64)
    amp(x).sum().backward()
    assert launches(lambda: amp(x).sum().backward()) <= 6
    with torch.no_grad():
        amp(x)
        assert launches(lambda: amp(x)) <= 3
        with amp.frozen_weights():
            kept = amp(x)
            assert launches(lambda: amp(x)) <= 4 and torch.equal(kept, amp(x))  # two look whether the copies are fresh


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_give_what_casts_one_by_one_give(mode, monkeypatch) -> None:
    model, x = Layers(4, 64), torch.randn(4, 64)
    with mode():
        grouped = [amprewrite.rewrite(copy.deepcopy(model), dtype="bf16")(x) for _ in range(2)]
        monkeypatch.setattr(group_weights, "WITHOUT_LAUNCHES", {"cpu"})
        alone = amprewrite.rewrite(copy.deepcopy(model), dtype="bf16")(x)
    assert all(torch.equal(each, alone) for each in grouped)


@pytest.mark.usefixtures("launching")
def test_frozen_weights_beside_a_few_that_learn_are_cast_together() -> None:
    model = Layers(16, 64)
    for layer in list(model)[:-2]:
        layer.requires_grad_(False)
    amp = amprewrite.rewrite(model, dtype="bf16")
    x = torch.randn(4, 64)
    amp(x).sum().backward()
    assert launches(lambda: amp(x).sum().backward()) <= 6


@pytest.mark.usefixtures("launching")
def test_large_weights_keep_launches_of_their_own(monkeypatch) -> None:
    monkeypatch.setattr(group_weights, "ELEMENTS", 63 * 64)
    amp = amprewrite.rewrite(Layers(4, 64), dtype="bf16")
    x = torch.randn(4, 64)
    amp(x).sum().backward()
    # four weights, the biases together, the input, the result and its gradient
    assert launches(lambda: amp(x).sum().backward()) == 4 * 2 + 2 + 1 + 2


@pytest.mark.usefixtures("launching")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_of_one_of_two_heads_are_none_for_the_other(dtype) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.stem(x).relu()
            return self.left(h), self.right(h)

    amp = amprewrite.rewrite(Heads(), dtype=dtype)
    seen = list[Tensor]()
    amp.right.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    amp(torch.randn(4, 16))[0].sum().backward()
    assert amp.right.weight.grad is None and amp.right.bias.grad is None and seen == []
    assert amp.left.weight.grad is not None and amp.stem.weight.grad is not None


@pytest.mark.usefixtures("launching")
def test_a_write_to_a_weight_between_two_reads_is_seen() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            with torch.no_grad():
                self.b.weight.mul_(2.0)
            return self.b(h)

    torch.manual_seed(0)
    model, x = Writes(), torch.randn(4, 16)
    amp = amprewrite.rewrite(model, dtype="bf16")
    for _ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        got = amp(x)
        exact = nn.functional.linear(nn.functional.linear(x, before[0], before[1]), 2 * before[2], before[3])
        assert float((got - exact).norm() / exact.norm()) < 0.02
