"""What a first call costs above Dynamo's own work, in Python calls, which are the same on every machine and under every load."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
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


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """(calls of Python functions, nodes of the plan) for each graph that is rewritten in a test."""
    counts: list[tuple[int, int]] = []
    rewritten = GraphRewriter.rewrite_region

    def counting(self: GraphRewriter, *args: Any) -> Any:
        calls, region = calls_of(rewritten, self, *args)
        counts.append((calls, len(region.plan.nodes)))
        return region

    with monkeypatch.context() as patch:
        patch.setattr(GraphRewriter, "rewrite_region", counting)
        yield counts
    torch._dynamo.reset()


def test_a_graph_takes_few_calls_for_each_node(counted: list[tuple[int, int]]) -> None:
    """Of reading, deciding, editing, the check on fake tensors and lowering. They were 1,120 for each node of a plan."""
    for blocks in (2, 10, 20):
        torch._dynamo.reset()
        amprewrite.rewrite(deep(blocks), dtype="bf16")(torch.randn(4, 16)).sum().backward()
    _, (fewer, few), (more, many) = counted
    assert (more - fewer) / (many - few) <= 850


def test_symbolic_sizes_cost_little_more_than_fixed_ones(counted: list[tuple[int, int]]) -> None:
    """The check runs ops on the sizes at capture. On symbolic sizes PyTorch takes thousands of calls for each op."""
    for dynamic in (False, False, True):
        torch._dynamo.reset()
        x = torch.randn(4, 16)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        amprewrite.rewrite(deep(2), dtype="bf16")(x)
    _, (fixed, _), (symbolic, _) = counted
    assert symbolic <= 2 * fixed  # it was 3.9


class Loop(nn.Module):
    """A loop that Dynamo unrolls: `step` returns the next state of (4, 16) and a result of one step, whose input is `x[:, t]`."""

    def __init__(self, step: Callable[..., Any], steps: int) -> None:
        super().__init__()
        self.inner, self.cell, self.step, self.steps = nn.Linear(16, 16), nn.GRUCell(16, 16), step, steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, states, results = self.inner(x), x[:, 0], []
        for t in range(self.steps):
            states, result = self.step(self, x, h, states, t)
            results.append(result)
        return torch.stack(results[::-1], 1)


def advantages(loop: Loop, x: torch.Tensor, h: torch.Tensor, last: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of reinforcement learning: sums of inputs and low values, backwards in time."""
    last = x[:, -1 - t] + 0.99 * h[:, -1 - t] * (1 - x[:, t]) + 0.95 * (1 - x[:, -1 - t]) * last
    return last, last


def cells(loop: Loop, x: torch.Tensor, h: torch.Tensor, state: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    state = loop.cell(h[:, t], state)
    return state, state


def masked(loop: Loop, x: torch.Tensor, h: torch.Tensor, state: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with blocked places, which fp16 clamps."""
    scores = (state + h[:, t]).masked_fill(x[:, t] > 1, -1e9)
    return torch.logsumexp(scores.unsqueeze(-1) + loop.inner.weight, 1), scores.softmax(-1)


def solver(loop: Loop, x: torch.Tensor, h: torch.Tensor, state: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Small steps, which stay fp32."""
    state = state + 0.01 * torch.tanh(loop.inner(state) + t * 0.01)
    return state, state


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("step", [advantages, cells, masked, solver])
def test_an_unrolled_loop_costs_as_much_a_step_however_long_it_is(step: Any, dtype: str, counted: list[tuple[int, int]]) -> None:
    for steps in (4, 16, 48, 80):
        torch._dynamo.reset()
        amprewrite.rewrite(Loop(step, steps), dtype=dtype)(torch.randn(4, steps, 16)).sum().backward()
    _, *three = counted
    first, second = ((more - fewer) / (many - few) for (fewer, few), (more, many) in itertools.pairwise(three))
    assert second <= 1.2 * first
