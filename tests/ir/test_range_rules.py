"""What is added to what, and who reads the sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import amprewrite
from amprewrite.ir.evidence.range_rules import ABOVE, BELOW, Read, handed_on
from amprewrite.tables.formats import FP16
from amprewrite.tables.vocabulary import OpKind


class Smoothed(nn.Module):
    """Scores that are smoothed over time: each step is read twice by the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.bias = nn.Linear(16, 16), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        u = self.scores(x)
        h = u[:, 0] + self.bias
        for t in range(1, x.shape[1]):
            h = h + 0.5 * (u[:, t] - h)
        return h.softmax(-1)


def test_a_long_scan_whose_branches_meet_again_is_read_once() -> None:
    """Looking at every path would take 2**120 steps, and one frame of Python's stack for each op on it."""
    torch.manual_seed(0)
    model, x = Smoothed(), torch.randn(4, 120, 16)
    amp = amprewrite.rewrite(model, dtype="bf16")
    torch.testing.assert_close(amp(x), model(x), rtol=0.05, atol=0.01)
    assert not amp.plan.skipped


def test_a_bound_stops_far_numbers_only_if_no_element_of_it_is_far() -> None:
    def bounded(*lower: float) -> frozenset[int] | None:
        return handed_on(Read("maximum", OpKind.INFER, "made", lower=lower), BELOW, FP16)

    assert bounded(0.0) == bounded(-1.0, 1.0) == frozenset()
    assert bounded(-1e9) == bounded(-1e9, -1e8) == frozenset({BELOW})
    assert bounded(-1e9, 0.0) is None  # where the bound is -1e9, numbers far below the range go through
    assert handed_on(Read("maximum", OpKind.INFER, "made", lower=(0.0,)), ABOVE, FP16) == frozenset({ABOVE})
