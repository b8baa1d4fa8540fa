"""Selective checkpoints keep the results of some ops: the model's, and none of ours."""

from __future__ import annotations

import warnings

import pytest
import torch
from tiers import long_beyond
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import amprewrite
from amprewrite.tables.vocabulary import Colour

SAVED = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)


def policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def selectively(function, x):
    return checkpoint(function, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))


class Inside(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.factor = factor
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + selectively(block, x * self.factor) / self.factor
        return x


class Whole(Inside):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x * self.factor) / self.factor
        return x


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("factor", [1.0, 1e5])  # the larger overflows fp16 in the first call
@pytest.mark.parametrize("options", [{}, {"cache_weights": "step"}, {"cache_weights": False}, {"pad": "always"}], ids=str)
@pytest.mark.parametrize("inside", long_beyond(1, [True, False]))
def test_gradients_are_those_of_fp32(dtype, factor, options, inside):
    plain = Inside(factor)
    amp = amprewrite.rewrite((Inside if inside else Whole)(factor), dtype=dtype, loss_scale=16.0 if dtype == "fp16" else None, **options)
    optimizer, beside = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in (amp, plain))
    for step in range(3):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", amprewrite.AmpRewriteWarning)
            got = amp(x) if inside else selectively(amp, x)
        plain(x).sin().sum().backward()
        got.sin().sum().backward()
        for ours, theirs in zip(amp.parameters(), plain.parameters(), strict=True):
            assert (ours.grad - theirs.grad).norm() <= (5e-3 if dtype == "fp16" else 4e-2) * theirs.grad.norm()
        for each in (optimizer, beside):
            each.step()
            each.zero_grad()


def test_an_op_inside_a_checkpoint_has_overrides_by_its_name():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False).sum()

    amp = amprewrite.rewrite(Net(), dtype="bf16", overrides={"node:linear": "fp32"})
    amp(torch.randn(64, 64)).backward()
    (kept,) = [node for region in amp.plan.regions for part in region.flat("") for node in part.nodes if node.op == "linear"]
    assert kept.colour is Colour.HIGH
