"""What no input changes is computed once, and right wherever it is read."""

from __future__ import annotations

import torch
from ops_help import Ops
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import amprewrite
from amprewrite.passes.lower.keep_constants import Constants


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(8, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(8, device=x.device)
        return self.linear(x + self.table(places)) * (places > 2)[:, None]


def test_a_step_computes_constants_once() -> None:
    torch.manual_seed(0)
    model, x = Positions(), torch.randn(8, 16)
    amp = amprewrite.rewrite(model, dtype="bf16")
    with torch.inference_mode():
        amp(x)
    first = amp(x)
    with Ops() as ops:
        again = amp(x)
        again.sum().backward()
    assert not ops.names["arange"] and not ops.names["gt"]
    assert torch.equal(first, again)
    assert model.table.weight.grad is not None and model.table.weight.grad[:3].count_nonzero() == 0


def test_constants_of_fake_inputs_are_fake() -> None:
    graph = torch.fx.Graph()
    node = graph.call_function(torch.arange, (4,), {"device": torch.device("cpu")})
    constants = Constants([node], [node])
    with FakeTensorMode():
        assert isinstance(constants.take()[0], FakeTensor)
    (kept,) = constants.take()
    assert torch.equal(kept, torch.arange(4)) and constants.take()[0] is kept
