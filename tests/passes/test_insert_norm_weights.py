"""Norms without weights on a CPU: as close as one rounding, and the graph of others stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite


class Normed(nn.Module):
    """A convolution whose result lies far from zero, and a norm."""

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(4, 16, 3), norm
        nn.init.constant_(self.conv.bias, 5.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def weights_norm(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, None, None, True, 0.0, 1e-6)


NORMS = [
    pytest.param(nn.InstanceNorm2d(16), id="InstanceNorm2d"),
    pytest.param(nn.BatchNorm2d(16, affine=False, track_running_stats=False), id="BatchNorm2d"),
    pytest.param(weights_norm, id="positional"),
    pytest.param(lambda x: F.instance_norm(input=x), id="by name"),
]


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("norm", NORMS)
def test_statistics_stay_fp32(norm: Callable[[Tensor], Tensor], dtype: str) -> None:
    model = Normed(norm)
    amp = amprewrite.rewrite(model, dtype=dtype, pad=False)
    low = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])
    for size in (8, 11, 12):  # the last ones in a graph whose sizes change
        x = torch.randn(2, 4, size, size)
        made = F.conv2d(x.to(low), model.conv.weight.to(low), model.conv.bias.to(low))
        want = norm(made.float())  # all that is lost after the convolution is the rounding of the result
        got = amp(x)
        assert got.dtype == torch.float32
        assert error(got, want) < 1.2 * error(want.to(low).float(), want)
    (got * torch.randn_like(got)).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    colours = {node.colour.value for region in amp.plan.regions for node in region.nodes if "norm" in node.op}
    assert colours == {"low"}


@pytest.mark.parametrize(
    "norm",
    [
        pytest.param(nn.InstanceNorm2d(16, affine=True), id="weights"),
        pytest.param(nn.BatchNorm2d(16, affine=False), id="running statistics"),
        pytest.param(nn.GroupNorm(4, 16), id="another norm"),
    ],
)
def test_others_stay_as_they_are(norm: nn.Module) -> None:
    amp = amprewrite.rewrite(Normed(norm), dtype="bf16")
    x = torch.randn(2, 4, 8, 8)
    made: list[str] = []
    backend = amprewrite.rewrite(Normed(norm), dtype="bf16", backend=lambda module, _: made.append(module.code) or module.forward)
    torch.testing.assert_close(amp(x), backend(x))
    assert made and "new_ones" not in made[0]
