"""Every reason is true: flipping the cause that a plan names flips the node, on models of many kinds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import amprewrite
from amprewrite.ir.pass_base import Problem
from amprewrite.ir.plans.plan import NodePlan, RegionPlan
from amprewrite.passes import plan_region
from amprewrite.report.cast_plan import CastPlan
from amprewrite.report.questions.explain import OTHER, Change, WhatIf, conditions
from amprewrite.tables.vocabulary import Colour, Reason

BY_LISTS = {Reason.ON_ALLOWLIST, Reason.ON_DENYLIST}
BY_NEIGHBOURS = {
    Reason.ON_INTERNALLIST, Reason.CHEAPER_LOW, Reason.CHEAPER_HIGH, Reason.NOT_REACHED, Reason.AFTER_DENY, Reason.TIED,
    Reason.WIDEST_INPUT, Reason.FOLLOWS_INPUTS, Reason.BETWEEN_ALLOW, Reason.AFTER_ALLOW, Reason.BESIDE_ALLOW, Reason.FORCED,
}  # fmt: skip


class Attention(nn.Module):
    """Written out, with an fp32 softmax, a mask and a residual, as older transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 5.6
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores.float(), -1).to(q.dtype)
        return x + self.out(weights @ v)


class Rms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.up, self.down = nn.Parameter(torch.ones(32)), nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return x + self.down(nn.functional.silu(self.up(h)))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.Flatten())
        self.head = nn.Linear(8 * 4 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.log_softmax(self.head(self.body(x)), -1).exp().cumsum(-1)


class Odd(nn.Module):
    """Explicit dtypes, an unlisted op, writes to state, denied ops on two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        self.seen.add_(h.detach().mean(0))
        g = torch.exp(h) + torch.log1p(h.abs())
        g = torch.special.i0e(g) * 2 + h.to(torch.float32)
        return self.b(torch.tanh(g) * h)


MODELS = (
    pytest.param(nn.Sequential(Attention(), Attention()), (2, 6, 32), id="attention"),
    pytest.param(nn.Sequential(Rms(), Rms()), (2, 6, 32), id="rms"),
    pytest.param(Vision().eval(), (2, 3, 14, 14), id="vision"),
    pytest.param(Odd().eval(), (4, 32), id="odd"),
    pytest.param(nn.LSTM(32, 16), (3, 2, 32), id="lstm"),
)


def plans(model: nn.Module, shape: tuple[int, ...], **options: Any) -> CastPlan:
    torch.manual_seed(0)
    with torch.no_grad():
        return amprewrite.plan(model, (torch.randn(*shape),), **{"dtype": "bf16", **options})


def decided(region: RegionPlan) -> Iterator[NodePlan]:
    return (node for node in region.nodes if node.role == "op" and node.colour is not Colour.PLAIN)


def unpinned(region: RegionPlan, name: str) -> RegionPlan:
    """The region decided again as if the fact that pins a node did not hold."""
    problem = region.basis
    assert isinstance(problem, Problem)
    graph = problem.graph.exchanged({name: replace(problem.graph[name], pinned=None)})
    return plan_region(replace(problem, graph=graph))


@pytest.mark.parametrize("lists", ["default", "tf", "autocast", "o2"])
@pytest.mark.parametrize(("model", "shape"), MODELS)
@pytest.mark.long
def test_flipping_the_named_cause_flips_the_node(model: nn.Module, shape: tuple[int, ...], lists: str) -> None:
    plan = plans(model, shape, lists=lists)
    done: set[tuple[str, Reason, Colour]] = set()
    for region in plan.regions:
        asked = WhatIf.of(region)
        assert asked is not None and asked.base.nodes == region.nodes
        for node in decided(region):
            if (node.op, node.reason, node.colour) in done:  # a new plan through the public options for one of each kind
                tied = node.reason in (Reason.TIED, Reason.FORCED)  # to what is pinned, perhaps
                assert tied or node.reason not in BY_NEIGHBOURS or asked.cause(node.name) or asked.forced(node.name)
                continue
            done.add((node.op, node.reason, node.colour))
            if node.reason in BY_LISTS:
                moved = plans(model, shape, lists=lists, overrides={node.op: "low" if node.colour is Colour.HIGH else "deny"})
                assert moved.find(node.name)[0].colour is OTHER[node.colour], node
            elif node.reason in BY_NEIGHBOURS:
                check_neighbours(plan, asked, node, model, shape, lists)
            elif node.reason in (Reason.UNROUNDED, Reason.MAGNIFIED, Reason.TOLD_APART):
                # by what it leads to, which an override of its own can set aside
                change = asked.forced(node.name)
                assert change is not None and conditions(node, "bf16")
                assert plans(model, shape, lists=lists, overrides=change.overrides).find(node.name)[0].colour is Colour.LOW, node
            else:
                freed = {other.name: other for other in unpinned(region, node.name).nodes}[node.name]
                assert freed.reason is not node.reason, node
                assert conditions(node, "bf16"), node
    assert done


def check_neighbours(plan: CastPlan, asked: WhatIf, node: NodePlan, model: nn.Module, shape: tuple[int, ...], lists: str) -> None:
    """A cause that was found holds through the public option, too; where there is none the node's own override must work."""
    cause, forced = asked.cause(node.name), asked.forced(node.name)
    change = cause or forced
    if change is None:  # tied to something that is pinned: freeing that frees it
        assert node.reason in (Reason.TIED, Reason.FORCED), node
        return
    moved = plans(model, shape, lists=lists, overrides=change.overrides)
    assert moved.find(node.name)[0].colour is OTHER[node.colour], node
    assert len(moved.casts) - len(plan.casts) == change.casts + change.weight_casts
    if cause is not None and len(cause.nodes) > 1:
        for name in cause.nodes:
            fewer = {n: cause.colour for n in cause.nodes if n != name}
            after = {other.name: other.colour for other in asked.decide(fewer).nodes}
            assert after[node.name] is node.colour, f"{name} is idle among the causes of {node.name}"


@pytest.mark.parametrize(("model", "shape"), MODELS)
def test_every_node_has_a_reason_and_the_node_it_names_exists(model: nn.Module, shape: tuple[int, ...]) -> None:
    plan = plans(model, shape)
    names = {node.name for node in plan.nodes}
    for node in plan.nodes:
        assert node.why() and (not node.because_of or node.because_of in names)
        assert plan.explain(node.name).startswith(("heavy op left high", node.name))


def test_every_reason_has_a_condition_or_is_decided_by_neighbours() -> None:
    node = NodePlan("n", "linear", Colour.HIGH, Reason.UNLISTED, detail="d", source="m.py:1")
    for reason in Reason:
        text = conditions(replace(node, reason=reason), "bf16")
        assert bool(text) != (reason in BY_NEIGHBOURS - {Reason.FORCED}), reason
        assert "{" not in text.replace("{'", "") or "overrides" in text or "edit" in text, text


def test_an_op_of_another_library_is_told_with_the_counts() -> None:
    @torch.library.custom_op("amprewrite_test::product", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    product.register_fake(lambda a, b: a @ b)

    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.ops.amprewrite_test.product(self.linear(x), self.linear.weight)
            return out

    with torch.no_grad():
        plan = plans(Foreign(), (4, 8))
    assert "amprewrite_test::product (1 x) is on no list: it runs in fp32, and its FLOPs are not counted" in plan.counts()


def test_an_edited_plan_answers_by_its_own_colours() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    plan = plans(model, (4, 8))
    assert WhatIf.of(plan.edit({"gelu": "high"}).regions[0]) is None
    with torch.no_grad():
        followed = amprewrite.plan(model, (torch.randn(4, 8),), plan=plan.edit({"gelu": "high"}))
    change = WhatIf(followed.regions[0]).forced("gelu")
    assert change is not None and change.casts == -2


def test_heavy_ops_left_high_come_first_with_what_they_miss() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    plan = plans(model, (4, 8), overrides={"module:2": "fp32"})
    for text in (plan.summary(), plan.explain(), plan.explain("2")):
        assert text.startswith("heavy op left high: linear_1 in 2 runs high (fp32) because an override asks for it (module:2)")
        assert "it would run low without overrides['module:2']" in text


def test_a_price_reads_well() -> None:
    change = Change(Colour.HIGH, ("a[0]",), ("b",), 1, -2, -3000)
    assert change.price() == "1 cast more and 2 copies of weights fewer (-3 kB); 1 more node would follow"
    assert change.overrides == {"node:a[[]0]": "fp32"}
    assert replace(change, moved=(), casts=0, weight_casts=0, cast_bytes=0).price() == "no cast more or fewer"
