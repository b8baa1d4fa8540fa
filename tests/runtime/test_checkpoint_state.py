"""What a model holds and the body of an activation checkpoint writes or reads ends as in fp32, after steps that recompute it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import amprewrite

Run = Callable[..., Tensor]
OFTEN = 3
"""Steps of each training run."""


class Counts(nn.Module):
    """Counts its calls in a buffer, a plain attribute and a list, and reads the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.attribute, self.listed = torch.zeros((), dtype=torch.int64), [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.attribute.add_(1)
        with torch.no_grad():
            self.listed[0].add_(x.detach().abs().mean())
        return x * 0.5


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def saved_less(function: Run, x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


def reentrant(function: Run, x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


def selective(function: Run, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


def nested(function: Run, x: Tensor) -> Tensor:
    return saved_less(lambda y: saved_less(function, y) + y, x)


def in_a_loop(function: Run, x: Tensor) -> Tensor:
    for _ in range(3):
        x = saved_less(function, x)
    return x


def reentrant_in_a_loop(function: Run, x: Tensor) -> Tensor:
    for _ in range(3):
        x = reentrant(function, x)
    return x


def in_parts(function: Run, x: Tensor) -> Tensor:
    assert isinstance(function, nn.Sequential)
    return checkpoint_sequential(function, 2, x, use_reentrant=False)


def read_before_a_write(function: Run, x: Tensor) -> Tensor:
    """What is read in one checkpoint is written in the next."""
    return saved_less(function, saved_less(lambda y: y * (1 + function[2].calls), x))  # type: ignore[index]


WAYS = [saved_less, reentrant, selective, nested, in_a_loop, reentrant_in_a_loop, in_parts, read_before_a_write]


class Model(nn.Module):
    def __init__(self, how: Callable[[Run, Tensor], Tensor], factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.factor = how, factor
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.f = nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), Counts(), nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.how(self.f, self.first(x) * self.factor))


class Convolutions(Model):
    def __init__(self, how: Callable[[Run, Tensor], Tensor]) -> None:
        super().__init__(how)
        norm = nn.BatchNorm2d(4)
        self.f = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), norm, Counts(), nn.Conv2d(4, 4, 1), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.how(self.f, self.first(x).view(-1, 4, 2, 2)).flatten(1))


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def trained(model: nn.Module) -> list[Tensor]:
    """Gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(OFTEN):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        found.append(gradient(model))
        optimizer.step()
        optimizer.zero_grad()
    return found


def compare(make: Callable[[], nn.Module], dtype: str | None, **options: Any) -> None:
    plain = make()
    amp = amprewrite.rewrite(make(), dtype=dtype, loss_scale=16.0 if dtype == "fp16" else None, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amprewrite.AmpRewriteWarning)
        got = trained(amp)
    loose = {None: 1e-5, "fp32": 1e-5, "fp16": 1e-2, "bf16": 8e-2}[dtype]
    for ours, theirs in zip(got, trained(plain), strict=True):
        assert (ours - theirs).norm() <= loose * theirs.norm()
    want = {**dict(plain.named_buffers()), **held(plain)}
    for name, tensor in {**dict(amp.named_buffers()), **held(amp)}.items():
        torch.testing.assert_close(tensor, want[name], rtol=loose, atol=loose)
        if name.endswith(("calls", "num_batches_tracked", "attribute")):
            assert torch.equal(tensor, want[name])


def held(model: nn.Module) -> dict[str, Tensor]:
    """What modules hold in attributes that are no buffers."""
    counting = {name: module for name, module in model.named_modules() if isinstance(module, Counts)}
    return {f"{name}.attribute": each.attribute for name, each in counting.items()} | {
        f"{name}.listed": each.listed[0] for name, each in counting.items()
    }


@pytest.mark.parametrize("dtype", ["bf16", "fp16", None])
@pytest.mark.parametrize("how", WAYS, ids=lambda how: how.__name__)
def test_state_ends_as_in_fp32(how: Any, dtype: str | None) -> None:
    compare(lambda: Model(how), dtype, strict=how is not in_parts)  # Dynamo captures the bodies of that one alone


@pytest.mark.parametrize("options", [{"granularity": ["f"]}, {"cache_weights": False}, {"lists": "tf"}, {"pad": "always"}], ids=str)
@pytest.mark.parametrize("how", [saved_less, nested], ids=lambda how: how.__name__)
def test_state_whatever_the_options(how: Any, options: dict[str, Any]) -> None:
    compare(lambda: Model(how), "bf16", **options)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_state_of_convolutions(dtype: str) -> None:
    compare(lambda: Convolutions(in_a_loop), dtype)


@pytest.mark.parametrize("how", [saved_less, in_a_loop, reentrant_in_a_loop], ids=lambda how: how.__name__)
def test_state_of_a_graph_that_is_decided_anew(how: Any) -> None:
    """The first call overflows fp16."""
    compare(lambda: Model(how, 1e6), "fp16")


def test_state_that_is_frozen() -> None:
    def frozen() -> nn.Module:
        model = Model(saved_less)
        model.f[1].eval().requires_grad_(False)
        return model

    compare(frozen, "bf16")


def test_weights_that_are_written_before_backward() -> None:
    """The recomputation reads weights as they are then."""
    plain = Model(saved_less)
    amp = amprewrite.rewrite(Model(saved_less), dtype="bf16", strict=True)
    x = torch.randn(32, 8)
    losses = [model(x).square().mean() for model in (plain, amp)]
    for model, loss in zip((plain, amp), losses, strict=True):
        with torch.no_grad():
            model.f[0].weight.mul_(0.5)
        loss.backward()
    assert (gradient(amp) - gradient(plain)).norm() <= 8e-2 * gradient(plain).norm()


@pytest.mark.parametrize("dtype", ["bf16", None])
def test_an_argument_that_is_written_is_refused(dtype: str | None) -> None:
    """As written: what is recomputed from it would not be what it was."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return saved_less(lambda y: self.a(y.mul_(2)).relu(), self.a(x) * 2).sum()

    for model in (Writes(), amprewrite.rewrite(Writes(), dtype=dtype, strict=True)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(torch.randn(4, 8)).backward()


@pytest.mark.parametrize("dtype", ["bf16", None])
def test_random_numbers_of_a_checkpoint_in_a_checkpoint(dtype: str | None) -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.ones(64, 64))

        def inner(self, y: Tensor) -> Tensor:
            return F.dropout(y * self.a, 0.5).square()

        def forward(self, x: Tensor) -> Tensor:
            return saved_less(lambda y: F.dropout(saved_less(self.inner, F.dropout(y, 0.5)), 0.5), x)

    amp = amprewrite.rewrite(Drops(), dtype=dtype, strict=True)
    x = torch.rand(64, 64) + 0.5
    y = amp(x)
    y.sum().backward()
    assert 0 < (y == 0).sum() < y.numel()
    torch.testing.assert_close(amp.a.grad, 2 * y.detach(), rtol=0.02, atol=0.02)  # of d/da (k x a)^2, where a is 1
