"""`scores = q @ k; scores += bias`: the product runs low and the sum high if nobody reads what the sum was written over.

Small integers, which every format holds: any difference is a wrong graph.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.tables.vocabulary import Colour


class Net(nn.Module):
    def __init__(self, how: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.lin, self.other = how, nn.Linear(4, 4), nn.Linear(4, 4)
        for parameter in self.parameters():
            parameter.data = torch.randint(-2, 3, parameter.shape).float()

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.how(self, x, bias)


def added(y: Tensor, bias: Tensor) -> Tensor:
    y += bias
    return y


def in_part(net: Net, x: Tensor, bias: Tensor) -> Tensor:
    y = net.lin(x)
    part = y[:2]
    part += bias[:2]
    return y * 2


def base_later(net: Net, x: Tensor, bias: Tensor) -> Tensor:
    y = net.lin(x)
    added(y.view(2, 2, 4), bias.view(2, 2, 4))
    return y * 2


def read_before(net: Net, x: Tensor, bias: Tensor) -> Tensor:
    y = net.lin(x)
    z = y * 2
    return added(y, bias) + z


def without_history(net: Net, x: Tensor, bias: Tensor) -> Tensor:
    y = net.lin(x)
    with torch.no_grad():
        y += bias
    return y * 2


def two_names(net: Net, x: Tensor, bias: Tensor) -> Tensor:
    y = net.lin(x)
    return y.add_(bias) + y


def old_name(net: Net, x: Tensor, bias: Tensor) -> Tensor:
    y = net.lin(x)
    y.add_(bias)
    z = y * 2
    y.mul_(2)
    return y + z


def out_of_an_op(net: Net, x: Tensor, bias: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.lin(x)
        torch.add(y, bias, out=y)
        z = y * 2
    return net.other(z)


def kept_view(net: Net, x: Tensor, bias: Tensor) -> Tensor:
    y = net.lin(x)
    z = y.view(2, 2, 4)
    y.add_(bias)
    return z * 2


COPIES: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "a sum": lambda net, x, bias: added(net.lin(x), bias) * 2,
    "a method": lambda net, x, bias: net.lin(x).add_(bias).mul_(2) * 2,
    "a difference": lambda net, x, bias: net.lin(x).sub_(bias, alpha=2) * 2,
    "a view": lambda net, x, bias: added(net.lin(x).view(2, 2, 4), bias.view(2, 2, 4)) * 2,
    "read before": read_before,
    "einsum": lambda net, x, bias: added(torch.einsum("id,jd->ij", net.lin(x), x), bias) * 2,
    "a residual": lambda net, x, bias: net.other(added(net.lin(x), x)),
    "two names": two_names,
    "the old name": old_name,
    "an out argument": out_of_an_op,
    "in a checkpoint": lambda net, x, bias: checkpoint(old_name, net, x, bias, use_reentrant=False),
}
SHARED: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "a part": in_part,
    "what the view is of": base_later,
    "no history": without_history,
    "a view from before": kept_view,
}


def both(
    how: Callable[[Net, Tensor, Tensor], Tensor], dtype: str, **options: object
) -> tuple[list[Tensor], list[Tensor], amprewrite.CastPlan]:
    """What fp32 gives and what a rewritten model with sums held high does: the result and all gradients; and the plan."""
    found, plan = list[list[Tensor]](), None
    for low in (False, True):
        net = Net(how)
        amp = amprewrite.rewrite(net, dtype=dtype, overrides={"add": "high", "sub": "high"}, **options) if low else net
        x = torch.arange(16.0).remainder(5).sub(2).view(4, 4).requires_grad_()
        bias = torch.arange(16.0).remainder(3).sub(1).view(4, 4).requires_grad_()
        result = amp(x, bias)
        result.backward(torch.arange(16.0).remainder(4).view_as(result))
        found.append([result.detach(), *(each.grad for each in (x, bias, *net.parameters()) if each.grad is not None)])
        plan = amp.plan if low else None
    assert plan is not None
    return found[0], found[1], plan


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("how", {**COPIES, **SHARED})
def test_results_and_gradients_are_those_of_fp32(how: str, dtype: str) -> None:
    want, got, plan = both({**COPIES, **SHARED}[how], dtype, lists="autocast")
    assert len(want) == len(got)
    assert all(map(torch.equal, want, got))
    low = {node.op for node in plan.nodes if node.colour is Colour.LOW}
    assert bool(low & {"linear", "einsum"}) == (how in COPIES)


@pytest.mark.parametrize("shape", [(4, 4), (2, 2, 4)])
@pytest.mark.parametrize("alike", [False, True])
def test_a_hook_before_a_write_is_called_where_pytorch_calls_it(shape: tuple[int, ...], alike: bool) -> None:
    def run(net: Net, x: Tensor, bias: Tensor) -> Tensor:
        y = net.lin(x.view(shape))  # on 3 dims the result is a view, and a write to a view drops its hooks
        same = y.contiguous() if alike else y
        same.register_hook(lambda gradient: gradient * 8)
        y.mul_(2)
        return net.other(y)

    want, got, plan = both(run, "bf16", lists="o2")
    assert all(map(torch.equal, want, got))
    assert any(node.op == "linear" and node.colour is Colour.LOW for node in plan.nodes)


def test_a_sum_that_runs_low_is_written_where_the_product_lies() -> None:
    plan = amprewrite.plan(Net(COPIES["a sum"]), (torch.ones(4, 4), torch.ones(4, 4)), dtype="bf16", lists="o2")
    assert not any(cast.value == "linear" and cast.users != ("output",) for cast in plan.regions[0].casts)


@pytest.mark.parametrize("kind", ["module", "checkpoint"])
def test_scores_with_a_bias_are_as_exact_as_under_autocast(kind: str) -> None:
    def scores(net: Net, x: Tensor, bias: Tensor) -> Tensor:
        return F.softmax(added(net.lin(x) @ x.mT, bias).float(), -1) @ x

    def run(net: Net, x: Tensor, bias: Tensor) -> Tensor:
        return scores(net, x, bias) if kind == "module" else checkpoint(scores, net, x, bias, use_reentrant=False)

    net, x, bias = Net(run), torch.randn(4, 4), torch.randn(4, 4)
    want, amp = net(x, bias), amprewrite.rewrite(net, dtype="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        theirs = (net(x, bias) - want).norm()
    assert (amp(x, bias) - want).norm() <= 2 * theirs
    assert "low does 100.0 % of matmul" in str(amp.plan)
