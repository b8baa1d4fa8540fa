"""A CPU's bf16 convolution whose weights meet padding alone has gradients of all weights: it is padded by an op of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amprewrite
from amprewrite.tables.vocabulary import Colour, Edit, Reason

BARE = [
    (nn.Conv2d, (3, 2, 1), 1),
    (nn.Conv2d, (3, 3, 1), 2),
    (nn.Conv2d, (5, 2, 2), 1),
    (nn.Conv2d, (2, 2, 1), 1),
    (nn.Conv2d, (3, 4, 1), 3),
    (nn.Conv1d, (3, 2, 1), 1),
    (nn.Conv3d, (3, 2, 1), 1),
    (nn.Conv3d, (3, 1, 1), 2),
]
CUT_OFF = [(nn.ConvTranspose2d, (3, 2, 1), 1), (nn.ConvTranspose1d, (3, 2, 2), 2)]
"""Transposed ones whose weights make only what padding takes away."""
WHOLE = [(nn.Conv2d, (3, 1, 1), 1), (nn.Conv2d, (3, 2, 1), 4), (nn.Conv1d, (2, 2, 0), 2), (nn.Conv3d, (3, 2, 1), 4)]


def net_and_input(kind: type[nn.Module], settings: tuple[int, int, int], size: int) -> tuple[nn.Sequential, Tensor]:
    kernel, stride, padding = settings
    torch.manual_seed(0)
    net = nn.Sequential(kind(16, 16, kernel, stride=stride, padding=padding), nn.Flatten())  # type: ignore[call-arg]
    dims = int(kind.__name__[-2])
    return net, torch.randn(2, 16, *[size] * dims)


def spoil() -> None:
    """Leave NaN in memory that the allocator gives out next."""
    for numel in (256, 768, 1280, 2304, 6400, 6912, 20736):
        kept = [torch.full((numel,), torch.nan, dtype=dtype) for dtype in (torch.bfloat16, torch.float32) for _ in range(4)]
        del kept


@pytest.mark.parametrize(("kind", "settings", "size"), BARE + CUT_OFF + WHOLE)
def test_gradients_are_those_of_fp32(kind: type[nn.Module], settings: tuple[int, int, int], size: int) -> None:
    net, x = net_and_input(kind, settings, size)
    amp = amprewrite.rewrite(net, dtype="bf16")
    for _ in range(3):
        found = []
        for each in (net, amp):
            net.zero_grad()
            spoil()
            each(x).square().sum().backward()
            found.append(net[0].weight.grad.clone())
        assert (found[1] - found[0]).norm() <= 2e-2 * found[0].norm()


@pytest.mark.parametrize(("kind", "settings", "size"), BARE + WHOLE)
def test_all_run_low_and_the_plan_says_which_are_padded_apart(kind: type[nn.Module], settings: tuple[int, int, int], size: int) -> None:
    net, x = net_and_input(kind, settings, size)
    plan = amprewrite.plan(net, (x,), dtype="bf16")
    (node,) = (each for each in plan.nodes if each.flops)
    apart = (kind, settings, size) in BARE
    assert node.colour is Colour.LOW
    assert plan.regions[0].edited(Edit.PAD_APART) == ({node.name: Edit.PAD_APART} if apart else {})
    assert ("padded by an op of its own" in str(plan)) == apart


@pytest.mark.parametrize(("kind", "settings", "size"), CUT_OFF)
def test_a_transposed_one_stays_fp32(kind: type[nn.Module], settings: tuple[int, int, int], size: int) -> None:
    net, x = net_and_input(kind, settings, size)
    (node,) = (each for each in amprewrite.plan(net, (x,), dtype="bf16").nodes if each.flops)
    assert (node.colour, node.reason) == (Colour.HIGH, Reason.UNSET)


def test_settings_by_name_and_for_each_dim_are_read() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(16, 16, 3, 1))

        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(input=x, weight=self.weight, padding=(1, 0), stride=(2, 1))

    net, x = Named(), torch.randn(2, 16, 1, 4)
    amp = amprewrite.rewrite(net, dtype="bf16")
    found = []
    for each in (net, amp):
        net.zero_grad()
        spoil()
        result = each(x)
        result.square().sum().backward()
        found.append((result.detach(), net.weight.grad.clone()))
    assert amp.plan.regions[0].edited(Edit.PAD_APART)
    for want, got in zip(*found, strict=True):
        assert (got - want).norm() <= 2e-2 * want.norm()


@pytest.mark.parametrize(("kernel", "dilation"), [(2, 2), (2, 1), (3, 1)])
def test_padding_by_name_is_read(kernel: int, dilation: int) -> None:
    """In three dims a kernel that is wider than the input has unset gradients, with padding="same" as well; an odd reach pads unevenly."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv3d(16, 16, kernel, dilation=dilation, padding="same"), nn.Flatten()), torch.randn(2, 16, 1, 1, 1)
    amp, found = amprewrite.rewrite(net, dtype="bf16"), []
    torch.use_deterministic_algorithms(True)  # memory is filled with NaN then, before ops write to it
    try:
        for each in (net, amp):
            net.zero_grad()
            result = each(x)
            result.square().sum().backward()
            found.append((result.detach(), net[0].weight.grad.clone()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert amp.plan.regions[0].edited(Edit.PAD_APART)
    for want, got in zip(*found, strict=True):
        assert (got - want).norm() <= 2e-2 * want.norm()


def test_other_formats_and_inference_are_left_alone() -> None:
    net, x = net_and_input(*BARE[0])
    assert not amprewrite.plan(net, (x,), dtype="fp16").regions[0].edited(Edit.PAD_APART)
    amp = amprewrite.rewrite(net.eval(), dtype="bf16", parity=False)
    with torch.no_grad():
        amp(x)
    assert not amp.plan.regions[0].edited(Edit.PAD_APART)
