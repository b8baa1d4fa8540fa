"""Models on several devices in one process; tests/runtime/test_several_devices.py runs this file in a process of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import two_devices
from layouts import LAYOUTS, WIDTH, Halves, error, gradients
from torch import Tensor, nn

import amprewrite

FIRST, SECOND = f"{two_devices.NAME}:0", f"{two_devices.NAME}:1"
ROWS = 16
FORMATS = pytest.mark.parametrize("dtype", ["bf16", "fp16"])
BOUND = {"bf16": 3e-2, "fp16": 4e-3}


@pytest.fixture(scope="module", autouse=True)
def accelerator(tmp_path_factory: pytest.TempPathFactory) -> None:
    two_devices.register(Path(tmp_path_factory.mktemp("two_devices")))


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


EACH = pytest.mark.parametrize("layout", LAYOUTS)
WAYS = pytest.mark.parametrize(
    "options", [{}, {"cache_weights": "step"}, {"cache_weights": False}, {"backend": "aot_eager"}], ids=["", "step", "inside", "compiled"]
)


def data() -> Tensor:
    return torch.randn(ROWS, WIDTH).to(FIRST)


@EACH
@FORMATS
@WAYS
def test_gradients_are_those_of_fp32(layout: Callable[[str, str], nn.Module], dtype: str, options: dict[str, object]) -> None:
    model, x = layout(FIRST, SECOND), data()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = amprewrite.rewrite(model, optimizer=optimizer, dtype=dtype, **options)
    for _ in range(3):
        plain.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        plain.zero_grad()
        out, want = amp(x), plain(x)
        assert out.device == want.device and out.dtype == want.dtype
        out.square().mean().backward()
        want.square().mean().backward()
        assert error(gradients(amp), gradients(plain)) < BOUND[dtype]
        optimizer.step()
    assert any(cast.weight for region in amp.plan.regions for cast in region.casts)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert error(amp(x).cpu(), plain(x).cpu()) < BOUND[dtype]


@EACH
def test_an_overflow_on_one_device_skips_the_step_on_all(layout: Callable[[str, str], nn.Module]) -> None:
    model, x = layout(FIRST, SECOND), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    amp = amprewrite.rewrite(model, optimizer=optimizer, dtype="fp16", loss_scale=amprewrite.DynamicLossScale(init=2.0**14))
    for overflows in (False, True, False):
        optimizer.zero_grad()
        (amp(x).square().mean() * (1e30 if overflows else 1.0)).backward()
        before = [p.detach().cpu().clone() for p in model.parameters()]
        optimizer.step()
        moved = [not torch.equal(old, p.detach().cpu()) for old, p in zip(before, model.parameters(), strict=True)]
        assert not any(moved) if overflows else all(moved)
    report = amp.loss_scale.report()
    assert (report.steps, report.skipped, amp.loss_scale.value) == (3, 1, 2.0**13)


@FORMATS
def test_a_pipeline_by_hand_of_two_rewritten_stages(dtype: str) -> None:
    stages = [nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU()).to(FIRST), nn.Sequential(nn.LayerNorm(64), nn.Linear(64, WIDTH)).to(SECOND)]
    plain, x = copy.deepcopy(stages), data()
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()])
    first, second = (amprewrite.rewrite(stage, optimizer=optimizer, dtype=dtype) for stage in stages)
    second(first(x).to(SECOND)).square().mean().backward()
    plain[1](plain[0](x).to(SECOND)).square().mean().backward()
    assert error(gradients(nn.ModuleList(stages)), gradients(nn.ModuleList(plain))) < BOUND[dtype]


def test_second_derivatives_cross_devices() -> None:
    model, x = Halves(FIRST, SECOND), data()
    plain = copy.deepcopy(model)
    for each in (amprewrite.rewrite(model, dtype="fp16", loss_scale=1024.0), plain):
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(each(given).square().mean(), given, create_graph=True)
        slope.square().sum().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True) if q.grad is not None]
    assert error(torch.cat([got.cpu().flatten() for got, _ in pairs]), torch.cat([want.cpu().flatten() for _, want in pairs])) < 1e-2
