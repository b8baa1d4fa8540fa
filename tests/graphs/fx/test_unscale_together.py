"""One autograd node for many weights gives each weight the gradient that a node of its own gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from amprewrite.graphs.fx.ops.scale_ops import scale_gradient, unscale_gradient
from amprewrite.passes.lower.unscale_together import unscale_together

SCALE = torch.tensor(4.0)
INVERSE = SCALE.reciprocal()


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]


def result(crossed: list[Tensor], own: bool) -> Tensor:
    """A loss of two products in fp16 with `own`, in fp32 otherwise; the third weight has no part in it."""
    first, second = (each.half() if own else each for each in crossed[:2])
    x = torch.linspace(-1, 1, 32).view(4, 8).to(first.dtype)
    return scale_gradient(((x @ first).tanh() @ second).float(), SCALE).square().sum()


def together(own: bool, given: list[nn.Parameter]) -> Tensor:
    return result(list(unscale_together(INVERSE, own, *given)), own)


def one_by_one(own: bool, given: list[nn.Parameter]) -> Tensor:
    return result([unscale_gradient(each, INVERSE) for each in given], own)


@pytest.mark.parametrize("own", [True, False])
def test_gradients_are_those_of_a_node_for_each_weight(own: bool) -> None:
    ours, theirs = weights(), weights()
    for _ in range(2):  # the second backward adds to what the first one left
        together(own, ours).backward()
        one_by_one(own, theirs).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours[:2], theirs[:2], strict=True))
    assert ours[2].grad is None


@pytest.mark.parametrize("own", [True, False])
def test_a_frozen_weight_and_a_weight_with_a_hook_have_no_part(own: bool) -> None:
    ours, seen = weights(), list[Tensor]()
    ours[1].requires_grad_(False)
    ours[2].register_hook(seen.append)
    theirs = weights()
    together(own, ours).backward()
    one_by_one(own, theirs).backward()
    assert torch.equal(ours[0].grad, theirs[0].grad)
    assert ours[1].grad is None and seen == []  # a shared node would call the hook with None


@pytest.mark.parametrize("own", [True, False])
def test_gradients_can_be_differentiated(own: bool) -> None:
    def penalty(loss: Tensor, given: list[nn.Parameter]) -> tuple[Tensor, ...]:
        found = torch.autograd.grad(loss, given[:2], create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in found), given[:2])

    ours, theirs = weights(), weights()
    for a, b in zip(penalty(together(own, ours), ours), penalty(one_by_one(own, theirs), theirs), strict=True):
        assert torch.equal(a, b)


def test_a_batch_of_gradients_is_unscaled() -> None:
    ours = weights()
    loss = together(False, ours)
    (batch,) = torch.autograd.grad(loss, ours[0], torch.tensor([1.0, 2.0]), is_grads_batched=True, retain_graph=True)
    (one,) = torch.autograd.grad(loss, ours[0])
    assert torch.allclose(batch, torch.stack([one, 2 * one]))


def test_derivatives_of_forward_mode_pass() -> None:
    given = weights()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0].detach(), torch.ones(8, 8))
        crossed = unscale_together(INVERSE, False, dual, given[1])
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(crossed[0]).tangent, torch.ones(8, 8))


@pytest.mark.parametrize("own", [True, False])
def test_gradients_of_casts_are_overwritten_and_stored_and_others_are_not(own: bool) -> None:
    given, arrived = weights()[:2], list[int]()
    crossed = unscale_together(INVERSE, own, *given)
    crossed[0].register_hook(lambda gradient: arrived.append(gradient.data_ptr()))
    (crossed[0].half() * crossed[1].half()).sum().backward()
    assert (given[0].grad.data_ptr() == arrived[0]) is own
