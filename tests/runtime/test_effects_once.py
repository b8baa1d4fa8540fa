"""Code that Dynamo fails on runs as written, in place: no effect of a call happens twice, wherever the failure stands."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from runtime_help import data, matmul_dtypes
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from versions import differs_in_2_11

import amprewrite
from amprewrite.runtime import session
from amprewrite.tables.errors import AmpRewriteWarning, CaptureError, PlanError

STEPS = ("fail", "break", "part", "count", "list", "write", "draw")


def fails(x: torch.Tensor) -> torch.Tensor:
    """Dynamo reads this range wrongly and fails; run as written it turns x over twice."""
    return x.permute(*range(x.dim())[::-1]).permute(*range(x.dim())[::-1])


class Steps(nn.Module):
    """Does what its steps say, each at most once in a forward, with effects that can be counted."""

    def __init__(self, steps: tuple[str, ...], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.steps, self.inner = steps, inner
        self.linear, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for step in self.steps:
            y = getattr(self, f"do_{step}")(x, y)
        return self.last(y)

    def do_fail(self, x, y):
        return fails(y)

    def do_break(self, x, y):
        torch._dynamo.graph_break()
        return y

    def do_part(self, x, y):
        return y if self.inner is None else self.inner(y.clone())

    def do_checkpoint(self, x, y):
        return checkpoint(self.inner, y, use_reentrant=False)

    def do_count(self, x, y):
        self.count += 1
        return y

    def do_list(self, x, y):
        self.seen.append(len(self.seen))
        return y

    def do_write(self, x, y):
        x.add_(1)
        return y

    def do_draw(self, x, y):
        return y + torch.rand(8)


class Half(Steps):
    """Breaks its graph once, and Dynamo fails on the second half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y = self.linear(x)
        torch._dynamo.graph_break()
        return self.last(fails(y))


def effects(model: nn.Module, given: torch.Tensor) -> list[object]:
    """All that a call may have changed."""
    found: list[object] = [given.clone(), torch.get_rng_state()]
    for part in model.modules():
        if isinstance(part, Steps):
            found += [part.count.clone(), list(part.seen)]
    return found


def same(a: list[object], b: list[object]) -> bool:
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


def once(make, calls: int = 3, **options) -> nn.Module:
    """Call the fp32 model and the rewritten one on the same inputs and random state: results agree, and so do effects."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    amp = amprewrite.rewrite(make(), dtype="bf16", **options)
    for call in range(calls):
        got: list[tuple[torch.Tensor, list[object]]] = []
        for each in (model, amp):
            x = data(3, 8)
            torch.manual_seed(call)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AmpRewriteWarning)
                result = each(x)
            got.append((result, effects(each, x)))
        assert torch.allclose(got[0][0], got[1][0], atol=0.1), call
        assert same(got[0][1], got[1][1]), call
    return amp


EFFECTS = ("count", "list", "write", "draw")
PLACES = [
    ("fail", *EFFECTS),
    (*EFFECTS, "fail"),
    (*EFFECTS, "break", "fail"),
    ("break", *EFFECTS, "fail"),
    ("count", "break", "list", "write", "break", "draw", "fail", "count"),
    (*EFFECTS, "break", "fail", *EFFECTS, "break", "fail", *EFFECTS),
]


@pytest.mark.parametrize("steps", PLACES, ids="-".join)
def test_wherever_capture_fails(steps):
    amp = once(lambda: Steps(steps))
    assert any("as it is written" in part.why and __file__ in part.where for part in amp.plan.skipped)
    assert matmul_dtypes(amp, data(3, 8)) == {torch.bfloat16}


@pytest.mark.parametrize("inner", [("fail",), ("count", "break", "fail", "list"), ("count", "fail")], ids="-".join)
@pytest.mark.parametrize("outer", [("count", "part"), ("count", "break", "part", "list", "write"), ("part", "fail", "count")], ids="-".join)
@pytest.mark.long
def test_inside_a_part(outer, inner):
    amp = once(lambda: Steps(outer, Steps(inner)))
    assert matmul_dtypes(amp, data(3, 8)) == {torch.bfloat16}


@pytest.mark.parametrize("inner", [("fail",), ("count", "break", "fail", "list")], ids="-".join)
def test_inside_a_checkpoint(inner):
    torch.manual_seed(0)
    amp = once(lambda: Steps(("count", "checkpoint", "list"), Steps(inner)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpRewriteWarning)
        amp(data(3, 8)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in amp.parameters())


def test_a_part_called_by_itself():
    torch.manual_seed(0)
    model = Steps(("part",), Steps(("count", "break", "fail")))
    amp = amprewrite.rewrite(model, dtype="bf16")
    with pytest.warns(AmpRewriteWarning, match="as it is written"):
        amp.inner(data(3, 8))
    assert amp.inner.count == 1


def test_random_orders_of_steps():
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        picks = torch.randint(len(STEPS), (7,), generator=generator).tolist()
        steps = tuple(STEPS[pick] for pick in picks)
        inner = tuple(STEPS[pick] for pick in reversed(picks) if STEPS[pick] != "part")
        once(lambda steps=steps, inner=inner: Steps(steps, Steps(inner)), calls=2)


def test_one_clear_warning_and_nothing_on_stderr(capfd):
    amp = amprewrite.rewrite(Half(()), dtype="bf16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            amp(data(3, 8))
    said = [str(w.message) for w in caught if issubclass(w.category, AmpRewriteWarning)]
    assert len(said) == 1 and "in fails)" in said[0] and "permutation of length 3" in said[0]
    assert capfd.readouterr().err == ""


def test_strict_raises():
    with pytest.raises(CaptureError, match="strict"):
        amprewrite.rewrite(Steps(("fail",)), dtype="bf16", strict=True)(data(3, 8))


def test_own_errors_come_through_once_and_the_next_call_is_captured():
    class Checks(Steps):
        def forward(self, x):
            self.count += 1
            torch._dynamo.graph_break()
            return super().forward(x)

    amp = amprewrite.rewrite(Checks(()), dtype="bf16")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        amp(data(3, 7))
    assert amp.count == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpRewriteWarning)
        assert matmul_dtypes(amp, data(3, 8)) == {torch.bfloat16}
    assert amp.count == 2


def test_later_calls_do_not_try_again(monkeypatch):
    heard = []
    kept = session.Graphs.failed
    monkeypatch.setattr(session.Graphs, "failed", lambda self, failure: (heard.append(failure), kept(self, failure)))
    amp = amprewrite.rewrite(Steps(("count", "break", "fail")), dtype="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpRewriteWarning)
        amp(data(3, 8))
        first = len(heard)
        for _ in range(5):
            amp(data(3, 8))
    assert first == len(heard) > 0 and amp.count == 6


def test_a_second_model_of_the_class_says_so_too():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Half(())

        def forward(self, x):
            return self.inner(x)

    for _ in range(2):
        with pytest.warns(AmpRewriteWarning, match="as it is written.*in fails"):
            amp = amprewrite.rewrite(Root(), dtype="bf16")
            amp(data(3, 8))
        assert any("as it is written" in part.why for part in amp.plan.skipped)


@differs_in_2_11("Dynamo hides what a fake call raised; 2.12 does with strict=True", last=(2, 12))
def test_an_error_that_keeps_its_own_type():
    @torch.library.custom_op("amprewrite_tests::bad_index", mutates_args=())
    def bad_index(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @bad_index.register_fake
    def _(x):
        raise IndexError("tuple index out of range")

    class Indexes(Steps):
        def do_fail(self, x, y):
            return torch.ops.amprewrite_tests.bad_index(y.detach())

    amp = once(lambda: Indexes(("count", "fail")))
    assert "tuple index out of range" in str(amp.plan.skipped)
    with pytest.raises(CaptureError, match="tuple index out of range"):
        amprewrite.rewrite(Indexes(("fail",)), dtype="bf16", strict=True)(data(3, 8))


def test_errors_of_the_rewrite_reach_the_caller_before_any_effect():
    other = amprewrite.plan(nn.Linear(8, 8), (data(3, 8),), dtype="bf16")
    amp = amprewrite.rewrite(Steps(("count",)), plan=other)
    with pytest.raises(PlanError):
        amp(data(3, 8))
    assert amp.count == 0


def test_a_recomputation_of_code_that_ran_as_written_does_so_too() -> None:
    """A call that Dynamo captured nothing of gives the next call a fresh start, not the recomputation of its own checkpoint."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            view = x.permute(*range(x.dim())[::-1])  # Dynamo fails on this
            with torch.no_grad():
                x.mul_(2)  # and on capturing the layer behind a view that was made in another mode
            return checkpoint(lambda t: torch.relu(self.layer(t)), view, use_reentrant=False)

    amp = amprewrite.rewrite(Odd(), dtype="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.no_grad():
            amp(torch.ones(2, 4, 4, requires_grad=True) + 0)
        for _ in range(3):
            amp(torch.ones(2, 4, 4, requires_grad=True) + 0).sum().backward()
    assert amp.layer.weight.grad.isfinite().all()


# parameters that a forward writes itself, in a graph that runs again ----------------------------------------------------------------


class Averaged(nn.Module):
    """Keeps a running average of one layer in another, or changes a scale, as it is called; its own values overflow fp16."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.online, self.target = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = list(zip(self.online.parameters(), self.target.parameters(), strict=True))
        with torch.no_grad():
            if self.how == "data":
                for source, target in pairs:
                    target.data.lerp_(source.data, 0.3)
            elif self.how == "foreach":
                torch._foreach_lerp_([target for _, target in pairs], [source for source, _ in pairs], 0.3)
            elif self.how == "view":
                self.target.weight[:2].copy_(0.5 * (self.online.weight[:2] + self.target.weight[:2]))
            else:
                self.scale.mul_(0.5)
        return (self.online(x * 1e5) * 1e-5 - self.target(x)) * self.scale


@pytest.mark.parametrize("how", ["data", "foreach", "view", "learned"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("lists", ["default", "o2"])
def test_parameters_are_written_once_in_a_call_that_overflows(how, grad, lists):
    plain, amp = Averaged(how), amprewrite.rewrite(Averaged(how), dtype="fp16", lists=lists)
    x = data(8, 8)
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpRewriteWarning)
        for _ in range(3):
            want, got = plain(x), amp(x)
    for ours, theirs in zip(amp.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6 if lists == "default" else 1e-3)  # Dynamo may write a lerp out
    assert lists == "o2" or (got - want).norm() < 2e-3 * want.norm()


class Doubles(nn.Module):
    """Writes its input, recorded by autograd or not, and overflows fp16 in a checkpoint."""

    def __init__(self, recorded: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.recorded = nn.Linear(8, 8), recorded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.recorded):
            x.mul_(2)
        return checkpoint(lambda t: self.linear(t * 2.0**17) * 2.0**-17, x, use_reentrant=False)


@pytest.mark.parametrize("recorded", [True, False])
def test_an_input_with_a_history_is_written_once_in_a_call_that_overflows(recorded):
    plain, amp = Doubles(recorded), amprewrite.rewrite(Doubles(recorded), dtype="fp16")
    for _ in range(3):
        leaves = [data(4, 8).requires_grad_() for _ in range(2)]
        inputs = [leaf * 3 for leaf in leaves]
        want, got = plain(inputs[0]), amp(inputs[1])
        want.sum().backward()
        got.sum().backward()
        assert torch.equal(*inputs)
        assert (got - want).norm() < 2e-3 * want.norm()
        assert (leaves[1].grad - leaves[0].grad).norm() < 2e-3 * leaves[0].grad.norm()


class Learns(nn.Module):
    """Writes something learnt to an input without gradients, or to a part of it, and an op refuses what overflows in fp16."""

    def __init__(self, part: bool, refused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.shift, self.part, self.refused = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), part, refused

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.part:
            y[0] = self.shift * 2
        else:
            y.sub_(self.shift)
        shares = torch.softmax(self.linear(x * 1e6) * 1e-6, -1)
        loss = F.binary_cross_entropy(shares * 0.9 + 0.05, torch.zeros_like(shares)) if self.refused else shares.square().mean()
        return loss + (y * self.shift).mean()


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "given"])
@pytest.mark.parametrize("part", [True, False], ids=["part", "whole"])
def test_what_is_learnt_is_written_once_in_a_call_that_overflows(part: bool, refused: bool) -> None:
    plain, amp = Learns(part, refused), amprewrite.rewrite(Learns(part, refused), dtype="fp16")
    with warnings.catch_warnings():
        warnings.simplefilter("error", amprewrite.AmpRewriteWarning)
        for _ in range(3):
            x, written = data(4, 8), [data(4, 8) for _ in range(2)]
            want, got = plain(x, written[0]), amp(x, written[1])
            for net, loss in ((plain, want), (amp, got)):
                net.zero_grad()
                loss.backward()
            assert torch.allclose(*written) and written[1].requires_grad
            assert abs(float(got - want)) <= 2e-3 * abs(float(want))
            for ours, theirs in zip(amp.parameters(), plain.parameters(), strict=True):
                assert (ours.grad - theirs.grad).norm() <= 5e-3 * theirs.grad.norm() + 1e-6


# arrays of NumPy that a forward writes, which share memory with tensors of the graph -----------------------------------------------------

ARRAY_WRITES: dict[str, Callable[[Any], Any]] = {
    "item": lambda a: a.__setitem__(0, a[0] + 1),
    "in place": lambda a: a.__iadd__(1),
    "fill": lambda a: a.fill(a[0] + 1),
    "sort": lambda a: (a.__isub__(np.arange(8, dtype=np.float32)), a.sort()),
    "part": lambda a: a.real.fill(a[0] + 1),
    "out": lambda a: np.add(a, 1, a),
}


class WritesArray(nn.Module):
    """Multiplies by an array that it holds, writes the array, and multiplies by it again."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.array, self.linear = how, np.ones(8, dtype=np.float32), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.linear(x) @ torch.from_numpy(self.array)
        ARRAY_WRITES[self.how](self.array)
        return before - 3 * (x @ torch.from_numpy(self.array))


@pytest.mark.parametrize("how", ARRAY_WRITES)
@pytest.mark.parametrize(
    "options", [{"dtype": "bf16"}, {"dtype": "fp16"}, {"dtype": "bf16", "strict": True}, {"dtype": "fp16", "backend": "aot_eager"}], ids=str
)
def test_an_array_is_written_once_and_read_as_it_is(how: str, options: dict[str, Any]) -> None:
    plain, amp = WritesArray(how), amprewrite.rewrite(WritesArray(how), **options)
    for _ in range(2):
        x = data(4, 8)
        torch.testing.assert_close(amp(x), plain(x), rtol=0.02, atol=0.2)
        assert (amp.array == plain.array).all()


class WritesWeight(nn.Module):
    """Writes its weight through an array between two readers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.linear = how, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.linear(x)
        with torch.no_grad():
            ARRAY_WRITES[self.how](self.linear.weight.detach().numpy())
        return before + self.linear(x)


@pytest.mark.parametrize("how", ["in place", "sort", "out"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"dtype": "fp16"}], ids=str)
def test_readers_of_a_weight_see_what_an_array_wrote(how: str, grad: bool, options: dict[str, Any]) -> None:
    plain, amp = WritesWeight(how), amprewrite.rewrite(WritesWeight(how), **options)
    for _ in range(2):
        x = data(4, 8)
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(amp(x), plain(x), rtol=0.02, atol=0.2)
        torch.testing.assert_close(amp.linear.weight, plain.linear.weight)


class Told(nn.Module):
    """Tells the world outside of it of each call, around a part that is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TOLD.append(1)
        self.linear.weight.register_hook(lambda gradient: gradient)
        return self.linear(x)


TOLD: list[int] = []


@pytest.mark.parametrize("options", [{"dtype": "fp16"}, {"dtype": "bf16", "strict": True}], ids=str)
def test_code_around_parts_runs_once_in_a_first_call(options: dict[str, Any]) -> None:
    TOLD.clear()
    amp = amprewrite.rewrite(Told(), granularity=["linear"], **options)
    amp(data(4, 8)).sum().backward()
    assert len(TOLD) == 1 and len(amp.linear.weight._backward_hooks) == 1
