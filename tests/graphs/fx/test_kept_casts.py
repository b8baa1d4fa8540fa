"""Kept copies of weights in training: values, gradients, launches, memory, and weights of which nothing is kept."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from ops_help import Ops
from torch import Tensor, nn
from torch.autograd import forward_ad

import amprewrite
from amprewrite.graphs.fx.ops.pad_ops import pad_cast
from amprewrite.graphs.fx.ops.scale_ops import cast_in
from amprewrite.graphs.fx.weights.weight_cache import WeightCache, kept_cast
from amprewrite.ir.plans.pad_plan import Layout

LOW = torch.float16
PADDED: Layout = ((0, ((5, 8),)),)


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def kept(
    w: Tensor, dtype: torch.dtype = LOW, inverse: Tensor | None = None, layout: Layout = (), cache: WeightCache | None = None
) -> Tensor:
    return kept_cast(WeightCache(until_step=True) if cache is None else cache, w, dtype, layout, inverse)


@pytest.mark.parametrize("layout", [(), PADDED], ids=["dense", "padded"])
@pytest.mark.parametrize("factor", [None, 2.0**-6])
def test_copies_and_gradients_are_those_of_a_cast(factor: float | None, layout: Layout) -> None:
    inverse, cache = None if factor is None else torch.tensor(factor), WeightCache(until_step=True)
    one, two = weight(5, 3), weight(5, 3)
    for _ in range(2):
        ours, cast = kept(one, LOW, inverse, layout, cache), pad_cast(two, LOW, layout, inverse)
        assert torch.equal(ours, cast) and ours.requires_grad
        ours.square().sum().backward()
        cast.square().sum().backward()
    assert torch.equal(one.grad, two.grad) and one.grad.dtype == torch.float32 and len(cache) == 1


def test_a_kept_copy_takes_no_launch_and_its_gradient_one() -> None:
    w, cache = weight(4, 4), WeightCache(until_step=True)
    with Ops() as first:
        kept(w, torch.bfloat16, None, (), cache)
    with Ops() as second:
        copy = kept(w, torch.bfloat16, None, (), cache)
    with Ops() as backward:
        copy.backward(torch.ones_like(copy))
    assert first.names["_to_copy"] == 1 and not second.names and backward.names["_to_copy"] == 1


def test_a_copy_follows_a_weight_that_begins_to_take_gradients() -> None:
    w, cache = weight(4, 4).requires_grad_(False), WeightCache(until_step=True)
    assert not kept(w, cache=cache).requires_grad
    w.requires_grad_()
    kept(w, cache=cache).sum().backward()
    assert torch.equal(w.grad, torch.ones(4, 4))
    assert not kept(w.requires_grad_(False), cache=cache).requires_grad


def test_gradients_widen_before_they_are_unscaled() -> None:
    """2**-20 * 2**-14 is nothing in fp16 and plenty in fp32."""
    w = weight(3, 5)
    copy = kept(w, LOW, torch.tensor(2.0**-14))
    copy.backward(torch.full_like(copy, 2.0**-20))
    assert torch.equal(w.grad, torch.full_like(w, 2.0**-34))


def test_a_weight_that_takes_no_gradient_and_calls_without_gradients_have_plain_copies() -> None:
    w, frozen = weight(5, 3), torch.randn(5, 3)
    with torch.no_grad():
        assert not kept(w).requires_grad
    assert not kept(frozen).requires_grad and torch.equal(kept(frozen), frozen.to(LOW))


def test_second_derivatives_go_through() -> None:
    def penalty(low: bool) -> Tensor:
        w, v = weight(8, 8), weight(8, 1)
        torch.manual_seed(1)
        x = torch.randn(16, 8)
        a, b = (kept(w, torch.bfloat16), kept(v, torch.bfloat16)) if low else (w, v)
        out = (torch.tanh(x.to(a.dtype) @ a) @ b).float()
        (gradient,) = torch.autograd.grad(out.sum(), w, create_graph=True)
        gradient.square().sum().backward()
        return w.grad

    got, want = penalty(True), penalty(False)
    assert (got - want).norm() < 3e-2 * want.norm()


def test_memory_of_a_copy_that_nothing_keeps_is_given_back_after_backward() -> None:
    w, cache = weight(64, 64), WeightCache(until_step=True)
    copy = kept(w, cache=cache)
    storage = torch.multiprocessing.reductions.StorageWeakRef(copy.untyped_storage())
    copy.sum().backward()
    del copy
    cache.clear()
    gc.collect()
    assert storage.expired()


def test_two_forwards_around_a_write_have_copies_of_their_own() -> None:
    w, cache = weight(4, 4), WeightCache(until_step=True)
    first = kept(w, cache=cache)
    with torch.no_grad():
        w.mul_(2.0)
    second = kept(w, cache=cache)
    assert torch.equal(second, w.to(LOW)) and torch.equal(first * 2, second)


def test_forward_mode_derivatives_take_a_cast() -> None:
    w, cache = weight(3, 3), WeightCache(until_step=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w.detach(), torch.ones(3, 3))
        tangent = forward_ad.unpack_dual(kept(dual, torch.bfloat16, cache=cache)).tangent
    assert tangent is not None and torch.equal(tangent, torch.ones(3, 3, dtype=torch.bfloat16)) and not len(cache)


def test_a_subclass_takes_a_cast() -> None:
    class Own(Tensor):
        pass

    w, cache = weight(3, 3).detach().as_subclass(Own), WeightCache(until_step=True)
    assert torch.equal(kept(w, cache=cache), w.to(LOW)) and not len(cache)


@pytest.mark.parametrize("layout", [(), PADDED], ids=["dense", "padded"])
def test_a_copy_without_a_gradient_gives_none(layout: Layout) -> None:
    """A gradient that a forward takes inside may come to the copy through a Function that hands on none."""

    class Drops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, copy: Tensor) -> Tensor:
            return copy.float().sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
            return None

    w = weight(5, 3)
    copy = kept(w, LOW, torch.tensor(0.5), layout)
    assert torch.autograd.grad(Drops.apply(copy), w, allow_unused=True) == (None,)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_step_leaves_through_one_launch_a_weight(dtype: str) -> None:
    """Each gradient arrives in fp32 and, in fp16, unscaled: no further launch multiplies it on a GPU, which promotes as it reads."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())])
    amp = amprewrite.rewrite(model, dtype=dtype, cache_weights="step")
    amp(torch.randn(8, 32)).square().mean().backward()
    loss = amp(torch.randn(8, 32)).square().mean()
    with Ops() as ops:
        loss.backward()
    assert ops.names["_to_copy"] == 12 + 1, "twelve gradients of weights, and that of the result"
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in amp.parameters())


def test_a_gradient_on_a_device_that_promotes_is_cast_and_unscaled_in_one_launch() -> None:
    w = torch.empty(4, 4, device="meta", requires_grad=True)
    copy = cast_in(w, LOW, torch.empty((), device="meta"))
    with Ops() as ops:
        copy.backward(torch.empty_like(copy))
    kernels = {name: count for name, count in ops.names.items() if name not in ("view", "detach", "alias", "empty_like")}
    assert kernels == {"mul": 1} and w.grad.dtype == torch.float32
