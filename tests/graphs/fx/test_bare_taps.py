"""A CPU's bf16 backward of a convolution whose weights meet padding alone leaves their gradients unset: it stays fp32, and says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import amprewrite
from amprewrite.tables.vocabulary import Colour, Reason

BARE = [
    (nn.Conv2d, (3, 2, 1), 1),
    (nn.Conv2d, (3, 3, 1), 2),
    (nn.Conv2d, (5, 2, 2), 1),
    (nn.Conv2d, (2, 2, 1), 1),
    (nn.Conv2d, (3, 4, 1), 3),
    (nn.Conv1d, (3, 2, 1), 1),
    (nn.Conv3d, (3, 2, 1), 1),
    (nn.Conv3d, (3, 1, 1), 2),
    (nn.ConvTranspose2d, (3, 2, 1), 1),
    (nn.ConvTranspose1d, (3, 2, 2), 2),
]
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


@pytest.mark.parametrize(("kind", "settings", "size"), BARE + WHOLE)
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


@pytest.mark.parametrize(("kind", "settings", "size"), BARE)
def test_the_plan_says_so(kind: type[nn.Module], settings: tuple[int, int, int], size: int) -> None:
    net, x = net_and_input(kind, settings, size)
    node = next(each for each in amprewrite.plan(net, (x,), dtype="bf16").nodes if each.flops)
    assert (node.colour, node.reason) == (Colour.HIGH, Reason.UNSET)
    assert "meet padding alone" in str(amprewrite.plan(net, (x,), dtype="bf16"))


@pytest.mark.parametrize(("kind", "settings", "size"), WHOLE)
def test_other_convolutions_run_low(kind: type[nn.Module], settings: tuple[int, int, int], size: int) -> None:
    net, x = net_and_input(kind, settings, size)
    assert all(each.colour is Colour.LOW for each in amprewrite.plan(net, (x,), dtype="bf16").nodes if each.flops)


def test_other_formats_and_inference_do() -> None:
    net, x = net_and_input(*BARE[0])
    assert all(each.reason is not Reason.UNSET for each in amprewrite.plan(net, (x,), dtype="fp16").nodes)
    amp = amprewrite.rewrite(net.eval(), dtype="bf16", parity=False)
    with torch.no_grad():
        amp(x)
    assert all(each.reason is not Reason.UNSET for each in amp.plan.nodes)
