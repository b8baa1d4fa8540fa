"""Ops that take low operands on fake tensors and refuse them in the first real call: right results, kept high, told once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite import AmpRewriteWarning
from amprewrite.tables.errors import PlanError
from amprewrite.tables.ops import op_lists
from amprewrite.tables.vocabulary import Colour, Reason

CALLS: list[torch.dtype] = []
"""Dtypes that the custom op was called with."""


@torch.library.custom_op("refusing::mix", mutates_args=())
def mix(x: Tensor, weight: Tensor) -> Tensor:
    CALLS.append(x.dtype)
    if x.dtype != torch.float32:
        raise NotImplementedError(f'"mix" not implemented for {x.dtype}')
    return x @ weight.t()


@mix.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    return gradient @ weight, gradient.t() @ x


mix.register_autograd(_backward, setup_context=_setup)


class Model(nn.Module):
    """Counts its calls in a buffer, which the graph writes before the op that refuses."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.mixed, self.down = nn.Linear(64, 128), nn.Linear(128, 128, bias=False), nn.Linear(128, 64)
        self.register_buffer("count", torch.zeros(()))
        self.recompute = recompute

    def inner(self, x: Tensor) -> Tensor:
        return self.down(mix(F.gelu(self.up(x)), self.mixed.weight))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)


@pytest.fixture(autouse=True)
def wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that say of a kernel that it is there."""
    torch._dynamo.reset()
    CALLS.clear()
    for name, row in {"refusing::mix": op_lists.OPS["matmul"], "avg_pool3d": op_lists.OPS["avg_pool3d"]}.items():
        wrong = replace(row, name=name, no_kernel=frozenset())
        monkeypatch.setitem(op_lists.OPS, name, wrong)
        monkeypatch.setitem(op_lists._BY_WORD, name, wrong)


def rewritten(model: nn.Module, **options: Any) -> Any:
    lists = amprewrite.OpLists.from_sets("mine", allow=["linear", "refusing::mix", "avg_pool3d"], clear=["gelu", "view", "flatten"])
    return amprewrite.rewrite(model, lists=lists, **options)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_custom_op_that_refuses_runs_in_fp32_and_says_so(dtype: str, recompute: bool, backend: str) -> None:
    model, plain, x = Model(recompute), Model(recompute), torch.randn(1024, 64)
    amp = rewritten(model, dtype=dtype, backend=backend)
    with pytest.warns(AmpRewriteWarning, match=rf"refusing::mix refused {dtype} operands \(NotImplementedError.*stays fp32") as told:
        out = amp(x)
    assert len(told) == 1
    want = plain(x)
    assert (out - want).norm() < 2e-2 * want.norm()
    assert float(model.count) == 1
    out.square().mean().backward()
    want.square().mean().backward()
    for got, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert (got.grad - right.grad).norm() < 3e-2 * right.grad.norm()
    CALLS.clear()
    amp(x)
    assert set(CALLS) == {torch.float32} and float(model.count) == 2
    node = next(n for region in amp.plan.regions for n in region.nodes if n.op == "refusing::mix")
    assert (node.colour, node.reason) == (Colour.HIGH, Reason.REFUSED) and "not implemented" in node.detail


def test_a_custom_op_takes_an_override_by_its_name() -> None:
    amp = rewritten(Model(False), dtype="bf16", overrides={"refusing::mix": "deny"})
    amp(torch.randn(1024, 64))
    assert set(CALLS) == {torch.float32} and Reason.ON_DENYLIST in {node.reason for node in amp.plan.nodes if node.op == "refusing::mix"}


class Pooled(nn.Module):
    """A pool whose low kernel a CPU lacks, between two products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 512), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.avg_pool3d(self.up(x).view(-1, 1, 8, 8, 8), 2).flatten(1))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_kernel_that_a_row_does_not_know_to_be_missing(dtype: str) -> None:
    model, plain, x = Pooled(), Pooled(), torch.randn(1024, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = rewritten(model, dtype=dtype, optimizer=optimizer)
    with pytest.warns(AmpRewriteWarning, match=f"avg_pool3d refused {dtype} operands"):
        out = amp(x)
    want = plain(x)
    assert (out - want).norm() < 2e-2 * want.norm()
    amp(x).square().mean().backward()
    want.square().mean().backward()
    assert (model.up.weight.grad - plain.up.weight.grad).norm() < 3e-2 * plain.up.weight.grad.norm()
    assert {n.reason for region in amp.plan.regions for n in region.nodes if n.op == "avg_pool3d"} == {Reason.REFUSED}
    model.eval()
    with torch.no_grad():
        assert (amp(x) - plain(x)).norm() < 2e-2 * want.norm(), "another graph finds it out for itself, and says nothing again"


def test_an_error_of_the_models_own_is_raised_as_it_is() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, index: Tensor) -> Tensor:
            return self.layer(x).index_select(0, index)

    amp = rewritten(Broken(), dtype="bf16")
    with pytest.raises(IndexError, match="out of range"):
        amp(torch.randn(4, 8), torch.tensor([7]))


def test_a_given_plan_that_cannot_run_is_an_error() -> None:
    model, x = Pooled(), torch.randn(16, 64)
    amp = rewritten(model, dtype="bf16")
    with pytest.warns(AmpRewriteWarning, match="avg_pool3d refused"):
        amp(x)
    plan = amp.plan.edit({"avg_pool3d": "low"})
    torch._dynamo.reset()
    with pytest.raises(PlanError, match=r"avg_pool3d refused.*colour it high"):
        amprewrite.rewrite(Pooled(), plan=plan)(x)


def test_an_op_without_a_colour_gets_fp32_operands_in_each_run() -> None:
    """Its result is complex, so that the plan has no format for it. PyTorch refuses the bf16 operand that the model makes itself."""
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(linear(x).bfloat16(), x).abs()

    amp = amprewrite.rewrite(Net(), dtype="bf16")
    with pytest.warns(AmpRewriteWarning, match="complex refused"):
        first = amp(x)
    assert torch.equal(first, amp(x)) and torch.allclose(first, torch.complex(linear(x), x).abs(), atol=0.02)
