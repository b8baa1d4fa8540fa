"""A call that finds its graph again sets and looks at little, and sees all the same what came since the last one."""

from __future__ import annotations

import copy

import pytest
import torch
from runtime_help import data, low, matmul_dtypes, mlp
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from amprewrite import AmpRewriteWarning
from amprewrite.tables.errors import CaptureError


def steady(model: nn.Module) -> nn.Module:
    """Rewritten, and called until nothing is captured any more."""
    amp = low(model)
    with torch.no_grad():
        for _ in range(4):
            amp(data())
    return amp


def hooked(model):
    model.first.register_forward_hook(lambda module, args, result: 2 * result)


def written(model):
    model.first.weight.data.mul_(3)


def replaced(model):
    torch.manual_seed(5)
    model.second = nn.Linear(16, 4)


def patched(model):
    model.first.forward = lambda x: nn.functional.linear(x, model.first.weight)


@pytest.mark.parametrize("change", [hooked, written, replaced, patched])
@torch.no_grad()
def test_a_change_between_two_calls_is_seen(change):
    model = mlp()
    amp, x = steady(copy.deepcopy(model)), data()
    before = amp(x)
    change(amp)
    change(model)
    assert not torch.equal(amp(x), before)
    assert torch.equal(amp(x), low(model)(x))


@pytest.mark.parametrize(
    "call",
    [lambda amp, x: torch.autocast("cpu")(amp)(x), lambda amp, x: make_fx(amp)(x), lambda amp, x: torch.jit.trace(amp, (x,))],
    ids=["autocast", "make_fx", "jit.trace"],
)
def test_what_no_call_may_be_inside_of_is_refused(call):
    amp, x = steady(mlp()), data()
    with torch.no_grad():
        want = amp(x)
        with pytest.raises(CaptureError):
            call(amp, x)
        assert torch.equal(amp(x), want)


@torch.no_grad()
def test_transforms_and_modes_are_seen():
    model = mlp()
    amp, x = steady(copy.deepcopy(model)), data()
    assert matmul_dtypes(amp, x) == {torch.bfloat16}
    with pytest.warns(AmpRewriteWarning, match=r"ran in fp32"):
        assert torch.equal(torch.func.vmap(amp)(x), torch.func.vmap(model)(x))
    assert matmul_dtypes(amp, x) == {torch.bfloat16}


def test_gradients_switched_on_between_two_calls_flow():
    amp, x = steady(mlp()), data()
    assert amp(x).grad_fn is not None
    amp(x).sum().backward()
    assert all(p.grad is not None for p in amp.parameters())


def test_code_that_is_not_captured_runs_under_the_users_settings():
    asked = []

    @torch._dynamo.disable
    def ask(x):
        asked.append(torch._dynamo.config.suppress_errors)
        return x

    class Asks(nn.Sequential):
        def forward(self, x):
            return self[1](ask(self[0](x)))

    with pytest.warns(AmpRewriteWarning, match=r"runs as it is written"):
        steady(Asks(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert asked == [False] * 4
    assert not torch._dynamo.config.suppress_errors
