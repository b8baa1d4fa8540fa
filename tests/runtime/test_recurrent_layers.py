"""LSTM, GRU and RNN layers over many time steps: a layer is one op, captured in a time that does not grow with its steps."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from tiers import long_unless
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import amprewrite
from amprewrite.graphs.fx.run.recurrent_layers import LAYERS

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {layer.__name__ for layer in LAYERS}
KINDS: dict[str, Callable[[int], nn.RNNBase]] = {
    "gru": lambda width: nn.GRU(64, width),
    "rnn": lambda width: nn.RNN(64, width),
    "lstm": lambda width: nn.LSTM(64, width),
    "gru both ways": lambda width: nn.GRU(64, width, 2, batch_first=True, bidirectional=True),
    "relu": lambda width: nn.RNN(64, width, 2, nonlinearity="relu", bidirectional=True),
    "projected": lambda width: nn.LSTM(64, width, 2, proj_size=width // 2, bidirectional=True),
    "no bias": lambda width: nn.GRU(64, width, bias=False),
}


class Layer(nn.Module):
    """A recurrent layer, to which a state may be passed, and a linear layer on its results."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear((layer.proj_size or layer.hidden_size) * (1 + layer.bidirectional), 8)

    def forward(self, x: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        rows, last = self.layer(x, state)
        return self.out(rows), last[0] if isinstance(last, tuple) else last


class Packed(Layer):
    """A recurrent layer on a packed sequence of unequal lengths, and a linear layer on its results."""

    def forward(self, x: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        steps = x.shape[1 if self.layer.batch_first else 0]
        lengths = torch.tensor([steps // 2, steps, steps - 3])
        packed = pack_padded_sequence(x, lengths, batch_first=self.layer.batch_first, enforce_sorted=False)
        rows, last = self.layer(packed, state)
        return self.out(rows.data), last[0] if isinstance(last, tuple) else last


def made(kind: str, width: int, steps: int, cls: type[Layer] = Layer) -> tuple[Layer, torch.Tensor]:
    torch.manual_seed(0)
    layer = KINDS[kind](width)
    return cls(layer), torch.randn((3, steps, 64) if layer.batch_first else (steps, 3, 64))


def results(model: Layer, call: Callable[..., Any], args: tuple[Any, ...], scale: float = 1.0) -> list[torch.Tensor]:
    """The results of a call, and the gradients of their mean squares."""
    model.zero_grad()
    given = call(*args)
    (sum(each.float().square().mean() for each in given) * scale).backward()
    return [*(each.detach() for each in given), *(p.grad / scale for p in model.parameters() if p.grad is not None)]


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))


def fake_calls(call: Callable[[], Any]) -> int:
    """How many ops on fake tensors `call` runs."""
    count = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_name == "__torch_dispatch__" and frame.f_code.co_filename.endswith("fake_tensor.py")

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", long_unless(lambda kind: kind in ("gru", "projected"), KINDS))
def test_capture_does_not_run_the_steps(kind: str) -> None:
    counts = []
    for steps in (20, 200):
        model, x = made(kind, 16, steps)
        amp = amprewrite.rewrite(model, dtype="bf16")
        counts.append(fake_calls(lambda amp=amp, x=x: amp(x)))
        (layer,) = [node for node in amp.plan.nodes if node.op in NAMES]
        assert layer.colour.value == "low" and not amp.plan.skipped
    assert 10 < counts[1] <= counts[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", long_unless(lambda kind: kind == "gru both ways", KINDS))
def test_errors_are_autocasts(kind: str, dtype: str) -> None:
    model, x = made(kind, 32, 300)
    check(model, (x,), dtype)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gru", "rnn", "lstm"])
def test_errors_are_autocasts_at_two_thousand_steps(kind: str) -> None:
    model, x = made(kind, 256, 2000)
    check(model, (x,), "bf16")


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_state_is_passed_in(kind: str) -> None:
    model, x = made(kind, 32, 300)
    state = torch.randn(1, 3, 32)
    check(model, (x, (state, state) if kind == "lstm" else state), "bf16")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", long_unless(lambda kind: kind in ("gru both ways", "lstm"), KINDS))
def test_packed_sequences_run_low(kind: str, dtype: str) -> None:
    model, x = made(kind, 32, 300, Packed)
    check(model, (x,), dtype)


def test_packed_sequences_by_any_way_in() -> None:
    """A state is passed in, a module is called by itself, hooks run, a second length captures no third graph, and a plan can be edited."""
    model, x = made("gru", 32, 300, Packed)
    check(model, (x, torch.randn(1, 3, 32)), "bf16")
    packed = [pack_padded_sequence(x[:steps], torch.tensor([steps, 9, 2])) for steps in (50, 90, 130)]
    model.requires_grad_(False)
    for amp, net in ((amprewrite.rewrite(model, dtype="bf16").layer, model.layer), (amprewrite.rewrite(model.layer, dtype="bf16"),) * 2):
        seen: list[PackedSequence] = []
        net.register_forward_hook(lambda _, args, __, seen=seen: seen.extend(args))
        got = [amp(each)[0].data for each in packed]
        assert len(seen) == 3 * (net is amp)
        for each, rows in zip(packed, got, strict=True):
            exact = model.layer(each)[0].data
            assert rows.dtype == torch.float32 and 0 < (rows - exact).norm() / exact.norm() < 0.01
    amp = amprewrite.rewrite(model, dtype="bf16", overrides={"module:layer": "fp32"})
    assert torch.equal(amp(x)[1], model(x)[1])


def check(model: Layer, args: tuple[Any, ...], dtype: str) -> None:
    """Results and gradients err at most 1.5 times as much as torch.autocast's; in fp16 autocast has no LSTM on a CPU."""
    exact = results(model, model, args)
    amp = amprewrite.rewrite(model, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # fp16 has a loss scale only where an optimizer is known
    amp.attach(optimizer)
    ours = results(model, amp, args)
    twin = copy.deepcopy(model)

    def autocast(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=LOW[dtype]):
            return twin(*args)

    if dtype == "fp16" and isinstance(model.layer, nn.LSTM) and not model.layer.proj_size:
        bar = 5e-3
    else:
        bar = 1.5 * error(results(twin, autocast, args, 1024.0 if dtype == "fp16" else 1.0), exact)
    assert error(ours, exact) <= bar
    (layer,) = [node for node in amp.plan.nodes if node.op in NAMES]
    assert layer.colour.value == "low"
    assert all("graph break" in part.why for part in amp.plan.skipped) and bool(amp.plan.skipped) == isinstance(model, Packed)
    model.eval()
    amp.eval()
    with torch.no_grad():
        assert error(list(amp(*args)), list(model(*args))) <= bar
