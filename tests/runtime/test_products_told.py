"""Every product that runs in fp32 is a high node of the plan, or what holds it is listed in `plan.skipped`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from products_help import products, untold
from runtime_help import MLP, Broken
from torch import nn
from torch._higher_order_ops import map as map_op
from torch._higher_order_ops import scan, while_loop
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import amprewrite

Forward = Callable[[Any, torch.Tensor], Any]


class Wrong(torch.autograd.Function):
    """Its backward cannot be captured."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        torch._dynamo.graph_break()
        return g @ w.t(), x.t() @ g


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


@torch._dynamo.disable  # type: ignore[misc]
def unread(layer: nn.Module, x: torch.Tensor) -> Any:
    return F.linear(x, layer.weight)  # type: ignore[arg-type]


class Model(nn.Module):
    """A linear layer before and after what `inner` does with the model."""

    def __init__(self, inner: Forward, **parts: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.before, self.layer, self.after = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> Any:
        return self.after(self.inner(self, self.before(x)))


def broken(m: Any, x: torch.Tensor) -> Any:
    torch._dynamo.graph_break()
    return m.layer(x)


def failing(m: Any, x: torch.Tensor) -> Any:
    return F.linear(x.permute(*range(x.dim())[::-1]).permute(1, 0), m.layer.weight)


def packed(m: Any, x: torch.Tensor) -> Any:
    return m.lstm(pack_padded_sequence(x[None], torch.tensor([3]), batch_first=True))[0].data


def loop(m: Any, x: torch.Tensor) -> Any:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, torch.tanh(m.layer(x))), (torch.tensor(0), x))[1]


def in_heads(m: Any, x: torch.Tensor) -> Any:
    q = m.layer(x)[None, None]
    return F.scaled_dot_product_attention(q, q, q)[0, 0]


INNER: dict[str, Model] = {
    "layer": Model(lambda m, x: m.layer(x)),
    "matmul": Model(lambda m, x: x @ m.layer.weight),
    "einsum": Model(lambda m, x: torch.einsum("ij,jk->ik", x, m.layer.weight)),
    "bilinear": Model(lambda m, x: m.bilinear(x, x), bilinear=nn.Bilinear(8, 8, 8)),
    "conv": Model(lambda m, x: m.conv(x[:, None])[:, 0], conv=nn.Conv1d(1, 1, 3, padding=1)),
    "conv_transpose": Model(lambda m, x: m.conv(x[:, None])[:, 0], conv=nn.ConvTranspose1d(1, 1, 3, padding=1)),
    "attention": Model(lambda m, x: m.heads(x[None], x[None], x[None])[0][0], heads=nn.MultiheadAttention(8, 2, batch_first=True)),
    "sdpa": Model(in_heads),
    "encoder": Model(lambda m, x: m.block(x[None])[0], block=nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
    "lstm": Model(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(8, 8)),
    "gru": Model(lambda m, x: m.gru(x)[0], gru=nn.GRU(8, 8)),
    "cell": Model(lambda m, x: m.cell(x), cell=nn.GRUCell(8, 8)),
    "packed": Model(packed, lstm=nn.LSTM(8, 8, batch_first=True)),
    "break": Model(broken),
    "unread": Model(lambda m, x: unread(m.layer, x)),
    "failing": Model(failing),
    "loop": Model(loop),
    "cond": Model(lambda m, x: torch.cond(x.sum() > 1e9, torch.relu, lambda x: torch.tanh(m.layer(x)), (x,))),
    "scan": Model(lambda m, x: scan(lambda c, y: (torch.tanh(c @ m.layer.weight + y), c.clone()), torch.zeros(8), x)[1]),
    "map": Model(lambda m, x: map_op(lambda row, w: torch.tanh(row @ w), x, m.layer.weight)),
    "function": Model(lambda m, x: Product.apply(x, m.layer.weight)),
    "function that breaks": Model(lambda m, x: Wrong.apply(x, m.layer.weight)),
    "checkpoint": Model(lambda m, x: checkpoint(m.layer, x, use_reentrant=False)),
    "reentrant checkpoint": Model(lambda m, x: checkpoint(m.layer, x, use_reentrant=True)),
    "vmap": Model(lambda m, x: torch.vmap(lambda row: F.linear(row, m.layer.weight))(x)),
    "no_grad": Model(lambda m, x: torch.no_grad()(m.layer)(x)),
    "own autocast": Model(lambda m, x: torch.autocast("cpu", enabled=False)(m.layer)(x)),
    "linalg": Model(lambda m, x: torch.linalg.multi_dot([x, m.layer.weight, m.after.weight])),
}


UNWATCHED = {"loop", "cond", "scan", "map"}
"""Higher-order ops that torch cannot run under a dispatch mode with gradients."""
CASES = [(name, grad) for name in INNER for grad in (False, True) if not (grad and name in UNWATCHED)]


@pytest.mark.parametrize(("name", "grad"), CASES)
def test_no_product_runs_in_fp32_untold(name: str, grad: bool) -> None:
    model = INNER[name].train(grad)
    amp, x = amprewrite.rewrite(model, dtype="bf16"), torch.randn(3, 8)
    with warnings.catch_warnings(), torch.set_grad_enabled(grad):
        warnings.simplefilter("ignore")
        assert untold(amp, lambda: amp(x)) == []
        assert products(lambda: model(x))


def with_hooks(model: nn.Module, kind: str) -> nn.Module:
    for part in model.children():
        getattr(part, f"register_{kind}_hook")(lambda *_: None)
    return model


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_no_product_of_a_hooked_module_runs_in_fp32_untold(kind: str) -> None:
    for late in (False, True):
        model = MLP()
        amp = amprewrite.rewrite(model if late else with_hooks(model, kind), dtype="bf16")
        if late:
            with_hooks(amp, kind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert untold(amp, lambda amp=amp: amp(torch.randn(3, 8))) == []  # type: ignore[misc]


CALLS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "a part": lambda amp: lambda: amp.first(torch.randn(3, 8)),
    "vmap of a part": lambda amp: lambda: torch.vmap(amp.first)(torch.randn(3, 8)),
    "vmap of the model": lambda amp: lambda: torch.vmap(amp)(torch.randn(3, 8)),
}


@pytest.mark.parametrize("after", [False, True], ids=["first", "after the model"])
@pytest.mark.parametrize("name", CALLS)
def test_no_product_of_a_part_runs_in_fp32_untold(name: str, after: bool) -> None:
    for make in (MLP, Broken):
        amp = amprewrite.rewrite(make(), dtype="bf16")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if after:
                amp(torch.randn(3, 8))
            assert untold(amp, CALLS[name](amp)) == []


def test_no_product_of_a_layer_put_in_later_runs_in_fp32_untold() -> None:
    amp: Any = amprewrite.rewrite(MLP(), dtype="bf16")
    x = torch.randn(3, 8)
    amp(x)
    amp.second = nn.Linear(16, 5)
    assert untold(amp, lambda: amp(x)) == []
    amp.second.inner = nn.Linear(8, 3)
    amp.head = nn.Sequential(nn.Linear(8, 3))
    assert untold(amp, lambda: amp(x)) == []
    assert untold(amp, lambda: amp.head(x)) == []
    amp.head[0] = nn.Linear(8, 2)
    assert untold(amp, lambda: amp.head(x)) == []


def test_the_count_finds_what_is_untold() -> None:
    """A product by the weights of a rewritten model, in code of the caller's, is the caller's: nobody can see it."""
    amp: Any = amprewrite.rewrite(MLP(), dtype="bf16")
    x = torch.randn(3, 8)
    assert len(untold(amp, lambda: (amp(x), F.linear(x, amp.first.weight)))) == 1
