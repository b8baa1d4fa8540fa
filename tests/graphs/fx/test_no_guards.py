"""Reading, deciding and editing a graph with sizes that change makes no guard: a plan holds for all sizes that the capture holds for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from amprewrite.graphs.fx.node_facts import example_value, tensors
from amprewrite.ir.policies.policy import Policy
from amprewrite.passes.driver import read_problem, rewrite_graph
from amprewrite.tables.formats import BF16

LAYER = nn.Linear(8, 8)


def norm_by_hand(x: Tensor) -> Tensor:
    x = LAYER(x)
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * LAYER.bias + LAYER.bias


def many_steps(x: Tensor) -> Tensor:
    for _ in range(12):
        x = LAYER.bias + x + 0.05 * LAYER(x).mean(0, keepdim=True).expand_as(x)
    return x


def parts(x: Tensor) -> Tensor:
    h = LAYER(x)
    return h[: h.shape[0] // 2].reshape(-1, 8).sum() + h[:, 3:].flatten(0, 1).sum()


def attention(x: Tensor) -> Tensor:
    heads = LAYER(x).unflatten(-1, (2, 4)).transpose(1, 2)
    many = heads[:, :, None].expand(-1, -1, 3, -1, -1).reshape(x.shape[0], 6, x.shape[1], 4)
    return torch.nn.functional.scaled_dot_product_attention(torch.cat([heads] * 3, 1), many, many)


def residuals(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + torch.relu(LAYER(x)).reshape(x.shape)
    return x.flatten(0, 1).softmax(-1)


@pytest.mark.parametrize("made", [norm_by_hand, many_steps, parts, attention, residuals])
def test_no_pass_makes_a_guard(made: Callable[[Tensor], Tensor]) -> None:
    found: list[tuple[list[str], list[str]]] = []

    def keep(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        values = [t for node in module.graph.nodes for t in tensors(example_value(node)) if isinstance(t, FakeTensor)]
        env = values[0].fake_mode.shape_env
        assert env is not None and any(isinstance(size, torch.SymInt) for t in values for size in t.shape)
        before = [str(guard.expr) for guard in env.guards]
        rewrite_graph(read_problem(module, Policy(BF16, may_decline=False), fold_masks="any", training=True))
        found.append((before, [str(guard.expr) for guard in env.guards]))
        return module.forward

    x = torch.randn(8, 8, 8)  # all sizes alike, so that one compared with another is taken for it
    torch._dynamo.mark_dynamic(x, [0, 1])
    torch._dynamo.reset()
    torch.compile(made, backend=keep, fullgraph=True)(x)
    before, after = found[0]
    assert after == before
