"""In fp16 a graph is looked at in fp32 before its first calls. Nobody sees it: state, random numbers, inputs, gradients, other modes."""

from __future__ import annotations

import copy
import functools
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from runtime_help import BatchMean
from torch import Tensor, nn
from torch._higher_order_ops import map as map_op
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import amprewrite
from amprewrite.graphs.fx.run.observer import Observer
from amprewrite.runtime.captured import look_ahead
from amprewrite.runtime.captured.look_ahead import CALLS, LookAhead
from amprewrite.runtime.compiler import sizes


class Stateful(nn.Module):
    """Running statistics, dropout, a cache that it is given and writes, a counter, and its own random numbers."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.drop, self.down = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 16)
        self.checkpoints = checkpoints
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("kept", torch.zeros(8, 16))

    def body(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.norm(self.up(x)))))

    def forward(self, x: Tensor, cache: Tensor, at: int) -> Tensor:
        self.calls.add_(1)
        cache[at] = x.detach()
        self.kept.lerp_(x.detach(), 0.5)
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return x + torch.rand_like(x) + cache.mean(0)


def ran(amp: nn.Module, grad: bool, calls: int = CALLS + 1) -> list[Any]:
    """All that a loop sees of some calls: results, gradients, state, what it gave, FLOPs, what generators give next."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    cache, seen = torch.zeros(8, 8, 16), []
    for index in range(calls):
        x = torch.randn(8, 16).requires_grad_(grad)
        with torch.set_grad_enabled(grad), FlopCounterMode(display=False) as flops:
            result = amp(x, cache, index)
            if grad:
                result.square().mean().backward()
        seen += [result.detach(), x.grad, flops.get_total_flops(), random.random(), np.random.rand(), torch.rand(2)]
    return [*seen, cache, *amp.state_dict().values(), *(p.grad for p in amp.parameters())]


@pytest.mark.parametrize("granularity", ["model", ["up", "down"]], ids=["model", "parts"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_look_changes_nothing_that_a_loop_sees(checkpoints, grad, granularity, monkeypatch):
    looks = []
    look = LookAhead.look
    monkeypatch.setattr(LookAhead, "look", lambda self, *args: looks.append(self) or look(self, *args))
    model = Stateful(checkpoints)
    with_looks = ran(amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", granularity=granularity), grad)
    assert len(looks) >= CALLS
    monkeypatch.setattr(LookAhead, "look", lambda *_: False)
    without = ran(amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", granularity=granularity), grad)
    assert len(with_looks) == len(without)
    for got, want in zip(with_looks, without, strict=True):
        assert torch.equal(got, want) if isinstance(want, Tensor) else got == want


def test_only_what_a_graph_writes_is_copied(monkeypatch):
    copied = []
    copies = LookAhead._copies

    def seen(self: LookAhead, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        made = copies(self, inputs)
        copied.append([a.shape for a, b in zip(made, inputs, strict=True) if isinstance(a, Tensor) and a.data_ptr() != b.data_ptr()])
        return made

    monkeypatch.setattr(LookAhead, "_copies", seen)
    ran(amprewrite.rewrite(Stateful(), dtype="fp16"), grad=True, calls=1)
    written = [(), (8, 8, 16), (8, 16), (32,), (32,), ()]  # the counter, the cache, what is kept, and statistics of the norm
    assert [sorted(map(tuple, each)) for each in copied] == [sorted(written)]


def test_where_there_is_no_memory_for_a_look_the_call_runs_and_says_so(monkeypatch):
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Observer, "__call__", full)
    amp = amprewrite.rewrite(nn.Linear(8, 8), dtype="fp16")
    with pytest.warns(amprewrite.AmpRewriteWarning, match="was not looked at before it runs in fp16"):
        amp(torch.randn(2, 8))
    with pytest.raises(amprewrite.CaptureError, match="there is no memory"):
        amprewrite.rewrite(nn.Linear(8, 8), dtype="fp16", strict=True)(torch.randn(2, 8))


class Refused(Observer):
    def __call__(self, *_: object) -> None:
        raise NotImplementedError("no kernel")


def test_a_look_that_raises_leaves_the_call_as_it_is_and_says_so(monkeypatch):
    monkeypatch.setattr(look_ahead, "Observer", Refused)
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16")
    with pytest.warns(amprewrite.AmpRewriteWarning, match="was not looked at .* it raises NotImplementedError: no kernel") as said:
        for _ in range(CALLS):
            torch.testing.assert_close(amp(x), model(x), rtol=2e-3, atol=2e-3)
    assert len(said) == 1, "one warning for all calls"
    with pytest.raises(amprewrite.CaptureError, match="was not looked at"):
        amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", strict=True)(x)


@pytest.mark.parametrize("strict", [True, False])
def test_a_call_that_the_model_refuses_raises_its_own_error_alone(strict):
    amp = amprewrite.rewrite(nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8)), dtype="fp16", strict=strict)
    with warnings.catch_warnings():
        warnings.simplefilter("error", amprewrite.AmpRewriteWarning)
        with pytest.raises(IndexError, match="index out of range"):
            amp(torch.tensor([1, 9]))


def test_tensors_without_values_are_not_looked_at():
    amp = amprewrite.rewrite(nn.Linear(8, 8, device="meta"), dtype="fp16", strict=True)
    assert amp(torch.empty(2, 8, device="meta")).shape == (2, 8)


class Pauses(nn.Module):
    """Turns gradients off for some of its code, and on again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            still = self.linear(x)
        return self.linear(x).square() + still


def test_a_look_saves_nothing_for_backward_where_the_graph_turns_gradients_on():
    """Saved tensors reached the hooks around the call: a checkpoint counted more of them in the forward than in the recomputation."""
    model, x, found = Pauses(), torch.randn(4, 8), []
    for net in (model, amprewrite.rewrite(copy.deepcopy(model), dtype="fp16")):
        given = x.clone().requires_grad_()
        checkpoint(net, given, use_reentrant=False).sum().backward()
        found.append(given.grad)
    torch.testing.assert_close(found[1], found[0], rtol=5e-3, atol=5e-3)


class Rows(nn.Module):
    """Overflows in the body of a map, and an op after it refuses NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chance = map_op(lambda row: functional.linear(row * 2.0**17, self.linear.weight) * 2.0**-17, x).sigmoid()
        return functional.binary_cross_entropy(chance, torch.ones_like(chance))


class HidesItsLoop(nn.Module):
    """Products in a loop overflow in fp16, to infinities without NaN. The rest of the graph makes finite numbers of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = map_op(lambda row: functional.linear(row * 2.0**15, 9 * self.layer.weight) * 2.0**-15, x)
        if self.how == "clamps them":
            return self.layer(x) * rows.clamp(-9, 9)
        unread = rows.clone()
        unread[0].add_(1)
        return self.layer(x) * (rows > 0)


@pytest.mark.parametrize("how", ["clamps them", "reads signs"])
def test_an_overflow_in_a_loop_is_found_where_the_graph_hides_it(how: str):
    torch.manual_seed(0)
    model, x = HidesItsLoop(how), torch.randn(4, 8).clamp(-1.9, 1.9).requires_grad_()
    exact = torch.autograd.grad(model(x).square().sum(), model.layer.weight)[0]
    amp = amprewrite.rewrite(model, dtype="fp16")
    assert (amp(x) - model(x)).norm() < 0.01 * model(x).norm()
    amp(x).square().sum().backward()
    assert (model.layer.weight.grad - exact).norm() < 0.01 * exact.norm()


class HidesItsBranch(nn.Module):
    """As `HidesItsLoop`, in a branch of a condition, which inductor compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scaled = functools.partial(functional.linear, weight=9 * self.layer.weight)
        rows = torch.cond(x.sum() > -99, lambda rows: scaled(rows * 2.0**15) * 2.0**-15, lambda rows: rows + 1, (x,))
        return self.layer(x) * rows.clamp(-9, 9)


@pytest.mark.long
@pytest.mark.parametrize("grad", [True, False])
def test_with_a_compiler_bodies_stay_fp32_because_their_results_cannot_be_seen(grad: bool):
    torch.manual_seed(0)
    model, x = HidesItsBranch(), torch.randn(4, 8).clamp(-1.9, 1.9)
    with torch.set_grad_enabled(grad):
        amp = amprewrite.rewrite(model, dtype="fp16", backend="inductor")
        assert (amp(x) - model(x)).norm() < 0.01 * model(x).norm()
    assert "compiled code does not show" in str(amp.plan)


def test_an_op_that_refuses_what_overflowed_in_a_body_that_is_not_seen():
    model, x = Rows(), torch.randn(4, 8)
    with torch.no_grad():
        got = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16")(x)
        torch.testing.assert_close(got, model(x), rtol=2e-3, atol=2e-3)


class Wide(nn.Module):
    """Its hidden values leave fp16's range at 1,024 values a sum; its result does not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, 8, bias=False)
        with torch.no_grad():
            self.up.weight.fill_(1.0)
            self.down.weight.fill_(1e-6)

    def forward(self, x: Tensor, log: Tensor) -> Tensor:
        log.add_(x.mean())  # with gradients: it could not be undone
        return self.down(self.up(x)) + log


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("width", [128, 1024])
def test_a_call_that_would_overflow_runs_once_and_is_right(width, grad):
    """A write that autograd records could not be undone: this call gave infinities, and the next one was right."""
    model = Wide(width)
    amp, found = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16"), []
    for net in (model, amp):
        x = torch.full((4, width), 100.0).requires_grad_(grad)
        log = torch.zeros(4, 8)
        with warnings.catch_warnings(), torch.set_grad_enabled(grad):
            warnings.simplefilter("error", amprewrite.AmpRewriteWarning)
            found.append((net(x, log), log))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=0)
    assert ("decided anew" in str(amp.plan)) == (width == 1024)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("limit", [1, 64])
def test_a_compiled_graph_that_is_planned_anew_serves_all_sizes(grad: bool, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "RECOMPILE_LIMIT", limit)
    model = BatchMean()
    amp = amprewrite.rewrite(model, dtype="fp16", backend="aot_eager", parity=False)
    with torch.set_grad_enabled(grad):
        for rows, scale in ((16, 1), (24, 1), (32, 1e6), (64, 1), (24, 1), (128, 1)):  # the third call overflows in fp16
            x = scale * torch.randn(rows, 8)
            got, wanted = amp(x), model(x)
            assert (got - wanted).norm() < 0.01 * wanted.norm()
            if grad:
                for mine, exact in zip(*(torch.autograd.grad(y.square().sum(), model.parameters()) for y in (got, wanted)), strict=True):
                    assert (mine - exact).norm() < 0.05 * exact.norm()
    assert "decided anew" in str(amp.plans[-1])


class Guided(nn.Module):
    """A model that reads a float argument, which Dynamo passes as a tensor once it has changed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.down(torch.relu(self.up(x * scale)) * scale) / scale


@pytest.mark.parametrize("grad", [True, False])
def test_a_compiled_graph_that_is_planned_anew_takes_any_float(grad: bool) -> None:
    model = Guided()
    amp = amprewrite.rewrite(model, dtype="fp16", backend="aot_eager", parity=False)
    with torch.set_grad_enabled(grad):
        for scale in (1.0, 2.0, 500.0, 3.0, 600.0):  # the third call overflows in fp16
            x = torch.randn(64, 8)
            got, wanted = amp(x, scale), model(x, scale)
            assert (got - wanted).norm() < 0.01 * wanted.norm()
            if grad:
                got.square().sum().backward()
    assert "decided anew" in str(amp.plans[-1])


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        state[0] = state[-1].clone() * 2
        return functional.linear(x * 2.0**17, self.layer.weight) * 2.0**-17


def test_a_graph_that_is_compiled_anew_keeps_no_input_that_it_writes_for_its_backward() -> None:
    """Compiled for symbolic sizes outside a capture, AOTAutograd would keep the written input to read its sizes in backward."""
    model = WritesItsInput()
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", lists="o2", backend="aot_eager")
    for rows in (2, 3):
        x, state = torch.randn(rows, 4), torch.randn(rows, 4, 4)
        for net in (model, amp):
            net.zero_grad()
            written = state.clone().requires_grad_() + 0
            net(x, written).sum().backward()
        assert torch.allclose(amp.layer.weight.grad, model.layer.weight.grad, rtol=1e-2)
    assert any("decided anew" in note for note in amp.plan.notes + tuple(n for region in amp.plan.regions for n in region.notes))


class KeepsInput(nn.Module):
    """Turns gradients off and on, puts a hook on `x` itself or on a weight, and runs a body in which no value is observed."""

    def __init__(self, of_weight: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.of_weight = nn.Linear(4, 4), of_weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1)
        same = (self.up.weight if self.of_weight else x).contiguous()
        same.register_hook(lambda gradient: gradient * 2)
        return self.up(Cubed.apply(x if self.of_weight else same)) + (same.sum() if self.of_weight else 0)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ torch.eye(4) * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x


@pytest.mark.parametrize("of_weight", [False, True])
def test_the_look_at_bodies_leaves_no_hook_on_what_the_caller_holds(of_weight: bool) -> None:
    plain = KeepsInput(of_weight)
    amp, found = amprewrite.rewrite(copy.deepcopy(plain), dtype="fp16", loss_scale=8), []
    for model in (plain, amp):
        x = torch.ones(2, 4, requires_grad=True)
        for _ in range(CALLS + 1):
            given = x * 1
            given.register_hook(lambda gradient: gradient + 1)
            model(given).sum().backward()
        found.append([x.grad, model.up.weight.grad])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=0)
