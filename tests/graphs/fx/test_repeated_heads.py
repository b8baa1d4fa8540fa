"""Attention on a GPU reads heads that were copied for groups of query heads, and the copies go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor
from torch.nn import functional as F

from amprewrite import passes
from amprewrite.graphs.fx.captured import Captured, EditedGraph
from amprewrite.ir.pass_base import run_passes
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.ir.policies.policy import Policy
from amprewrite.passes import plan_region
from amprewrite.passes.driver import read_problem
from amprewrite.tables.devices import named_device
from amprewrite.tables.formats import BF16
from amprewrite.tables.vocabulary import Edit

B, H, N, S, D = 2, 2, 4, 5, 16
Attention = Callable[[Tensor, Tensor, Tensor], Any]


def repeat(x: Tensor, times: int = N) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, times, s, d).reshape(b, h * times, s, d)


def as_transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True)


def by_unsqueeze(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.unsqueeze(2).expand(-1, -1, N, -1, -1).flatten(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def causal_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(S)
    return F.scaled_dot_product_attention(q, repeat(k), repeat(v), at[None, :] <= at[:, None])


def returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    few = k * 2
    return F.scaled_dot_product_attention(q, repeat(few), repeat(v)), few


def own_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat(k), repeat(v), q[:, :1, :, :1] > 0)


def read_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    many = repeat(k)
    return F.scaled_dot_product_attention(q, many, repeat(v)) + many


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    few = k * 2
    many = repeat(few)
    few.add_(1)
    return F.scaled_dot_product_attention(q, many, repeat(v)) + few.sum()


def other_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, None].expand(B, N, H, S, D).reshape(B, N * H, S, D) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def mixed_up(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    turned = torch.tensor([1, 0])
    k, v = (x[:, turned, None].expand(B, H, N, S, D).reshape(B, H * N, S, D) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def along_the_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, None].expand(B, N, H, S, D).reshape(B * N, H, S, D) for x in (k, v))
    return F.scaled_dot_product_attention(q.reshape(B * N, H, S, D), k, v)


def keys_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat(k), torch.cat([v] * N, 1))


GROUPED = [as_transformers, by_unsqueeze, causal_mask, returned]
KEPT = [own_mask, read_twice, written, other_order, mixed_up, along_the_batch, keys_alone]


def inputs(low: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(B, heads, S, D) for heads in (H * N, H, H)]
    return [x.bfloat16() if low else x for x in made]


def planned(
    attention: Attention, device: str = "cuda", scale_loss: bool = False, **facts: Any
) -> tuple[Captured, RegionPlan, torch.fx.GraphModule]:
    """What is read of a function, decided for a device, and the graph that a GPU would run."""
    found: list[tuple[Captured, RegionPlan, torch.fx.GraphModule]] = []

    def keep(module: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        read = read_problem(module, Policy(BF16, may_decline=False), fold_masks="any", training=True, scale_loss=scale_loss)
        read.know(device=device, **facts)
        plan, edited = plan_region(read.problem), EditedGraph.of(read)
        run_passes(passes.APPLY, plan, edited)
        edited.module.recompile()
        found.append((read, plan, edited.module))
        return module.forward

    torch._dynamo.reset()
    torch.compile(attention, backend=keep, fullgraph=True)(*inputs())
    return found[0]


def places(module: torch.fx.GraphModule, given: list[Tensor]) -> list[Tensor]:
    """The inputs in the order of the graph."""
    by_name = dict(zip("qkv", given, strict=True))
    names = (node.name.strip("l_")[0] for node in module.graph.find_nodes(op="placeholder"))
    return [by_name[name] for name in names if name in by_name]


@pytest.mark.parametrize("attention", GROUPED)
def test_copies_of_heads_go(attention: Attention) -> None:
    read, plan, module = planned(attention)
    assert list(plan.edited(Edit.GROUP_HEADS)) == list(read.problem.repeated_heads) == ["scaled_dot_product_attention"]
    assert "enable_gqa = True" in module.code and "expand" not in module.code
    given = inputs()
    got, want = (torch.utils._pytree.tree_leaves(each) for each in (module(*places(module, given)), attention(*given)))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("attention", GROUPED)
def test_results_are_those_of_the_copies_bit_by_bit(attention: Attention) -> None:
    grouped, copied = (planned(attention, device)[2] for device in ("cuda", "cpu"))
    for one, other in zip(*(torch.utils._pytree.tree_leaves(m(*places(m, inputs()))) for m in (grouped, copied)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("attention", KEPT)
def test_what_is_no_copy_for_a_group_or_is_read_elsewhere_stays(attention: Attention) -> None:
    _, plan, module = planned(attention)
    assert not plan.edited(Edit.GROUP_HEADS) and "enable_gqa" not in module.code


@pytest.mark.parametrize("device, name", [("cpu", ""), ("cuda", "t4"), ("cuda", "v100")])
def test_only_where_flash_attention_is(device: str, name: str) -> None:
    _, plan, _ = planned(as_transformers, device, planned_for=named_device(name) if name else None)
    assert not plan.edited(Edit.GROUP_HEADS)


def test_a_plan_that_keeps_the_mask_or_the_copies_is_followed() -> None:
    read, plan, _ = planned(causal_mask)
    assert plan.edited(Edit.GROUP_HEADS)
    for what in (Edit.DROP_CAUSAL_MASK, Edit.GROUP_HEADS):
        edits = tuple(replace(edit, on=edit.what is not what) for edit in plan.edits)
        read.know(given=replace(plan, edits=edits))
        assert not plan_region(read.problem).edited(Edit.GROUP_HEADS)


def test_gradients_of_groups_cross_the_border_of_a_loss_scale() -> None:
    _, plan, module = planned(returned, scale_loss=True)
    assert plan.edited(Edit.GROUP_HEADS) and plan.scales_loss
    found = []
    for scale in (1.0, 16.0):
        given = [x.requires_grad_() for x in inputs()]
        scales = torch.tensor(scale), torch.tensor(1 / scale)
        (result, _) = module(*places(module, given), *scales)
        result.square().sum().backward()
        found.append([x.grad for x in given])
    want = [x.requires_grad_() for x in inputs()]
    returned(*want)[0].square().sum().backward()
    for one, scaled, true in zip(*found, (x.grad for x in want), strict=True):
        assert torch.equal(one, scaled)
        assert (one - true).norm() <= 0.02 * true.norm()
