"""A model in fp32 with half inputs, such as cached latents, half images or a half cache, runs as under torch.autocast: nothing is lost."""

from __future__ import annotations

import logging
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amprewrite
from amprewrite.tables.errors import CaptureError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Op(nn.Module):
    """A model of one parameter, `w`, and a function of (w, input)."""

    def __init__(self, function, *shape: int) -> None:
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)

    def forward(self, x):
        return self.function(self.w, x)


class Counts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Caching(nn.Module):
    """Attends to keys of earlier calls in a list of pairs, adds its own, and counts in a half tensor of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)

    def forward(self, x, past, state):
        h = self.query(x)
        for k, v in past:
            h = F.scaled_dot_product_attention(h, k, v)
        past.append((h, h))
        state["count"].add_(1)
        return h


class First(nn.Module):
    """The first result of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


MODELS = {
    "linear": (lambda: nn.Linear(256, 64), (32, 256)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.GELU()), (2, 3, 32, 32)),
    "matmul": (lambda: Op(lambda w, x: torch.softmax(x @ w, -1), 256, 64), (32, 256)),
    "einsum": (lambda: Op(lambda w, x: torch.einsum("bi,ij->bj", x / 8, w), 256, 64), (32, 256)),
    "attention": (lambda: Op(lambda w, x: F.scaled_dot_product_attention(F.linear(x, w), x, x), 64, 64), (2, 300, 64)),
    "gru": (lambda: First(nn.GRU(32, 64, batch_first=True)), (2, 20, 32)),
    "layer": (lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0, batch_first=True), (2, 300, 64)),
    "loss": (lambda: Op(lambda w, x: F.binary_cross_entropy_with_logits(x @ w, x.sigmoid()), 64, 64), (32, 64)),
}


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_half_inputs_give_the_numbers_of_the_same_inputs_in_fp32(name, fmt):
    """They are what fp32 inputs of these values give, bit by bit, gradients too; PyTorch alone refuses all of these calls."""
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape).to(DTYPES[fmt])
    with pytest.raises((RuntimeError, ValueError)):
        model(x)
    results = []
    for given in (x, x.float()):
        amp = amprewrite.rewrite(model, dtype=fmt, loss_scale=None)
        out = amp(given)
        assert out.dtype == torch.float32
        results.append([out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))])
        assert ("half inputs of" in str(amp.plan)) is (given is x)
    assert all(map(torch.equal, *results))


def test_nothing_depends_on_logs():
    logging.disable(logging.CRITICAL)
    try:
        assert amprewrite.rewrite(nn.Conv1d(2, 2, 3), dtype="bf16")(torch.randn(1, 2, 8).half()).dtype == torch.float32
    finally:
        logging.disable(logging.NOTSET)


def test_code_before_the_op_that_refuses_runs_once():
    amp = amprewrite.rewrite(Counts(), dtype="bf16")
    for calls in (1, 2):
        amp(torch.randn(4, 16).bfloat16())
        assert amp.calls == calls
    amp(torch.randn(4, 16))
    assert amp.calls == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_lists_and_dicts_stay_the_objects_they_are_and_writes_arrive(mode):
    with mode():
        amp = amprewrite.rewrite(Caching(), dtype="bf16")
        k = torch.randn(1, 2, 16).bfloat16()
        past, state = [(k, k), (k, k.clone())], {"count": torch.zeros(3).half()}
        for calls in (1, 2, 3):
            amp(torch.randn(1, 2, 16).half(), past, state)
            assert past[0][0] is k
            assert len(past) == 2 + calls
            assert torch.equal(state["count"], torch.full((3,), calls, dtype=torch.float16))


def test_the_gradient_of_a_half_input_is_half():
    x = torch.randn(4, 16).bfloat16().requires_grad_()
    amprewrite.rewrite(nn.Linear(16, 16), dtype="bf16")(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_strict_and_parts_take_half_inputs():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    x = torch.randn(2, 3, 8, 8).half()
    for options in ({"strict": True}, {"granularity": ["0", "2"]}):
        amp = amprewrite.rewrite(net, dtype="bf16", **options)
        assert amp(x).dtype == torch.float32
        assert "  low  " in str(amp.plan)
    assert "half inputs of" in str(amprewrite.plan(net, (x,), dtype="bf16"))


def test_verify_measures_half_inputs_as_calls_compute_them():
    x = torch.randn(2, 3, 16, 16)
    amp = amprewrite.rewrite(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU()).eval(), dtype="bf16")
    assert amprewrite.verify(amp, (x.bfloat16(),)).output_error == amprewrite.verify(amp, (x.bfloat16().float(),)).output_error > 0


def test_models_that_pytorch_runs_with_half_inputs_keep_their_dtypes():
    amp = amprewrite.rewrite(nn.LayerNorm(16), dtype="bf16")
    assert amp(torch.randn(4, 16).bfloat16()).dtype == torch.bfloat16
    half = nn.Linear(16, 16).bfloat16().requires_grad_(False)
    assert amprewrite.rewrite(nn.Sequential(half), dtype="bf16")(torch.randn(4, 16).bfloat16()).dtype == torch.bfloat16


def test_an_error_of_another_kind_leaves_later_calls_as_they_were():
    amp = amprewrite.rewrite(nn.Sequential(nn.LayerNorm(16), nn.Identity()), dtype="bf16")
    with pytest.raises(RuntimeError, match="16"):
        amp(torch.randn(4, 15).bfloat16())
    assert amp(torch.randn(4, 16).bfloat16()).dtype == torch.bfloat16


class Breaks(nn.Conv2d):
    def forward(self, x):
        x = x * 2
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.filterwarnings("ignore::amprewrite.AmpRewriteWarning")
def test_a_refusal_after_code_has_run_names_the_half_inputs():
    amp = amprewrite.rewrite(Breaks(3, 8, 3), dtype="bf16")
    with pytest.raises(RuntimeError, match="same") as caught:
        amp(torch.randn(2, 3, 8, 8).bfloat16())
    assert "was called with bf16 tensors, and its weights are fp32" in caught.value.__notes__[0]
    assert amp(torch.randn(2, 3, 8, 8)).dtype == torch.float32


def test_an_error_of_the_model_itself_gets_no_note_on_half_inputs():
    class Refuses(nn.Linear):
        def forward(self, x):
            if x.shape[0] == 3:
                raise ValueError("three")
            return super().forward(x)

    amp = amprewrite.rewrite(Refuses(16, 16), dtype="bf16")
    amp(torch.randn(4, 16).bfloat16())
    with pytest.raises(ValueError, match="three") as caught:
        amp(torch.randn(3, 16))
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(CaptureError, match="strict"):
        amprewrite.rewrite(Breaks(3, 8, 3), dtype="bf16", strict=True)(torch.randn(2, 3, 8, 8).bfloat16())


def test_half_tensors_in_a_named_tuple_become_fp32():
    class Batch(NamedTuple):
        x: torch.Tensor
        scale: float

    class Net(nn.Conv2d):
        def forward(self, batch):
            return super().forward(batch.x) * batch.scale

    amp = amprewrite.rewrite(Net(3, 8, 3), dtype="fp16")
    batch = Batch(torch.randn(2, 3, 8, 8).half(), 2.0)
    assert amp(batch).dtype == torch.float32
    assert batch.x.dtype == torch.float16


@dataclass(frozen=True)
class Memory:
    x: torch.Tensor


@pytest.mark.parametrize("holder", [OrderedDict, UserDict, SimpleNamespace, Memory])
def test_half_tensors_in_objects_become_fp32_for_the_call(holder):
    class Net(nn.Module):
        """Attention refuses a half memory beside fp32 queries at capture, where `linear` does not."""

        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(64, 64)

        def forward(self, x, memory):
            held = memory["x"] if isinstance(memory, OrderedDict | UserDict) else memory.x
            return F.scaled_dot_product_attention(self.query(x), held, held)

    net, x, half = Net(), torch.randn(2, 300, 64), torch.randn(2, 300, 64).bfloat16()
    amp, memory = amprewrite.rewrite(net, dtype="bf16"), holder(x=half)
    for _ in range(2):
        torch.testing.assert_close(amp(x, memory), net(x, holder(x=half.float())), rtol=0, atol=2e-2)
    assert (memory["x"] if isinstance(memory, OrderedDict | UserDict) else memory.x) is half


@pytest.mark.parametrize(
    "held", [lambda made: made, lambda made: made.t(), lambda made: made[:, ::2]], ids=["dense", "turned", "with gaps"]
)
@pytest.mark.parametrize(
    "turn", [lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: x.transpose_(0, 1).add_(1), lambda x: x.mul_(2)], ids=range(4)
)
def test_a_half_tensor_takes_the_layout_that_the_model_gives_it(held, turn):
    """A write that changes the shape cannot be copied into the old one."""

    class Turning(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, data):
            y = data["y"]
            out = self.layer(y[:, :1].expand(y.shape[0], 6))
            turn(y)
            return out

    mine, theirs = (held(torch.arange(36.0).view(6, 6).to(torch.bfloat16)) for _ in range(2))
    theirs = {"y": theirs}
    amprewrite.rewrite(Turning(), dtype="bf16")(theirs)
    turn(mine)
    assert theirs["y"].dtype == torch.bfloat16
    assert torch.equal(theirs["y"], mine)
