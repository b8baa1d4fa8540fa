"""Cross entropy of low logits in parts: the numbers of the whole in fp32, of every order, in less memory."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amprewrite
from amprewrite.passes.lower import split_losses
from amprewrite.passes.lower.split_losses import cross_entropy_of_low

FOLDER = Path(__file__).parents[3] / "examples" / "benchmarks"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few logits are taken in parts, too."""
    monkeypatch.setattr(split_losses, "FROM_BYTES", 0)


def logits_and_targets(rows: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = 4 * torch.randn(rows, classes, generator=generator)
    return logits.to(dtype).requires_grad_(), torch.randint(1, classes, (rows,), generator=generator)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("ignored", [-100, 0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("rows", "classes"), [(1, 9), (7, 50), (1024, 1024), (5000, 33), (33, 30522)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_and_gradient_are_those_of_the_whole(dtype: torch.dtype, rows: int, classes: int, reduction: str, ignored: int) -> None:
    logits, target = logits_and_targets(rows, classes, dtype)
    target[1::3] = ignored
    want = nn.functional.cross_entropy(logits.float(), target, ignore_index=ignored, reduction=reduction)
    given = torch.rand_like(want) + 0.5
    (right,) = torch.autograd.grad(want, logits, given)
    for wide in (None, logits.float()):
        loss = cross_entropy_of_low(logits, target, ignored, reduction, wide)
        (gradient,) = torch.autograd.grad(loss, logits, given)
        assert "InParts" in type(loss.grad_fn).__name__
        assert torch.equal(loss, want) and torch.equal(gradient, right)


@pytest.mark.usefixtures("small")
def test_second_derivatives_are_those_of_the_whole() -> None:
    logits, target = logits_and_targets(20, 40, torch.bfloat16)
    found = []
    for loss in (nn.functional.cross_entropy(logits.float(), target), cross_entropy_of_low(logits, target)):
        (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
        found += torch.autograd.grad(gradient.float().square().sum(), logits)
    assert torch.equal(*found)


class Head(nn.Module):
    """A language model's end: logits of a padded vocabulary, and their loss."""

    def __init__(self, returns: bool, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head = nn.Linear(16, 24), nn.Linear(24, 1001, bias=False)
        self.returns, self.settings = returns, settings

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.head(torch.relu(self.up(x))).float()
        loss = nn.functional.cross_entropy(logits.view(-1, 1001), labels.view(-1), **self.settings)
        return (loss, logits) if self.returns else loss


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 1001, (4, 256), generator=generator)
    labels[:, ::5] = -100
    return torch.randn(4, 256, 16, generator=generator), labels


@pytest.mark.parametrize(("dtype", "returns"), [("bf16", False), ("bf16", True), ("fp16", False)])
def test_a_model_learns_the_same_in_less_memory(dtype: str, returns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    memory = importlib.import_module("memory")
    found = []
    for least in (1 << 40, 0):
        monkeypatch.setattr(split_losses, "FROM_BYTES", least)
        amp = amprewrite.rewrite(Head(returns), dtype=dtype, device="h100", loss_scale=2.0**10 if dtype == "fp16" else None)
        for _ in range(2):
            amp.zero_grad()
            with memory.Live() as live:
                result = amp(*batch())
                loss = result[0] if returns else result
                del result
                loss.backward()
        found.append((live.peak, [loss.detach(), *(p.grad for p in amp.parameters())]))
    (before, want), (after, got) = found
    assert all(map(torch.equal, got, want))
    assert after < (0.85 if returns else 0.75) * before


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("settings", [{"label_smoothing": 0.1}, {"weight": torch.arange(1001.0)}], ids=["smoothing", "weights"])
def test_other_losses_stay_whole(settings: dict[str, Any]) -> None:
    plain, amp = Head(False, **settings), amprewrite.rewrite(Head(False, **settings), dtype="bf16")
    for _ in range(2):
        loss = amp(*batch())
    assert "InParts" not in type(loss.grad_fn).__name__
    assert (loss - plain(*batch())).abs() < 2e-2 * loss


@pytest.mark.usefixtures("small")
def test_logits_that_are_written_stay_whole() -> None:
    class Writes(Head):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(torch.relu(self.up(x)))
            wide = logits.float().view(-1, 1001)
            logits.zero_()
            return nn.functional.cross_entropy(wide, labels.view(-1)) + logits.sum()

    plain, amp = Writes(False), amprewrite.rewrite(Writes(False), dtype="bf16")
    assert (amp(*batch()) - plain(*batch())).abs() < 2e-2 * plain(*batch())
