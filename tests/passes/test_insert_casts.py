"""Edits of small captured graphs: where copies go, who reads them, and what becomes of dtype arguments and constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx
from torch.nn import functional as F

from amprewrite.graphs.fx.captured import Captured, EditedGraph
from amprewrite.ir.policies.policy import Policy, parse_overrides
from amprewrite.passes import plan_region
from amprewrite.passes.apply.insert_casts import CAST, InsertCasts
from amprewrite.passes.driver import read_problem, rewrite_graph
from amprewrite.tables.errors import PlanError
from amprewrite.tables.formats import FP16, saturate

Capture = Callable[..., torch.fx.GraphModule]
X, W = torch.randn(4, 8), torch.randn(8, 8)


def read(module: torch.fx.GraphModule, **overrides: str) -> Captured:
    return read_problem(module, Policy(FP16, "default", parse_overrides(overrides, FP16)))


def inserted(module: torch.fx.GraphModule) -> list[str]:
    """Each inserted copy with the nodes that read it."""
    marked = [node for node in module.graph.nodes if CAST in node.meta]
    return [f"{node.args[0]} -> {node.meta[CAST]}: {', '.join(map(str, node.users))}" for node in marked]


def edited(module: torch.fx.GraphModule, **overrides: str) -> torch.fx.GraphModule:
    captured = read(module, **overrides)
    InsertCasts()(plan_region(captured.problem), EditedGraph(module, captured.nodes))
    module.graph.lint()
    module.recompile()
    return module


def two_readers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    product = x @ w
    doubled = torch.relu(x)
    return torch.exp(product) + torch.cos(product) + doubled


def test_readers_share_one_copy_made_before_the_first(capture: Capture) -> None:
    module = edited(capture(two_readers, X, W))
    assert inserted(module) == ["l_x_ -> fp16: product", "l_w_ -> fp16: product", "product -> fp32: exp, cos"]
    names = [node.name for node in module.graph.nodes]
    copy = next(node for node in module.graph.nodes if node.meta.get(CAST) == "fp32")
    assert names.index("doubled") < names.index(copy.name) == names.index("exp") - 1


def test_readers_in_the_makers_format_keep_reading_the_maker(capture: Capture) -> None:
    module = edited(capture(lambda x, w: (torch.relu(x @ w), torch.exp(x)), X, W))
    assert {user.name for user in next(n for n in module.graph.nodes if n.op == "placeholder").users} == {"to", "exp"}


def test_the_edited_graph_gives_the_dtypes_and_the_values(capture: Capture) -> None:
    want = two_readers(X, W)
    got = edited(capture(two_readers, X, W))(X, W)
    found = got[0] if isinstance(got, tuple) else got
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, want, rtol=0, atol=8 * FP16.eps * want.abs().max().item())


def test_a_graph_without_low_nodes_is_not_modified(capture: Capture) -> None:
    module = capture(lambda x: torch.exp(x) + 1, X)
    before = module.code
    captured = read(module)
    InsertCasts()(plan_region(captured.problem), EditedGraph.of(captured))
    module.recompile()
    assert module.code == before


def masked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).masked_fill(x > 0, torch.finfo(torch.float32).min) @ w


def constants(module: torch.fx.GraphModule) -> list[float]:
    return [a for node in module.graph.nodes for a in node.args if isinstance(a, float)]


def test_a_low_mask_takes_the_end_of_the_low_range(capture: Capture) -> None:
    module = edited(capture(lambda x, w: torch.relu(x).masked_fill(x > 0, torch.finfo(torch.float32).min).relu() @ w, X, W))
    assert constants(module) == [-FP16.max]


def test_a_high_mask_keeps_its_constant_and_its_low_copy_saturates(capture: Capture) -> None:
    def scores(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x).masked_fill(x > 0, torch.finfo(torch.float32).min), -1) @ w

    module = edited(capture(scores, X, W), **{"node:masked_fill": "high", "softmax": "low"})
    assert constants(module) == [torch.finfo(torch.float32).min, FP16.max]
    assert [node.args[1] for node in module.graph.nodes if node.target is saturate] == [FP16.max]


def test_the_low_copy_of_what_is_computed_with_does_not_saturate(capture: Capture) -> None:
    module = edited(capture(masked, X, W), **{"node:masked_fill": "high"})
    assert constants(module) == [torch.finfo(torch.float32).min]
    assert not any(node.target is saturate for node in module.graph.nodes)


def test_what_saturates_keeps_its_infinities() -> None:
    value = torch.tensor([-torch.inf, torch.finfo(torch.float32).min, 0.5, 1e5, torch.inf])
    assert saturate(value, FP16.max).tolist() == [-torch.inf, -FP16.max, 0.5, FP16.max, torch.inf]


def attend(x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax(((x @ w) @ x.transpose(-1, -2)) / 2 + mask[None, :, : x.shape[0]], -1) @ x


@pytest.mark.parametrize(
    ("function", "saturates"),
    [
        pytest.param(attend, True, id="added to scores"),
        pytest.param(lambda x, w, mask: F.scaled_dot_product_attention(x @ w, x, x, attn_mask=mask[:, :4]), True, id="attn_mask"),
        pytest.param(lambda x, w, mask: torch.relu(x @ w @ x.transpose(-1, -2) + mask), False, id="added to something else"),
        pytest.param(lambda x, w, mask: torch.softmax(x @ w @ x.transpose(-1, -2) * mask, -1), False, id="a factor"),
    ],
)  # fmt: skip
def test_a_mask_from_outside_saturates(capture: Capture, function: Callable[..., torch.Tensor], saturates: bool) -> None:
    mask = torch.full((len(X), len(X)), torch.finfo(torch.float32).min).triu(1)
    module = edited(capture(function, X, W, mask), add="low", softmax="low")
    assert any(node.target is saturate for node in module.graph.nodes) is saturates


def test_infinities_stay(capture: Capture) -> None:
    module = edited(capture(lambda x, w: torch.relu(x).masked_fill(x > 0, float("-inf")) @ w, X, W))
    assert constants(module) == [float("-inf")]


@pytest.mark.parametrize(
    "take",
    [
        pytest.param(lambda a, x: torch.zeros_like(a), id="zeros_like"),
        pytest.param(lambda a, x: torch.full_like(a, 2.0), id="full_like"),
        pytest.param(lambda a, x: x.type_as(a), id="type_as"),
        pytest.param(lambda a, x: x.to(a.dtype), id="to of another's dtype"),
        pytest.param(lambda a, x: x.to(a), id="to of another tensor"),
        pytest.param(lambda a, x: (x > 0).to(a.dtype), id="a mask made a factor"),
        pytest.param(lambda a, x: a.expand_as(x), id="expand_as an input"),
        pytest.param(lambda a, x: a.view_as(x), id="view_as an input"),
    ],
)
def test_what_takes_its_dtype_from_another_tensor_is_told_its_own(capture: Capture, take: Callable[..., Any]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return take(x @ w, x) @ w

    module, plan = rewrite_graph(read(capture(function, X, W)))
    assert {node.colour.value for node in plan.nodes if node.role == "op"} <= {"low", "plain"}
    assert module(X, W)[0].dtype is torch.float32
    torch.testing.assert_close(module(X, W)[0], function(X, W), rtol=0, atol=0.1)


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(lambda a: a.float(), id="float()"),
        pytest.param(lambda a: a.to(torch.float32), id="to(float32)"),
        pytest.param(lambda a: a.to(dtype=torch.float32), id="to(dtype=float32)"),
        pytest.param(lambda a: torch.softmax(a, -1, dtype=torch.float32), id="softmax(dtype=float32)"),
    ],
)
def test_a_dtype_that_the_model_spells_out_is_kept(capture: Capture, ask: Callable[..., Any]) -> None:
    module, plan = rewrite_graph(read(capture(lambda x, w: ask(x @ w) * 2, X, W)))
    (asked,) = [node for node in plan.nodes if node.reason.name == "EXPLICIT_DTYPE"]
    assert asked.dtype == "fp32"
    assert module(X, W)[0].dtype is torch.float32


def test_an_op_of_two_operands_that_is_told_a_dtype_gets_them_alike(capture: Capture) -> None:
    """A softmax that is told fp32 converts its operand itself. Its derivative wants both operands of one dtype."""
    call = lambda x, w: torch.ops.aten._softmax_backward_data(x @ w, torch.softmax(x, -1), -1, torch.float32)  # noqa: E731
    module, plan = rewrite_graph(read(capture(call, X, torch.eye(X.shape[1]))))
    assert {node.colour.value for node in plan.nodes if node.op == "matmul"} == {"low"}
    torch.testing.assert_close(module(X, torch.eye(X.shape[1]))[0], call(X, torch.eye(X.shape[1])), rtol=0, atol=1e-2)


@pytest.mark.parametrize(("shapes", "low"), [(((4,), (4,)), False), (((3, 4), (4,)), False), (((3, 4), (5, 4)), True)])
def test_inner_of_a_vector_is_a_dot(capture: Capture, shapes: tuple[tuple[int, ...], ...], low: bool) -> None:
    """What is bound by bytes is worth no cast; torch.autocast leaves it in fp32, too."""
    _, plan = rewrite_graph(read(capture(torch.inner, *(torch.randn(shape) for shape in shapes))))
    assert [node.colour.value == "low" for node in plan.nodes if node.op == "inner"] == [low]


@pytest.mark.parametrize(("equation", "low"), [("ij,kl->ijkl", False), ("ij,kl->ik", False), ("ij,ij->ij", False), ("ij,kj->ik", True)])
def test_an_einsum_without_a_matrix_product_is_none(capture: Capture, equation: str, low: bool) -> None:
    _, plan = rewrite_graph(read(capture(lambda a, b: torch.einsum(equation, a, b), torch.randn(3, 4), torch.randn(3, 4))))
    assert [node.colour.value == "low" for node in plan.nodes if node.op == "einsum"] == [low]


GUMBELS = {
    "by hand": lambda x, w: torch.softmax(x @ w - torch.log(-torch.log(torch.rand(64, 16) * 0.9999999 + 1e-38)), -1),
    "rand_like": lambda x, w: x @ w - torch.log(-torch.log1p(-torch.rand_like(x @ w).clamp(1e-7, 1 - 1e-7))),
    "uniform_": lambda x, w: x @ w * -torch.log(1 - torch.empty(64, 16).uniform_()),
    "distribution": lambda x, w: x @ w + torch.distributions.Gumbel(0.0, 1.0, validate_args=False).sample((64, 16)),
}


@pytest.mark.parametrize("call", GUMBELS.values(), ids=GUMBELS)
def test_a_draw_before_a_logarithm_stays_fp32(capture: Capture, call: Callable[..., torch.Tensor]) -> None:
    """One in 512 draws rounds up to one in bf16. The logarithm of its distance from one is infinite."""
    x, w = torch.ones(64, 16), torch.eye(16)
    module, plan = rewrite_graph(read(capture(call, x, w)))
    assert "low" in {node.colour.value for node in plan.nodes}
    for _ in range(20):
        assert module(x, w)[0].isfinite().all()
    drawn = [node for node in plan.nodes if node.op in ("rand", "rand_like", "uniform", "log", "log1p")]
    assert drawn and not [node.name for node in drawn if node.colour.value == "low"]


def test_the_given_graph_is_not_edited_by_rewrite_graph(capture: Capture) -> None:
    module = capture(two_readers, X, W)
    before = module.code
    edited_copy, _ = rewrite_graph(read(module))
    module.recompile()
    assert module.code == before != edited_copy.code


def test_a_cast_for_a_node_that_does_not_read_it_is_an_error(capture: Capture) -> None:
    captured = read(capture(two_readers, X, W))
    plan = plan_region(captured.problem)
    plan = replace(plan, casts=(replace(plan.casts[0], users=("exp",)),))
    with pytest.raises(PlanError, match="casts l_x_ for exp, which does not read it; make the plan anew"):
        InsertCasts()(plan, EditedGraph.of(captured))
