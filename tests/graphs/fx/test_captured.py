"""Copies of a captured graph: code is generated for those that run, and for no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.graphs.fx import captured


def test_a_first_call_generates_the_code_of_the_captured_graph_and_of_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    generated, generate = [], torch.fx.GraphModule.recompile

    def counted(module: torch.fx.GraphModule) -> object:
        generated.append(module)
        return generate(module)

    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    amp = amprewrite.rewrite(model, dtype="bf16")
    monkeypatch.setattr(torch.fx.GraphModule, "recompile", counted)
    amp(torch.randn(4, 64)).sum().backward()
    assert len(generated) <= 2
    amp(torch.randn(4, 64)).sum().backward()
    assert len(generated) <= 2


class WrittenOut(nn.Module):
    """A softmax by hand, which is fused, of a value that is returned, too, and marked."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        e = (y - y.amax(-1, keepdim=True)).exp()
        return y, e / e.sum(-1, keepdim=True)


def test_passes_that_normalise_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, copy = list[torch.fx.GraphModule](), captured.copy_graph
    monkeypatch.setattr(captured, "copy_graph", lambda module: copied.append(module) or copy(module))
    amp = amprewrite.rewrite(WrittenOut(), dtype="bf16")
    y, shares = amp(torch.randn(4, 64))
    (y.sum() + shares.square().sum()).backward()
    assert {"softmax", "to"} <= {node.op for region in amp.plan.regions for node in region.nodes}
    assert len(copied) == 2  # one that normalising passes edit, and one that is edited by the plan
