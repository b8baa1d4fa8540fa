"""What a first call costs above Dynamo's own work, in Python calls, which are the same on every machine and under every load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.runtime.captured.graph_rewriter import GraphRewriter


def calls_of(function: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    """How many Python functions run in a call of `function`, and its result."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        result = function(*args)
    finally:
        sys.setprofile(None)
    return calls, result


class Norm(nn.Module):
    """An RMS norm, written out by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(Norm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def deep(blocks: int) -> nn.Module:
    return nn.Sequential(*[Block(16) for _ in range(blocks)])


def test_rewrite_takes_few_calls_for_each_module():
    """Of a clone, the handlers of calls of parts, and walks over modules, parameters and buffers. They were 430 for each module."""
    amprewrite.rewrite(deep(2), dtype="bf16")
    fewer, more = (calls_of(lambda n=n: amprewrite.rewrite(deep(n), dtype="bf16"))[0] - calls_of(deep, n)[0] for n in (10, 20))
    modules = len(list(deep(20).modules())) - len(list(deep(10).modules()))
    assert (more - fewer) / modules <= 160


def test_a_graph_takes_few_calls_for_each_node(monkeypatch: pytest.MonkeyPatch):
    """Of reading, deciding, editing, the check on fake tensors and lowering. They were 1,120 for each node of a plan."""
    counts = []
    rewritten = GraphRewriter.rewrite_region

    def counted(self: GraphRewriter, *args: Any) -> Any:
        calls, region = calls_of(rewritten, self, *args)
        counts.append((calls, len(region.plan.nodes)))
        return region

    monkeypatch.setattr(GraphRewriter, "rewrite_region", counted)
    for blocks in (2, 10, 20):
        torch._dynamo.reset()
        amprewrite.rewrite(deep(blocks), dtype="bf16")(torch.randn(4, 16)).sum().backward()
    _, (fewer, few), (more, many) = counts
    assert (more - fewer) / (many - few) <= 850
