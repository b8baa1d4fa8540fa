"""What tidy removes, and what it must leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.ir.policies.policy import Policy
from amprewrite.passes import plan_region
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.passes.driver import read_problem, rewrite_graph
from amprewrite.passes.lower.tidy import Tidy, remove_idle_conversions
from amprewrite.tables.formats import BF16

Capture = Callable[..., torch.fx.GraphModule]
X, W = torch.randn(4, 8), torch.randn(8, 8)


@pytest.mark.parametrize(
    "convert, removed",
    [
        pytest.param(lambda y: y.to(torch.float32), 1, id="to the dtype it has"),
        pytest.param(lambda y: y.to(torch.float32).to(torch.float32), 2, id="twice"),
        pytest.param(lambda y: y.to(torch.float64), 0, id="to another dtype"),
        pytest.param(
            lambda y: y.to(torch.bfloat16).to(torch.float32), 0, id="high, low, high: its rounding is what the model asks for"
        ),
        pytest.param(lambda y: y.to(torch.float32, copy=True), 0, id="a copy asked for by name"),
        pytest.param(lambda y: y.to("cpu", torch.float32), 0, id="a device beside the dtype"),
        pytest.param(lambda y: y.clone(), 0, id="what is no conversion"),
    ],
)
def test_conversions(capture: Capture, convert: Callable[..., Any], removed: int) -> None:
    module = capture(lambda x: convert(torch.relu(x)) + 1, X)
    want = module(X)
    before = len(module.graph.nodes)
    remove_idle_conversions(module.graph)
    assert before - len(module.graph.nodes) == removed
    module.recompile()
    torch.testing.assert_close(module(X), want, rtol=0, atol=0)


def test_a_copy_that_nobody_reads_is_removed_and_the_models_own_dead_ends_stay(capture: Capture) -> None:
    module = capture(lambda x: torch.relu(x) + 1, X)
    first = next(node for node in module.graph.nodes if node.op == "placeholder")
    with module.graph.inserting_after(first):
        ours = module.graph.call_method("to", (first, torch.bfloat16))
        theirs = module.graph.call_method("to", (first, torch.float16))
    ours.meta = {**first.meta, CAST: "bf16"}
    theirs.meta = dict(first.meta)
    remove_idle_conversions(module.graph)
    assert theirs in module.graph.nodes
    assert ours not in module.graph.nodes


def test_a_conversion_that_the_casts_made_idle_goes(capture: Capture) -> None:
    """float() of a low value: the planned cast does it, and the model's own call has nothing left to do."""
    module, plan = rewrite_graph(read_problem(capture(lambda x, w: (x @ w).float() * 2, X, W), Policy(BF16)))
    assert [str(cast) for cast in plan.casts][-1] == "matmul -> fp32 for float"
    assert sum(node.target in ("to", "float") for node in module.graph.nodes) == len(plan.casts)


def test_twice_is_once(capture: Capture) -> None:
    captured = read_problem(capture(lambda x: torch.relu(x.to(torch.float32)), X), Policy(BF16))
    plan, edited = plan_region(captured.problem), EditedGraph.of(captured)
    before = edited.module.code
    Tidy()(plan, edited)
    once = edited.module.code
    Tidy()(plan, edited)
    assert before != once == edited.module.code


def test_zeros_that_copies_alone_read_are_made_low(capture: Capture) -> None:
    module, plan = rewrite_graph(read_problem(capture(lambda x, w: (x @ w) @ torch.zeros(8, 8) @ torch.ones(8, 2), X, W), Policy(BF16)))
    assert {"zeros -> bf16 for matmul_1", "ones -> bf16 for matmul_2"} <= {str(cast) for cast in plan.casts}
    made = {node.target: node.kwargs for node in module.graph.nodes if node.target in (torch.zeros, torch.ones)}
    assert made == {torch.zeros: {"dtype": torch.bfloat16}, torch.ones: {"dtype": torch.bfloat16}}
    assert sum(node.target == "to" for node in module.graph.nodes) == len(plan.casts) - 2


def written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    start = torch.zeros(8, 8)
    start[0] = w[0] * 3
    return (x @ w) @ start


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(written, id="written in between"),
        pytest.param(lambda x, w: (lambda zeros: ((x @ w) @ zeros) + zeros[:4] + 1e-3)(torch.ones(8, 8)), id="read beside the copy"),
    ],
)
def test_zeros_that_something_else_reads_stay(capture: Capture, read: Callable[..., Any]) -> None:
    module, _ = rewrite_graph(read_problem(capture(read, X, W), Policy(BF16)))
    assert [node.kwargs for node in module.graph.nodes if node.target in (torch.zeros, torch.ones)] == [{}]
