"""A capture that changes what a model computes in fp32 is told from rounding: by first calls that are looked at, and by `verify`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amprewrite
from amprewrite import AmpRewriteWarning, CaptureError

TOKENS, WIDTH = 1024, 64


def asks_compiler() -> bool:
    return torch.compiler.is_compiling()


def asks_dynamo() -> bool:
    return torch._dynamo.is_compiling()


class OtherMask(nn.Module):
    """Attention that builds another mask while it is compiled, as a model of transformers does."""

    def __init__(self, asks: Callable[[], bool] = asks_compiler, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.asks = asks
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        query, key, value = self.qkv(self.drop(x)).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(8 if self.asks() else 0)
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))


class Plain(nn.Module):
    """Dropout, a norm with running numbers, and a write in place: effects that a comparison must not make again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.linear(x)))
        self.total += y.detach().sum(0)
        return y


def data() -> Tensor:
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def said(call: Callable[[], Any]) -> list[str]:
    """The warnings of a call on capture."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in found if issubclass(each.category, AmpRewriteWarning) and "captured" in str(each.message)]


@pytest.mark.parametrize("asks", [asks_compiler, asks_dynamo])
def test_fp16_tells_of_it_at_the_first_call(asks: Callable[[], bool]) -> None:
    amp = amprewrite.rewrite(OtherMask(asks), dtype="fp16")
    (message,) = said(lambda: amp(data()))
    assert "OtherMask computes other values" in message and "from mask (test_capture_check.py:" in message
    assert message in amp.plan.notes
    assert not said(lambda: amp(data())), "once"
    assert amp.calls == 2, "what the call writes is written once"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_strict_raises(dtype: str) -> None:
    amp = amprewrite.rewrite(OtherMask(), dtype=dtype, strict=True)
    with pytest.raises(CaptureError, match=r"computes other values when it is captured: \d\.\de-\d+ off in fp32.*from mask"):
        amp(data())


def test_bf16_looks_at_no_first_call() -> None:
    amp = amprewrite.rewrite(OtherMask(), dtype="bf16")
    assert not said(lambda: amp(data()))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_comparison_leaves_no_trace(dtype: str, train: bool) -> None:
    """Random numbers are drawn once, buffers are written once, and gradients are those of one call."""
    torch.manual_seed(0)
    model = Plain().train(train)
    x, kept = data()[0].requires_grad_(), {name: each.clone() for name, each in model.named_buffers()}
    torch.manual_seed(1)
    wanted = model(x)
    drawn = torch.rand(())
    (expected,) = torch.autograd.grad(wanted.square().sum(), x)
    buffers = {name: each.clone() for name, each in model.named_buffers()}
    model.load_state_dict({**model.state_dict(), **kept})
    amp = amprewrite.rewrite(model, dtype=dtype, strict=True, loss_scale=1.0)
    torch.manual_seed(1)
    got = amp(x)
    assert torch.equal(torch.rand(()), drawn)
    assert (got - wanted).norm() < 0.02 * wanted.norm() and ((got == 0) == (wanted == 0)).all()
    for name, each in amp.named_buffers():
        assert torch.allclose(each.float(), buffers[name].float(), rtol=0.02, atol=0.02 * float(buffers[name].abs().max())), name
    (gradient,) = torch.autograd.grad(got.square().sum(), x)
    assert (gradient - expected).norm() < 0.03 * expected.norm()


SEEN: list[int] = []


class Counts(nn.Module):
    """Counts its calls outside of it, and asks the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(1)
        return self.linear(x) * (2 if asks_compiler() else 1)


def test_code_that_changes_objects_is_not_run_again() -> None:
    SEEN.clear()
    amp = amprewrite.rewrite(Counts(), dtype="fp16")
    assert not said(lambda: amp(data())) and SEEN == [1]


def test_dropout_in_front_draws_the_same_numbers() -> None:
    amp = amprewrite.rewrite(OtherMask(dropout=0.1), dtype="fp16")
    (message,) = said(lambda: amp(data()))
    assert "from mask" in message


class OtherOrder(nn.Module):
    """Draws two masks of dropout, in another order while it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if asks_compiler():
            dropped = self.second(y.exp())
            return self.first(y) + dropped
        return self.first(y) + self.second(y.exp())


def test_other_random_numbers_are_no_other_values() -> None:
    amp = amprewrite.rewrite(OtherOrder(), dtype="fp16")
    assert not said(lambda: amp(data()))
    amp = amprewrite.rewrite(OtherOrder().eval(), dtype="fp16")
    assert not said(lambda: amp(data()))


def test_an_input_that_is_written_is_written_once() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return self.linear(x) * (2 if asks_compiler() else 1)

    x = data()
    amp = amprewrite.rewrite(Writes(), dtype="fp16")
    assert not said(lambda: amp(x)) and torch.equal(x, data() + 1)


@pytest.mark.parametrize("train", [True, False])
def test_a_write_to_what_dropout_returns_unchanged_writes_an_input_once(train: bool) -> None:
    """Eager `dropout(x, 0.0)`, and dropout in eval, return `x`; the graph records a copy."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.linear = nn.Dropout(0.0 if train else 0.5), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.drop(x)
            y[..., : WIDTH // 2] *= 2
            return self.linear(y)

    x, expected = data(), data()
    expected[..., : WIDTH // 2] *= 2
    amp = amprewrite.rewrite(Writes().train(train), dtype="fp16")
    assert not said(lambda: amp(x)) and torch.equal(x, expected)


def test_verify_tells_capture_from_rounding() -> None:
    amp = amprewrite.rewrite(OtherMask(), dtype="bf16")
    report = amprewrite.verify(amp, (data(),))
    assert report.capture_error > 0.05 and report.output_error < 0.02
    assert report.parted.startswith("tril (test_capture_check.py:") and "capture: changed the model by" in str(report)


@pytest.mark.parametrize("train", [True, False])
def test_verify_finds_nothing_where_capture_changes_nothing(train: bool) -> None:
    report = amprewrite.verify(amprewrite.rewrite(Plain().train(train), dtype="bf16"), (data()[0],))
    assert (report.capture_error, report.parted) == (0.0, "") and "capture" not in str(report)


def test_verify_compares_with_no_model_that_gives_other_results_twice() -> None:
    class Clock(nn.Module):
        ticks = 0

        def forward(self, x: Tensor) -> Tensor:
            if not asks_compiler():
                type(self).ticks += 1
            return x.exp() + self.ticks

    report = amprewrite.verify(amprewrite.rewrite(Clock(), dtype="bf16"), (data(),))
    assert report.capture_error is None and "of which two runs differ" in str(report)
