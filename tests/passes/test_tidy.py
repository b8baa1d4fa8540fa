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
    assert remove_idle_conversions(module.graph) == removed
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
    assert remove_idle_conversions(module.graph) == 1
    assert theirs in module.graph.nodes
    assert ours not in module.graph.nodes


def test_a_conversion_that_the_casts_made_idle_goes(capture: Capture) -> None:
    """float() of a low value: the planned cast does it, and the model's own call has nothing left to do."""
    module, plan = rewrite_graph(read_problem(capture(lambda x, w: (x @ w).float() * 2, X, W), Policy(BF16)))
    assert [str(cast) for cast in plan.casts][-1] == "matmul -> fp32 for float"
    assert sum(node.target in ("to", "float") for node in module.graph.nodes) == len(plan.casts)


def test_the_pass_says_whether_it_changed_anything(capture: Capture) -> None:
    captured = read_problem(capture(lambda x: torch.relu(x.to(torch.float32)), X), Policy(BF16))
    plan, edited = plan_region(captured.problem), EditedGraph.of(captured)
    assert Tidy()(plan, edited).modified
    assert not Tidy()(plan, edited).modified
