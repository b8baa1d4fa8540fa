"""Copies of a captured graph: code is generated for those that run, and for no other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amprewrite


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
