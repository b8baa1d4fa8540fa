"""Modules that are put into a rewritten model later run rewritten too, as parts of it and called by themselves."""

from __future__ import annotations

import pytest
import torch
from runtime_help import MLP, data, low, matmul_dtypes, mlp, ran_low
from torch import nn

from amprewrite import AmpRewriteWarning

LOW = {torch.bfloat16}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = mlp(), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


@pytest.mark.parametrize("meet", ["the model", "another part", "train", "to"])
def test_a_head_put_in_later_and_called_by_itself(meet):
    amp, x = low(Nested()), data()
    amp(x)
    amp.head(amp.encoder(x))
    amp.head = nn.Linear(4, 2)
    h = amp.encoder(x).detach() if meet == "another part" else torch.randn(3, 4)
    {"the model": lambda: amp(x), "another part": lambda: None, "train": amp.eval, "to": lambda: amp.to("cpu")}[meet]()
    assert matmul_dtypes(amp.head, h) == LOW
    assert ran_low(amp.head(h), nn.functional.linear(h, amp.head.weight, amp.head.bias))
    latest = amp.plan.regions[-1].nodes
    assert [node.op for node in latest if node.flops] == ["linear"] and latest[-1].module == "head"
    assert amp(x).shape == (3, 2) and matmul_dtypes(amp, x) == LOW
    amp.head(h).sum().backward()
    assert amp.head.weight.grad.dtype == torch.float32


def test_a_layer_put_in_deep_inside_and_called_by_itself():
    amp, x = low(Nested()), data()
    amp(x)
    old = amp.encoder.second
    wanted = old(torch.ones(3, 16))
    amp.encoder.second = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    amp(x)
    h = torch.randn(3, 16)
    assert matmul_dtypes(amp.encoder.second, h) == matmul_dtypes(amp.encoder.second[0], h) == LOW
    assert torch.equal(old(torch.ones(3, 16)), wanted)  # what stood there before is still itself
    assert amp.encoder.second(h).shape == (3, 4)


class Uncaptured(nn.Sequential):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_module_that_was_taken_out_can_still_be_called(backend):
    model, h = Nested(), torch.randn(3, 4)
    model.encoder.second = Uncaptured(nn.Linear(16, 4))
    wanted = model.head(h)
    amp = low(model, backend=backend)
    head, second = amp.head, amp.encoder.second
    del amp.head, amp.encoder.second
    assert ran_low(head(h), wanted)
    with pytest.warns(AmpRewriteWarning, match=r"Nested\.encoder\.second has code that runs as it is written"):
        assert second(torch.randn(3, 16)).shape == (3, 4)


def test_taking_a_layer_in_does_not_capture_again_and_again():
    amp, x = low(Nested()), data()
    for _ in range(2):
        amp.head = nn.Linear(4, 2)
        for _ in range(4):
            amp(x)
            graphs = len(amp.plans)
        amp(x)
        assert len(amp.plans) == graphs


def test_a_block_put_in_later_says_that_it_is_not_rewritten():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    amp, x = low(model, granularity="blocks"), data()
    amp(x)
    amp.append(nn.Linear(8, 4))
    with pytest.warns(AmpRewriteWarning, match=r"Sequential\.2 runs in fp32: it was put in after the rewrite"):
        amp(x)
    assert any(part.where == "2" for part in amp.plan.skipped)


def test_a_module_that_compiles_itself_is_left_alone():
    amp, x = low(Nested()), data()
    own = MLP()
    own.compile(backend="eager")
    before = own._compiled_call_impl
    amp.encoder = own
    amp(x)
    assert amp.encoder._compiled_call_impl is before and amp(x).shape == (3, 4)
