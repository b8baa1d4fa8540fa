"""Gradients that somebody else holds, or a view of which, are neither written in place nor let go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amprewrite

HELD: list[Any] = []
WAYS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "view": lambda gradient: gradient.view(-1),
    "transposed": lambda gradient: gradient.t(),
    "detached": lambda gradient: gradient.detach(),
    "numpy": lambda gradient: gradient.view(torch.int16 if gradient.element_size() == 2 else torch.int32).numpy(),
    "storage": lambda gradient: gradient.untyped_storage(),
    "dlpack": lambda gradient: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(gradient)),
}
"""What a user may keep of a gradient that comes by."""


class Kept(torch.autograd.Function):
    """A product whose backward keeps the gradient of its weight, in the way that stands in `way`."""

    way = "itself"

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        gradient = x.mT @ g
        HELD.append((WAYS[Kept.way](gradient), gradient.clone()))
        return g @ w.mT, gradient


class Model(nn.Module):
    """Layers around the product, whose weight they share; with graph breaks, for the backward runs as it is written then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        h = Kept.apply(h, self.first.weight)
        torch._dynamo.graph_break()
        out: Tensor = self.last(h)
        return out


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_user_keeps_in_backward_stays(way: str, dtype: str) -> None:
    plain, amp, x = Model(), amprewrite.rewrite(Model(), dtype=dtype), torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    Kept.way = way
    plain(x).square().mean().backward()
    HELD.clear()
    for _ in range(2):
        amp.zero_grad()
        amp(x).square().mean().backward()
    for held, clone in HELD:
        want = WAYS[way](clone)
        if isinstance(held, torch.UntypedStorage):
            assert held.tolist() == want.tolist()
        else:
            assert (held == want).all()
    for got, right in zip(amp.parameters(), plain.parameters(), strict=True):
        assert (got.grad - right.grad).norm() < 0.05 * right.grad.norm()


HOOKS: dict[str, Callable[[nn.Module, list[Tensor]], Any]] = {
    "tensor": lambda model, seen: [p.register_hook(lambda g: seen.append(g)) for p in model.parameters()],
    "view": lambda model, seen: [p.register_hook(lambda g: seen.append(g.view(-1))) for p in model.parameters()],
    "multi": lambda model, seen: torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda gs: seen.extend(gs)),
    "accumulated": lambda model, seen: [p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad)) for p in model.parameters()],
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", HOOKS)
def test_what_hooks_keep_stays(kind: str, dtype: str) -> None:
    amp, x = amprewrite.rewrite(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), dtype=dtype), torch.randn(8, 16)
    seen: list[Tensor] = []
    handles = HOOKS[kind](amp, seen)
    amp(x).square().mean().backward(retain_graph=False)
    first = [gradient.clone() for gradient in seen]
    amp.zero_grad()
    amp(x).square().mean().backward()
    assert handles and len(seen) == 2 * len(first) >= 2
    for kept, again, copy in zip(seen, seen[len(first) :], first, strict=False):
        assert torch.equal(kept, copy) and torch.equal(again, copy)


def test_the_first_step_of_a_process_may_be_inside_a_checkpoint() -> None:
    runs: list[int] = []
    layer = nn.Linear(16, 16)
    layer.register_forward_hook(lambda *_: runs.append(1))
    amp = amprewrite.rewrite(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), dtype="bf16")
    checkpoint(lambda x: amp(layer(x)), torch.randn(8, 16), use_reentrant=False).sum().backward()
    assert len(runs) == 2
    assert all(p.grad is not None and p.grad.isfinite().all() for p in amp.parameters())
