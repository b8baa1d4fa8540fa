"""Calls that compute nothing are not warned of: modules without a tensor op, and calls on the meta device, which ask for shapes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import amprewrite
from amprewrite import AmpRewriteWarning


class Hands(nn.Module):
    """Puts what it is given into something else."""

    def forward(self, x: Tensor) -> Any:
        return {"x": [x], "rows": len(x)}


class Rows(nn.Module):
    def forward(self, x: Tensor) -> int:
        return len(x)


class Parts(nn.Module):
    """A method that calls a part which computes nothing, as timm's `forward_intermediates` does."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(64, 64), part

    def features(self, x: Tensor) -> Any:
        return self.part(self.linear(x))

    forward = features


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpRewriteWarning)
        yield


@pytest.mark.parametrize("part", [nn.Identity(), nn.Dropout(0.5), Hands(), Rows()], ids=lambda part: type(part).__name__)
@pytest.mark.parametrize("whole", [True, False])
def test_what_computes_nothing_is_not_warned_of(part: nn.Module, whole: bool) -> None:
    x, amp = torch.randn(1024, 64), amprewrite.rewrite(part if whole else Parts(part), dtype="bf16").eval()
    for _ in range(4):
        amp(x) if whole else amp.features(x)
    assert not amp.plan.skipped if whole else amp.plan.nodes


class Disabled(nn.Linear):
    """Computes in a function that Dynamo must not read, and not around it."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_is_disabled_for_dynamo_is_warned_of(whole: bool, dtype: str) -> None:
    x, part = torch.randn(64, 64), Disabled(64, 64)
    amp = amprewrite.rewrite(part if whole else Parts(part), dtype=dtype)
    with pytest.warns(AmpRewriteWarning, match="ran in fp32"):
        amp(x) if whole else amp.part(x)
    for _ in range(3):
        amp(x) if whole else amp.part(x)
    assert amp.plan.skipped


class Switched(nn.Module):
    """Computes in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.training else x


def test_a_mode_that_computes_is_captured_after_one_that_does_not() -> None:
    model, x = Switched(), torch.randn(1024, 64)
    amp = amprewrite.rewrite(model, dtype="bf16").eval()
    for _ in range(4):
        assert amp(x) is x
    amp.train()
    got, wanted = amp(x), model.train()(x)
    assert 0 < (got - wanted).norm() < 0.01 * wanted.norm()
    assert [node.colour.value for node in amp.plan.nodes if node.op == "linear"] == ["low"]


@pytest.mark.parametrize("given", [lambda x: (x,), lambda x: ([x, x],), lambda x: ({"x": x},)], ids=["tensor", "list", "dict"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_calls_for_shapes_are_not_captured(dtype: str, given: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Any) -> Tensor:
            x = x["x"] if isinstance(x, dict) else x[0] if isinstance(x, list) else x
            y = nn.functional.linear(x, self.linear.weight.to(x.device))
            return torch.nn.Parameter(y) if x.is_meta else y  # capture cannot read it, and would warn

    amp = amprewrite.rewrite(Net(), dtype=dtype)
    counters.clear()
    for rows in (2, 3, 1024):
        out = amp(*given(torch.empty(rows, 64, device="meta")))
        assert out.is_meta and out.shape == (rows, 64) and out.dtype == torch.float32
    assert not counters["stats"]["unique_graphs"] and not counters["frames"]
    amp(*given(torch.randn(2, 64)))
    assert counters["stats"]["unique_graphs"] == 1 and not amp.plan.skipped


def test_a_model_on_the_meta_device_is_planned() -> None:
    with torch.device("meta"):
        plan = amprewrite.plan(Switched(), (torch.empty(1024, 64),), dtype="bf16", device="a100")
    assert [node.colour.value for node in plan.nodes if node.op == "linear"] == ["low"]
