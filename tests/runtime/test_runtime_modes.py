"""Whatever stands around a call, the rewritten graph runs, or a clear word says why not."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from runtime_help import MLP, Broken, Observer, data, low, matmul_dtypes, mlp, ran_low
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import amprewrite
from amprewrite import AmpRewriteWarning, CaptureError
from amprewrite.runtime.model.rewritten import session_of


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("training", [True, False])
def test_grad_modes_run_low(context, training):
    model, x = mlp(), data()
    amp = low(model).train(training)
    for _ in range(2):
        with context():
            assert ran_low(amp(x), model(x))
    assert ran_low(amp(x), model(x))
    assert matmul_dtypes(amp, x) == {torch.bfloat16}


@pytest.mark.parametrize("warm", [False, True])
def test_flop_counter_counts_the_rewritten_graph(warm):
    model, x = mlp(), data()
    amp = low(model)
    if warm:
        amp(x).sum().backward()
    with FlopCounterMode(display=False) as want:
        model(x).sum().backward()
    with FlopCounterMode(display=False) as got:
        out = amp(x)
        out.sum().backward()
    assert ran_low(out, model(x))
    assert got.get_total_flops() == want.get_total_flops() > 0


def test_a_new_flop_counter_for_every_call_captures_once():
    model, x = mlp(), data()
    amp = low(model)
    with FlopCounterMode(display=False) as want:
        model(x)
    with torch.no_grad():
        for _ in range(70):
            with FlopCounterMode(display=False) as got:
                out = amp(x)
            assert got.get_total_flops() == want.get_total_flops() > 0
        assert ran_low(out, model(x)) and len(session_of(amp).entries[""].graphs.regions) == 1
        amp(x)
    assert len(session_of(amp).entries[""].graphs.regions) == 2


def test_dispatch_mode_first_call_does_not_spoil_later_calls():
    model, x = mlp(), data()
    amp = low(model)
    with Observer() as watch:
        first = amp(x)
    assert set(watch.matmuls) == {torch.bfloat16}
    assert torch.equal(first, amp(x))
    assert ran_low(first, model(x))


def test_two_dispatch_modes_and_the_backward():
    amp, x = low(mlp()), data()
    with Observer() as outer, Observer() as inner:
        amp(x).sum().backward()
    assert len(inner.matmuls) == len(outer.matmuls) == 5
    assert set(inner.matmuls) == {torch.bfloat16}


def test_torch_function_mode():
    from torch.overrides import TorchFunctionMode

    class Quiet(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model, x = mlp(), data()
    amp = low(model)
    with Quiet():
        assert ran_low(amp(x), model(x))
    assert ran_low(amp(x), model(x))


def test_default_device_context():
    model, x = mlp(), data()
    amp = low(model)
    with torch.device("cpu"):
        assert ran_low(amp(x), model(x))


def test_profiler_sees_the_rewritten_graph():
    model, x = mlp(), data()
    amp = low(model)
    for _ in range(2):
        with torch.profiler.profile(record_shapes=True) as profile:
            out = amp(x)
        assert ran_low(out, model(x))
        assert any(event.key == "aten::addmm" for event in profile.key_averages())


@pytest.mark.parametrize("dispatch", [False, True])
def test_hooks_on_saved_tensors(dispatch):
    model, x = mlp(), data()
    amp = low(model)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.dtype) or t, lambda t: t):
        out = amp(x)
    out.sum().backward()
    assert ran_low(out, model(x)) and torch.bfloat16 in packed


def test_save_on_cpu_and_anomaly_mode():
    model, x = mlp(), data()
    amp = low(model)
    with torch.autograd.graph.save_on_cpu(), torch.autograd.detect_anomaly(check_nan=True):
        out = amp(x)
        out.sum().backward()
    assert ran_low(out, model(x))


def test_deterministic_mode():
    model, x = mlp(), data()
    amp = low(model)
    torch.use_deterministic_algorithms(True)
    try:
        assert ran_low(amp(x), model(x))
    finally:
        torch.use_deterministic_algorithms(False)
    assert ran_low(amp(x), model(x))


def test_ambient_autocast_is_refused_and_leaves_no_trace():
    model, x = mlp(), data()
    amp = low(model)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="outside the autocast"):
        amp(x)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="autocast"):
        amprewrite.rewrite(model, dtype="bf16")
    assert ran_low(amp(x), model(x))
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert ran_low(amp(x), model(x))


# -- threads ---------------------------------------------------------------------------
def in_threads(work, count: int = 2) -> list:
    results, errors, gate = [], [], threading.Barrier(count)

    def run() -> None:
        try:
            gate.wait()
            results.append(work())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("warm", [False, True])
def test_threads_calling_at_once(warm):
    model, x = mlp(), data()
    amp = low(model)
    if warm:
        amp(x)
    outs = in_threads(lambda: [amp(x) for _ in range(5)])
    assert all(ran_low(out, model(x)) for part in outs for out in part)


def test_threads_in_eval_share_the_weight_cache():
    model, x = mlp().eval(), data()
    amp = low(model)

    def work():
        with torch.no_grad():
            return [amp(x) for _ in range(20)]

    outs = [out for part in in_threads(work, 4) for out in part]
    assert all(torch.equal(out, outs[0]) for out in outs) and ran_low(outs[0], model(x))


# -- Dynamo's own switches ------------------------------------------------------------------
def test_dynamo_reset_only_means_a_new_capture():
    model, x = mlp(), data()
    amp = low(model)
    amp(x)
    torch._dynamo.reset()
    assert ran_low(amp(x), model(x))


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
@pytest.mark.long
def test_dynamo_disabled_by_environment_is_said(variable):
    program = """
        import os, sys, warnings
        sys.path.insert(0, "tests/support")
        from runtime_help import *
        amp = low(mlp())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = amp(data()); amp(data())
        words = [str(w.message) for w in caught if issubclass(w.category, amprewrite.AmpRewriteWarning)]
        assert len(words) == 1 and "Dynamo is disabled" in words[0], words
        assert torch.equal(out, mlp()(data()))
        assert "Dynamo is disabled" in str(amp.plan.skipped), amp.plan.skipped
        try:
            low(mlp(), strict=True)(data())
        except amprewrite.CaptureError as error:
            assert "Dynamo is disabled" in str(error)
        else:
            raise AssertionError("strict must raise")
        torch._dynamo.config.disable = False
        os.environ.pop("TORCHDYNAMO_DISABLE", None)
        assert ran_low(amp(data()), mlp()(data()))
        print("fine")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, variable: "1"}, capture_output=True, text=True
    )
    assert run.stdout.strip() == "fine", run.stderr


def test_force_eager_stance_is_said_and_ends_with_the_stance():
    model, x = mlp(), data()
    amp = low(model)
    with torch.compiler.set_stance("force_eager"), pytest.warns(AmpRewriteWarning, match="force_eager"):
        assert torch.equal(amp(x), model(x))
    assert ran_low(amp(x), model(x))


def test_eager_on_recompile_stance_runs_what_is_captured_and_says_the_rest():
    model, x = mlp(), data()
    amp = low(model)
    amp(x)
    with torch.compiler.set_stance("eager_on_recompile"):
        assert ran_low(amp(x), model(x))
        with pytest.warns(AmpRewriteWarning, match="eager_on_recompile"), torch.no_grad():
            assert torch.equal(amp(x), model(x))
    with torch.no_grad():
        assert ran_low(amp(x), model(x))


def test_fail_on_recompile_stance_raises_dynamos_own_error():
    model, x = mlp(), data()
    amp = low(model)
    amp(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert ran_low(amp(x), model(x))
        with pytest.raises(RuntimeError, match="fail_on_recompile"), torch.no_grad():
            amp(x)
    with torch.no_grad():
        assert ran_low(amp(x), model(x))


def test_eager_then_compile_stance():
    model, x = mlp(), data()
    amp = low(model)
    with torch.compiler.set_stance("eager_then_compile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AmpRewriteWarning)  # the first call may run as it is written, and says so
            amp(x)
        assert ran_low(amp(x[:2]), model(x[:2]))
    assert ran_low(amp(x), model(x))


def test_skipped_by_a_decorator_is_said():
    class Closed(MLP):
        @torch._dynamo.disable
        def forward(self, x):
            return super().forward((x @ x.t() @ x).tanh())

    model, x = Closed(), data()
    amp = low(model)
    with pytest.warns(AmpRewriteWarning, match="as it is written"):
        assert ran_low(amp(x), model(x))  # its modules are entries of their own
    assert amp.plan.skipped and len(amp.plan.regions) == 2
    with pytest.raises(CaptureError):
        low(model, strict=True)(x)


# -- recompile limit ---------------------------------------------------------------------------
class Switches(nn.Module):
    """Another graph for every value of `mode`: what guards on Python attributes do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.mode = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + float(len("x" * self.mode) if self.mode else 0) if self.mode != -1 else x


def test_past_the_limit_of_graphs_nothing_is_captured_anew(monkeypatch):
    monkeypatch.setattr("amprewrite.runtime.compiler.dynamo.RECOMPILE_LIMIT", 3)
    torch.manual_seed(0)
    model, x = Switches(), data()
    amp = low(model)

    def run(mode: int) -> torch.Tensor:
        amp.mode = model.mode = mode
        return amp(x)

    for mode in range(3):
        assert ran_low(run(mode), model(x)), mode
    with pytest.warns(AmpRewriteWarning, match=r"more than 3 graphs .*mark_dynamic") as said:
        for _ in range(3):
            for mode in range(3, 9):
                assert torch.equal(run(mode), model(x)), mode  # as it is written
    assert len(said) == 1
    for mode in range(3):
        assert ran_low(run(mode), model(x)), mode  # the graphs that are there go on running
    assert len(amp.plans) == 3 and "3 graphs" in amp.plan.skipped[0].why


def test_past_the_limit_of_graphs_gradients_are_those_of_the_model(monkeypatch):
    monkeypatch.setattr("amprewrite.runtime.compiler.dynamo.RECOMPILE_LIMIT", 2)
    torch.manual_seed(0)
    model, x = Switches(), data()
    amp = low(model, dtype="fp16")
    with pytest.warns(AmpRewriteWarning, match="more than 2 graphs"):
        for mode in range(5):
            amp.mode = model.mode = mode
            model.zero_grad()
            amp(x).square().mean().backward()
            got = model.fc.weight.grad.clone()
            model.zero_grad()
            model(x).square().mean().backward()
            torch.testing.assert_close(got, model.fc.weight.grad, rtol=0, atol=2e-3)


def test_past_the_limit_of_graphs_strict_raises(monkeypatch):
    monkeypatch.setattr("amprewrite.runtime.compiler.dynamo.RECOMPILE_LIMIT", 3)
    amp, x = low(Switches(), strict=True), data()
    for mode in range(3):
        amp.mode = mode
        amp(x)
    for mode in range(3, 5):
        amp.mode = mode
        with pytest.raises(CaptureError, match="more than 3 graphs"):
            amp(x)
    amp.mode = 1
    assert matmul_dtypes(amp, x) == {torch.bfloat16}


def test_past_the_limit_of_graphs_behind_a_graph_break(monkeypatch):
    monkeypatch.setattr("amprewrite.runtime.compiler.dynamo.RECOMPILE_LIMIT", 3)

    class Late(Switches):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, 8)

        def forward(self, x):
            x = self.head(x)
            torch._dynamo.graph_break()
            return super().forward(x)

    torch.manual_seed(0)
    amp, x = low(Late()), data()
    for mode in range(3):
        amp.mode = mode
        assert matmul_dtypes(amp, x) == {torch.bfloat16}, mode
    with pytest.warns(AmpRewriteWarning, match="more than 3 graphs"):
        for mode in range(3, 9):
            amp.mode = mode
            got, half = amp(x), amp.head(x)
            assert ran_low(half, amp.head.forward(x)), mode  # the part before the break has its graph
            torch.testing.assert_close(got, amp.fc.forward(half) + mode, rtol=0, atol=1e-5)
    assert "3 graphs" in str(amp.plan.skipped)


def test_a_list_of_ever_new_length_does_not_capture_for_ever(monkeypatch):
    monkeypatch.setattr("amprewrite.runtime.compiler.dynamo.RECOMPILE_LIMIT", 4)

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, parts):
            return sum(self.fc(part) for part in parts)

    model, x = Sums(), data()
    amp, counted = low(model), torch._dynamo.utils.counters["stats"]
    with pytest.warns(AmpRewriteWarning, match="pad lists"):
        for length in range(1, 9):
            amp([x] * length)
    before = counted["unique_graphs"]
    for _ in range(2):
        for length in range(1, 9):
            assert torch.allclose(amp([x] * length), model([x] * length), rtol=2e-2, atol=0.1)
    assert counted["unique_graphs"] == before
    assert len(amp.plans) == 4


def test_many_layers_behind_graph_breaks_all_run_low():
    class Layer(MLP):
        def forward(self, x):
            y = self.first(x)
            torch._dynamo.graph_break()
            return y + x

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(8) for _ in range(12))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Deep()
    amp = low(model)
    with pytest.warns(AmpRewriteWarning, match="as it is written"):  # the loop, not the layers
        assert matmul_dtypes(amp, data()) == {torch.bfloat16}
    assert matmul_dtypes(amp, data()) == {torch.bfloat16}
    assert any("graph break" in part.why for part in amp.plan.skipped)


def test_broken_model_runs_region_by_region():
    model, x = Broken(), data()
    amp = low(model)
    assert ran_low(amp(x), model(x))
    assert len(amp.plan.regions) == 2
    assert any("graph break" in part.why for part in amp.plan.skipped)
    with pytest.raises(CaptureError, match="strict"):
        low(model, strict=True)(x)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("hand_on", ["", "another", "as it is"])
def test_gradients_that_the_model_enables_itself_reach_its_weights(dtype, hand_on):
    class Enables(nn.Module):
        """Records gradients for its head alone, whoever calls it."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            h = self.body(x)
            with torch.enable_grad():
                y = self.head(h)
            y = F.dropout(y, 0.0) if hand_on == "as it is" else y  # gives the very tensor
            return (y, y.detach() + 1) if hand_on == "another" else (y,)

    torch.manual_seed(0)
    model, x = Enables(), torch.randn(4, 8)
    amp = low(model, dtype=dtype)
    for _ in range(2):
        with torch.no_grad():
            y, *_ = amp(x)
            want, *_ = model(x)
        assert y.requires_grad and want.requires_grad
        got = torch.autograd.grad(y.square().sum(), model.head.weight)[0]
        expected = torch.autograd.grad(want.square().sum(), model.head.weight)[0]
        assert ran_low(y, want) and torch.allclose(got, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


class InferenceInside(nn.Module):
    """Reads values within inference mode, and again where gradients flow."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        h = self.a(x)
        with torch.inference_mode():
            peak = self.b(x).abs().amax(-1, keepdim=True)
            with torch.inference_mode(False):
                again = torch.tanh(self.b(h))
        return h, self.b(x) * (peak > 0) + again, peak


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_copy_made_in_inference_mode_is_not_read_where_gradients_flow(dtype: str) -> None:
    model = InferenceInside()
    amp = amprewrite.rewrite(model, dtype=dtype, loss_scale=None)
    x = torch.randn(8, 16)
    results, expected = amp(x), model(x)
    torch.testing.assert_close(results, expected, rtol=2e-2, atol=2e-2)
    assert [each.requires_grad for each in results] == [each.requires_grad for each in expected]
    assert results[2].is_inference()
    weights = [model.a.weight, model.b.weight]
    got, wanted = (torch.autograd.grad((y[0] + y[1]).square().mean(), weights) for y in (results, expected))
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Broken()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def test_graphs_of_other_models_do_not_count_towards_the_limit(monkeypatch):
    monkeypatch.setattr("amprewrite.runtime.compiler.dynamo.RECOMPILE_LIMIT", 3)
    kept = []
    for place in range(8):
        kept.append(low(Holds()))
        assert matmul_dtypes(kept[-1], data()) == {torch.bfloat16}, place
        assert not [each for each in kept[-1].plan.skipped if "graph break" not in each.why]


class Averages(nn.Module):
    """Calls Python's library, which runs generators, where Dynamo reads each function by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.fc(x) * statistics.mean([1, 2, 3])


class Yields(Averages):
    """Has a generator of its own there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.fc(x) * next(self.factors())

    def factors(self) -> Iterator[int]:
        torch._dynamo.graph_break()
        yield 2


def test_what_dynamo_cannot_read_of_pythons_library_is_no_code_of_the_model():
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpRewriteWarning)
        amp = low(Averages())
        assert matmul_dtypes(amp, data()) == {torch.bfloat16}
    with pytest.warns(AmpRewriteWarning, match="runs as it is written"):
        low(Yields())(data())
