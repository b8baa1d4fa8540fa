"""Low copies of weights in training: values, gradients, launches, memory, and what no multi-tensor launch can do."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import amprewrite
from amprewrite.graphs.fx.ops.finite_flags import finite_flags
from amprewrite.graphs.fx.ops.pad_ops import pad_cast
from amprewrite.graphs.fx.ops.scale_ops import cast_in
from amprewrite.graphs.fx.weights.linked_copies import CastBlock, cast_block
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.ir.plans.pad_plan import Layout

LOW = torch.float16


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, requires_grad=True) for shape in shapes]


def linked(weights: list[Tensor], dtypes: list[torch.dtype], inverse: Tensor | None, layouts: list[Layout] | None = None) -> list[Tensor]:
    return cast_block(CastBlock(dtypes, layouts or [()] * len(dtypes), WeightCache()), inverse, *weights)


class Ops(TorchDispatchMode):
    """Names of the ATen ops that ran, and how many tensors a multi-tensor op was given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_copies_and_gradients_are_those_of_one_by_one() -> None:
    inverse = torch.tensor(2.0**-6)
    given = [*weights((4, 4), (4, 4), (4,)), torch.randn(4, 4)]
    low = linked(given, [LOW] * 4, inverse)
    assert all(torch.equal(copy, w.to(LOW)) for copy, w in zip(low, given, strict=True))
    (low[0].sum() + low[2].square().sum()).backward()
    assert given[1].grad is None and given[3].grad is None, "absent gradients stay absent"
    alone = given[2].detach().clone().requires_grad_()
    cast_in(alone, LOW, inverse).square().sum().backward()
    assert torch.equal(alone.grad, given[2].grad)


def test_a_weight_of_that_dtype_is_its_own_copy_and_its_gradient_is_unscaled() -> None:
    (w, v) = weights((3, 3), (3,))
    low, same = linked([w, v], [LOW, torch.float32], torch.tensor(0.25))
    assert same.data_ptr() == v.data_ptr() and low.dtype == LOW
    (low.float().sum() + same.sum()).backward()
    assert torch.equal(v.grad, torch.full((3,), 0.25)) and torch.equal(w.grad, torch.full((3, 3), 0.25))


def test_gradients_widen_before_they_are_unscaled() -> None:
    """2**-20 * 2**-14 is nothing in fp16 and plenty in fp32."""
    given = weights((3, 5), (5,))
    copies = linked(given, [LOW] * 2, torch.tensor(2.0**-14))
    torch.autograd.backward(copies, [torch.full_like(copy, 2.0**-20) for copy in copies])
    assert all(torch.equal(w.grad, torch.full_like(w, 2.0**-34)) for w in given)


@pytest.mark.parametrize("factor", [None, 0.5])
def test_one_launch_makes_all_and_few_bring_gradients_back(factor: float | None) -> None:
    given = weights(*[(4, 4)] * 10)
    inverse = None if factor is None else torch.tensor(factor)
    with Ops() as forward:
        copies = linked(given, [torch.bfloat16] * 10, inverse)
    total = torch.stack([copy.sum() for copy in copies]).sum()
    with Ops() as backward:
        total.backward()
    assert forward.names["_foreach_copy_"] == 1 and not forward.names["_to_copy"]
    assert backward.names["_foreach_copy_"] == 1 and not backward.names["_to_copy"]
    assert backward.names["_amp_foreach_non_finite_check_and_unscale_"] == (factor is not None)
    assert all(torch.equal(w.grad, torch.full((4, 4), factor or 1.0)) for w in given)


KEPT: list[Any] = []


class GivesBuffer(torch.autograd.Function):
    """Its gradient is a tensor that something else holds."""

    buffer = torch.ones(4, 4)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return GivesBuffer.buffer


def hooked_by(keep: Any) -> Any:
    def backward(one: Tensor, two: Tensor) -> None:
        one.register_hook(lambda gradient: KEPT.append(keep(gradient)))
        (one * torch.ones(4, 4)).sum().backward()

    return backward


ARRAY = np.ones((4, 4), np.float32)
HELD = {
    "by two weights": lambda one, two: ((one + two) * torch.ones(4, 4)).sum().backward(),
    "as a part of an expanded value": lambda one, two: one.sum().backward(),
    "by a buffer": lambda one, two: GivesBuffer.apply(one).sum().backward(),
    "by an array": lambda one, two: one.backward(torch.from_numpy(ARRAY)),
    "by a list": hooked_by(lambda gradient: gradient),
    "by a view": hooked_by(lambda gradient: gradient.view(-1)),
    "by its memory": hooked_by(lambda gradient: gradient.untyped_storage()),
    "by an array of its memory": hooked_by(lambda gradient: gradient.numpy()),
    "by another library": hooked_by(torch.utils.dlpack.to_dlpack),
    "by who asked for it": lambda one, two: KEPT.append(torch.autograd.grad((one * torch.ones(4, 4)).sum(), [one, two], allow_unused=True)),
}


@pytest.mark.parametrize("backward", HELD.values(), ids=list(HELD))
def test_a_gradient_that_something_else_holds_is_not_written(backward: Any) -> None:
    KEPT.clear()
    given = weights((4, 4), (4, 4))
    backward(*linked(given, [torch.float32] * 2, torch.tensor(0.5)))
    assert all(w.grad is None or w.grad.max() <= 1 for w in given)
    held = [each for kept in KEPT for each in (kept if isinstance(kept, tuple) else (kept,)) if isinstance(each, Tensor)]
    for each in [*held, GivesBuffer.buffer, torch.from_numpy(ARRAY)]:
        assert torch.equal(each, torch.ones_like(each))
    for kept in KEPT:
        if isinstance(kept, np.ndarray):
            assert (kept == 1).all()
        elif isinstance(kept, torch.UntypedStorage):
            assert torch.equal(torch.empty(0).set_(kept), torch.ones(16))


def test_each_backward_of_a_forward_has_a_flag_of_its_own() -> None:
    """An overflow of one loss, whose gradients are thrown away, says nothing of the next one."""
    given = weights((2, 2), (2, 2))
    (one,), (two,) = (linked([w], [LOW], torch.tensor(1.0)) for w in given)
    (one.float() * float("inf")).sum().backward()
    two.float().sum().backward()
    first, second = (finite_flags([w.grad])[0] for w in given)
    assert first[0].item() == 1 and second[0].item() == 0


def test_padded_copies_have_zeros_in_their_padding() -> None:
    given = [*weights((5, 3), (5, 3)), torch.randn(5, 3)]
    layouts: list[Layout] = [((0, ((5, 8),)),)] * 3
    used, unused, frozen = linked(given, [torch.bfloat16] * 3, torch.tensor(0.25), layouts)
    for copy, w in ((used, given[0]), (unused, given[1]), (frozen, given[2])):
        assert torch.equal(copy, pad_cast(w, torch.bfloat16, layouts[0]))
    assert used.requires_grad and not frozen.requires_grad
    used.sum().backward()
    assert torch.equal(given[0].grad, torch.full((5, 3), 0.25)) and given[1].grad is None


def test_second_derivatives_go_through() -> None:
    def penalty(low: bool) -> Tensor:
        (w, v) = weights((8, 8), (8, 1))
        torch.manual_seed(1)
        x = torch.randn(16, 8)
        a, b = linked([w, v], [torch.bfloat16] * 2, None) if low else (w, v)
        out = (torch.tanh(x.to(a.dtype) @ a) @ b).float()
        (gradient,) = torch.autograd.grad(out.sum(), w, create_graph=True)
        gradient.square().sum().backward()
        return w.grad

    got, want = penalty(True), penalty(False)
    assert (got - want).norm() < 3e-2 * want.norm()


def test_memory_of_copies_is_given_back_after_backward() -> None:
    given = weights((64, 64))
    (copy,) = linked(given, [LOW], None)
    storage = torch.multiprocessing.reductions.StorageWeakRef(copy.untyped_storage())
    copy.sum().backward()
    del copy
    gc.collect()
    assert storage.expired()


def test_two_forwards_before_a_backward_have_copies_of_their_own() -> None:
    given = weights((4, 4))
    (first,) = linked(given, [LOW], None)
    with torch.no_grad():
        given[0].mul_(2.0)
    (second,) = linked(given, [LOW], None)
    assert torch.equal(second, given[0].to(LOW)) and torch.equal(first * 2, second)


def test_forward_mode_derivatives_take_casts_one_by_one() -> None:
    (w,) = weights((3, 3))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w.detach(), torch.ones(3, 3))
        (copy,) = linked([dual], [torch.bfloat16], None)
        tangent = forward_ad.unpack_dual(copy).tangent
    assert tangent is not None and torch.equal(tangent, torch.ones(3, 3, dtype=torch.bfloat16))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_training_step_casts_weights_and_gradients_in_few_launches(dtype: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())])
    amp = amprewrite.rewrite(model, dtype=dtype)
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        with Ops() as ops:
            loss = amp(torch.randn(8, 32)).square().mean()
            loss.backward()
        optimizer.step()
    assert ops.names["_foreach_copy_"] == 2
    assert ops.names["_to_copy"] <= 3, "the input, the result and its gradient"
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in amp.parameters())


class Deep(nn.Module):
    """By default more weights than one block has, behind an embedding."""

    def __init__(self, depth: int = 70) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(10, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_block_leaves_while_the_backward_of_layers_before_it_is_still_to_come(
    dtype: str,
) -> None:
    torch.manual_seed(0)
    amp, x = amprewrite.rewrite(Deep(), dtype=dtype), torch.randint(0, 10, (4,))
    amp(x).sum().backward()
    arrived: list[str] = []
    for name, parameter in amp.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    ran: list[str] = []

    class Order(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    loss = amp(x).sum()
    with Order():
        loss.backward()
    blocks = [place for place, name in enumerate(ran) if name == "_foreach_copy_"]
    products = [place for place, name in enumerate(ran) if name == "mm"]
    assert len(blocks) == 3, "of 140 weights, 64 at most share a launch"
    assert sum(place > blocks[0] for place in products) > 60 and sum(place > blocks[1] for place in products) > 4
    order = [arrived.index(name) for name in ("layers.69.weight", "layers.40.weight", "embed.weight")]
    assert order == sorted(order)


def test_a_node_whose_copies_get_no_gradient_gives_none() -> None:
    """A gradient that a forward takes inside may come to the node through a Function that hands on none."""

    class Drops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *copies: Tensor) -> Tensor:
            return copies[0].float().sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:  # type: ignore[override]
            return None, None

    given = weights((4, 4), (4, 4))
    copies = linked(given, [LOW] * 2, torch.tensor(0.5))
    assert torch.autograd.grad(Drops.apply(*copies), given, allow_unused=True) == (None, None)
