"""LSTM, GRU and RNN layers over many time steps: a layer is one op, captured in a time that does not grow with its steps."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from tiers import long_beyond, long_unless
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import amprewrite
from amprewrite.graphs.fx.run.recurrent_layers import LAYERS, STEPS, in_parts
from amprewrite.tables.vocabulary import Edit

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

SUMMED_BY_STEPS = [kind for kind in KINDS if kind not in ("lstm", "relu")]
"""oneDNN runs an LSTM whole; with ReLU the kinks err more than the sums."""


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


def under_autocast(model: Layer, args: tuple[Any, ...], dtype: str) -> list[torch.Tensor]:
    """The `results` of `model` under torch.autocast."""

    def call(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=LOW[dtype]):
            return model(*args)

    scale = 1024.0 if dtype == "fp16" else 1.0
    try:
        return results(model, call, args, scale)
    except RuntimeError:  # oneDNN has no such LSTM for this CPU, which autocast does not ask: PyTorch's own kernels have one
        with torch.backends.mkldnn.flags(enabled=False):
            return results(model, call, args, scale)


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


@pytest.mark.parametrize(("cls", "dtype"), long_beyond(2, [(Layer, "bf16"), (Packed, "fp16"), (Layer, "fp16"), (Packed, "bf16")]))
@pytest.mark.parametrize("kind", long_unless(lambda kind: kind in ("gru both ways", "projected"), SUMMED_BY_STEPS))
def test_gradients_of_all_steps_are_added_up_in_fp32(kind: str, cls: type[Layer], dtype: str) -> None:
    """They err at most 1.5 times as much as if each step had its own copies of the weights, and at most half as much as with one copy."""
    model, x = made(kind, 32, 300, cls)
    exact = results(model, model, (x,))
    amp = amprewrite.rewrite(model, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.attach(optimizer)
    ours = results(model, amp, (x,))
    twin, scale = copy.deepcopy(model), 1024.0 if dtype == "fp16" else 1.0

    def autocast(cached: bool) -> float:
        def call(x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=LOW[dtype], cache_enabled=cached):
                return twin(x)

        return error(results(twin, call, (x,), scale), exact)

    assert error(ours, exact) <= min(1.5 * autocast(cached=False), autocast(cached=True) / 2)
    assert is_in_parts(amp)


def is_in_parts(amp: nn.Module) -> bool:
    """Whether the plan lets the recurrent layer run in parts."""
    (region, *_) = [region for region in amp.plan.regions if any(node.op in NAMES for node in region.nodes)]
    return bool(region.edited(Edit.RUN_IN_PARTS))


def test_other_layers_run_whole() -> None:
    """Those of few steps, without gradients of weights, or with a kernel that adds up in fp32."""
    model, x = made("gru", 16, STEPS + 1)
    assert is_in_parts(amprewrite.rewrite(model, dtype="bf16", example_inputs=(x,)))
    assert not is_in_parts(amprewrite.rewrite(model, dtype="bf16", example_inputs=(x[:STEPS],)))
    with torch.no_grad():
        assert not is_in_parts(amprewrite.rewrite(model, dtype="bf16", example_inputs=(x,)))
    model.layer.requires_grad_(False)
    assert not is_in_parts(amprewrite.rewrite(model, dtype="bf16", example_inputs=(x,)))
    model, x = made("lstm", 16, 300)
    assert not is_in_parts(amprewrite.rewrite(model, dtype="bf16", example_inputs=(x,)))
    assert is_in_parts(amprewrite.rewrite(model, dtype="fp16", example_inputs=(x,)))


@pytest.mark.parametrize("lengths", [None, (50, 50, 50), (50, 33, 1)])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["gru", "lstm", "rnn_tanh", "rnn_relu"])
def test_parts_give_the_same_bits(kind: str, batch_first: bool, lengths: tuple[int, ...] | None) -> None:
    """Results, final states and draws of dropout are the same, and in fp32 so are the gradients but for the order of sums."""
    torch.manual_seed(0)
    cls = {"gru": nn.GRU, "lstm": nn.LSTM}.get(kind, nn.RNN)
    module = cls(8, 16, 2, batch_first=batch_first, bidirectional=True, dropout=0.5)
    x, state = torch.randn((3, 50, 8) if batch_first else (50, 3, 8)), torch.randn(4, 3, 16)
    found = []
    for layer in (getattr(torch, kind), in_parts(getattr(torch, kind))):
        for dtype in (torch.float32, torch.float16):
            weights = [each.detach().to(dtype).requires_grad_() for each in module._flat_weights]
            given, start = x.to(dtype).requires_grad_(), (state.to(dtype), state.to(dtype)) if kind == "lstm" else state.to(dtype)
            torch.manual_seed(1)
            if lengths is None:
                made = layer(given, start, weights, True, 2, 0.5, True, True, batch_first)
            else:
                packed = pack_padded_sequence(given, torch.tensor(lengths), batch_first=batch_first)
                made = layer(packed.data, packed.batch_sizes, start, weights, True, 2, 0.5, True, True)
            gradients = torch.autograd.grad(sum(each.float().square().sum() for each in made), [given, *weights])
            found.append((made, gradients, dtype))
    for (whole, want, dtype), (parts, got, _) in zip(found[:2], found[2:], strict=True):
        assert len(whole) == len(parts)
        for a, b in zip(whole, parts, strict=True):
            assert a.shape == b.shape and a.stride() == b.stride()
            assert torch.equal(a, b) if dtype is torch.float16 else torch.allclose(a, b, atol=1e-6)
        if dtype is torch.float32:
            assert error(list(got), list(want)) < 1e-5


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_a_state_is_passed_in(kind: str) -> None:
    model, x = made(kind, 32, 300)
    state = torch.randn(1, 3, 32)
    check(model, (x, (state, state) if kind == "lstm" else state), "bf16")


@pytest.mark.parametrize("dtype", long_beyond(1, ["bf16", "fp16"]))
@pytest.mark.parametrize("kind", long_unless(lambda kind: kind in ("gru both ways", "lstm"), KINDS))
def test_packed_sequences_run_low(kind: str, dtype: str) -> None:
    model, x = made(kind, 32, 300, Packed)
    check(model, (x,), dtype)


def test_a_layer_put_in_later_runs_packed_sequences_with_its_own_weights() -> None:
    model, x = made("lstm", 64, 12, Packed)
    amp = amprewrite.rewrite(model, dtype="bf16")
    amp(x)
    model.layer = nn.LSTM(64, 64)
    amp.layer = copy.deepcopy(model.layer)
    got, wanted = amp(x)[0], model(x)[0]
    assert error([got], [wanted]) < 0.01
    got.sum().backward()
    assert amp.layer.weight_ih_l0.grad is not None


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
    """Results and gradients err at most 1.5 times as much as torch.autocast's."""
    exact = results(model, model, args)
    amp = amprewrite.rewrite(model, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # fp16 has a loss scale only where an optimizer is known
    amp.attach(optimizer)
    ours = results(model, amp, args)
    bar = 1.5 * error(under_autocast(copy.deepcopy(model), args, dtype), exact)
    assert error(ours, exact) <= bar
    (layer,) = [node for node in amp.plan.nodes if node.op in NAMES]
    assert layer.colour.value == "low"
    assert all("graph break" in part.why for part in amp.plan.skipped) and bool(amp.plan.skipped) == isinstance(model, Packed)
    model.eval()
    amp.eval()
    with torch.no_grad():
        assert error(list(amp(*args)), list(model(*args))) <= bar
