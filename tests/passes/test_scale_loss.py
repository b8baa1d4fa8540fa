"""Loss scaling in a small captured training graph: what is inserted where, and that nobody outside sees the scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.ir.policies.policy import Policy
from amprewrite.passes import plan_region
from amprewrite.passes.apply.scale_loss import INVERSE, SCALE, ScaleLoss
from amprewrite.passes.driver import read_problem, rewrite_graph
from amprewrite.tables.formats import FP16

Capture = Callable[..., torch.fx.GraphModule]


def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w) * torch.exp(b)


def arguments() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 8), torch.randn(8, 8, requires_grad=True), torch.randn(8, requires_grad=True)]


def rewritten(capture: Capture, scale_loss: bool) -> torch.fx.GraphModule:
    captured = read_problem(capture(function, *arguments(), grad=True), Policy(FP16), training=True, scale_loss=scale_loss)
    with torch.enable_grad():
        module, _ = rewrite_graph(captured)
    return module


def gradients(module: torch.fx.GraphModule, *scales: float) -> list[torch.Tensor]:
    x, w, b = arguments()
    (out,) = module(x, w, b, *map(torch.tensor, scales))
    out.sum().backward()
    assert w.grad is not None and b.grad is not None
    return [out.detach(), w.grad, b.grad]


def test_crossings(capture: Capture) -> None:
    module = rewritten(capture, True)
    names = Counter(getattr(node.target, "__name__", "") for node in module.graph.nodes)
    assert names["scale_gradient"] == 1  # the one differentiable result
    assert names["cast_in"] == 2  # the low copies of x and w: each asks the tensor it gets
    assert names["unscale_gradient"] == 1  # b, which is read in fp32


def test_two_further_inputs_come_last(capture: Capture) -> None:
    inputs = [node.target for node in rewritten(capture, True).graph.nodes if node.op == "placeholder"]
    assert inputs[-2:] == [SCALE, INVERSE]
    assert len(inputs) == 5


@pytest.mark.parametrize("scale", [1.0, 64.0, 1024.0])
def test_gradients_outside_are_those_without_scale(capture: Capture, scale: float) -> None:
    want = gradients(rewritten(capture, False))
    for got, plain in zip(gradients(rewritten(capture, True), scale, 1 / scale), want, strict=True):
        assert got.dtype is torch.float32
        torch.testing.assert_close(got, plain, rtol=0, atol=0)  # powers of two round nothing


def test_off_changes_nothing(capture: Capture) -> None:
    module = capture(function, *arguments(), grad=True)
    captured = read_problem(module, Policy(FP16), training=True)
    before = module.code
    ScaleLoss()(plan_region(captured.problem), EditedGraph.of(captured))
    module.recompile()
    assert module.code == before
