"""What only a GPU can show: CUDA's numbers, a step that never waits, steps in CUDA graphs.

Everything that a graph records was run before on a side stream, reads static inputs, and makes its gradients anew: they are set
to None before the recording, so that backward allocates them in the graph's own memory (PyTorch's notes on CUDA semantics).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_help import Training, block, conv
from layouts import LAYOUTS, WIDTH
from layouts import error as relative
from layouts import gradients as all_gradients
from runtime_help import data
from torch import Tensor, nn
from torch._dynamo.utils import counters

import amprewrite
from amprewrite.runtime.training.loss_scale import DynamicLossScale

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NETS = pytest.mark.parametrize("made", [block, conv], ids=["transformer", "conv net"])
NO_BF16 = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
FORMATS = pytest.mark.parametrize(
    "dtype", ["fp16", pytest.param("bf16", marks=pytest.mark.skipif(NO_BF16, reason="this CUDA device has no bf16 units"))]
)
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
WARM_UP = 4
"""Steps before a recording: fp16 looks at its first three results, and the optimizer makes its state."""
OVERFLOWS = {2, 3, 7}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def error(got: Tensor, want: Tensor) -> float:
    return float((got.cpu() - want.cpu()).norm() / want.cpu().norm())


def gradients(made: Callable[[], tuple[nn.Module, Tensor]], device: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Output and gradients of one step; in fp32 without options."""
    model, x = made()
    model.to(device)
    out = (amprewrite.rewrite(model, **options) if options else model)(x.to(device))
    out.square().mean().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def warmed(training: Training) -> Training:
    """After its first steps, taken on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            training.step()
    torch.cuda.current_stream().wait_stream(side)
    return training


@NETS
@FORMATS
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_step_gives_the_numbers_of_the_cpu(made, dtype, backend):
    if backend == "inductor":
        pytest.importorskip("triton", reason="inductor needs triton for a CUDA device")
    exact = gradients(made, "cpu")
    tolerance = {"bf16": 3e-2, "fp16": 5e-3}[dtype]
    on_cpu = gradients(made, "cpu", dtype=dtype)
    on_gpu = gradients(made, "cuda", dtype=dtype, backend=backend)
    for got, same, want in zip(on_gpu, on_cpu, exact, strict=True):
        assert got.dtype == torch.float32 and got.is_cuda
        assert error(got, want) < tolerance and error(got, same) < tolerance


@FORMATS
@pytest.mark.parametrize("options", [{}, {"cache_weights": "step"}, {"pad": "always"}], ids=str)
def test_no_step_waits_for_the_gpu(dtype, options):
    training = warmed(Training(block(), "cuda", dtype=dtype, **options))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_inference_waits_for_the_gpu():
    training = Training(block(), "cuda")
    with torch.no_grad():
        for _ in range(WARM_UP):
            training.amp(training.x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            training.amp(training.x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@NETS
@pytest.mark.parametrize("options", [{}, {"cache_weights": "step"}], ids=["casts in the graph", "kept copies"])
def test_a_whole_fp16_step_in_a_cuda_graph_goes_on_as_eager_steps_do(made, options):
    eager, replayed = (
        warmed(Training(made(), "cuda", loss_scale=DynamicLossScale(init=2.0**10, growth_interval=3), **options)) for _ in range(2)
    )
    graph = torch.cuda.CUDAGraph()
    replayed.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = replayed.forward_backward()
        replayed.optimizer.step()
    for turn in range(12):
        batch = data(*eager.x.shape, seed=turn)
        for training in (eager, replayed):
            training.x.copy_(batch)
            training.factor.fill_(float("inf") if turn in OVERFLOWS else 1.0)
        want = eager.step()
        graph.replay()
        if turn not in OVERFLOWS:
            assert error(loss, want) < 1e-2
        for got, same in zip(replayed.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(got, same, rtol=1e-2, atol=1e-3)
    left, right = replayed.amp.loss_scale.report(), eager.amp.loss_scale.report()
    same = ("scale", "steps", "skipped", "last_overflow_step")
    assert [getattr(left, name) for name in same] == [getattr(right, name) for name in same]
    assert left.skipped == len(OVERFLOWS)


def test_inference_in_a_cuda_graph():
    model, x = block()
    model.cuda()
    amp, static = amprewrite.rewrite(model, dtype="fp16"), x.cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(WARM_UP):
            amp(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = amp(static)
    batch = data(*x.shape, seed=5)
    static.copy_(batch)
    graph.replay()
    with torch.no_grad():
        assert error(out, model(batch.cuda())) < 5e-3


@FORMATS
def test_inductors_own_cuda_graphs(dtype):
    """mode="reduce-overhead", as a callable back end: parameters and kept copies are read where they lie, and nothing is skipped."""
    pytest.importorskip("triton", reason="inductor needs triton for a CUDA device")
    backend = functools.partial(torch._inductor.compile, options={"triton.cudagraphs": True})
    eager, graphs = Training(block(), "cuda", dtype=dtype), Training(block(), "cuda", dtype=dtype, backend=backend)
    for turn in range(6):
        batch = data(*eager.x.shape, seed=turn)
        for training in (eager, graphs):
            training.x.copy_(batch)
        torch.compiler.cudagraph_mark_step_begin()
        assert error(graphs.step(), eager.step()) < 2e-2
    assert counters["inductor"]["cudagraph_skips"] == 0
    with torch.no_grad():
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert error(graphs.amp(graphs.x).clone(), graphs.model(graphs.x)) < 3e-2
    assert counters["inductor"]["cudagraph_skips"] == 0


@FORMATS
def test_a_graph_with_a_loss_scale_may_hold_values_on_two_devices(dtype):
    """Layers and a factor on the CPU, beside layers on the card: each gradient is unscaled where it is."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here, self.there, self.back = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
            self.factor = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            before = self.here(x)
            behind = self.there(before.to(self.there.weight.device)) * self.factor
            return self.back(behind.to(x.device)), behind

    torch.manual_seed(0)
    model, x = Both(), torch.randn(8, 16)
    model.there.cuda()
    found = []
    for each in (model, amprewrite.rewrite(copy.deepcopy(model), dtype=dtype, loss_scale=1024.0)):
        on_host, on_card = each(x)
        (on_host.square().sum() + on_card.square().sum().cpu()).backward()
        assert on_host.is_cpu and on_card.is_cuda
        found.append([p.grad for p in each.parameters()])
    for want, got in zip(*found, strict=True):
        assert got.device == want.device and error(got, want) < {"bf16": 3e-2, "fp16": 5e-3}[dtype]


def test_attention_reads_grouped_heads() -> None:
    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.few = nn.Linear(64, 256), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            queries = self.queries(x).unflatten(-1, (8, 32)).transpose(1, 2)
            few = self.few(x).unflatten(-1, (2, 32)).transpose(1, 2)
            keys, values = (few[:, :, None].expand(-1, -1, 4, -1, -1).reshape(queries.shape) for _ in range(2))
            return nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)

    torch.manual_seed(0)
    model, x = Grouped().cuda(), torch.randn(2, 64, 64, device="cuda")
    amp = amprewrite.rewrite(copy.deepcopy(model), dtype="fp16", loss_scale=16.0)
    found = []
    for each in (model, amp):
        result = each(x)
        result.square().sum().backward()
        found.append((result, each.few.weight.grad))
    if torch.cuda.get_device_capability() >= (8, 0):
        assert "reads each head of keys and values for a group of query heads" in str(amp.plan)
    for want, got in zip(*found, strict=True):
        assert (got - want).norm() <= 0.01 * want.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
@FORMATS
@pytest.mark.parametrize("second", ["cpu", pytest.param("cuda:1", marks=TWO_GPUS)])
def test_values_on_several_devices_have_the_gradients_of_fp32(layout, dtype, second):
    model, x = layout("cuda:0", second), torch.randn(16, WIDTH, device="cuda:0")
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = amprewrite.rewrite(model, optimizer=optimizer, dtype=dtype)
    for _ in range(3):
        plain.load_state_dict(model.state_dict())
        optimizer.zero_grad()
        plain.zero_grad()
        amp(x).square().mean().backward()
        plain(x).square().mean().backward()
        assert relative(all_gradients(amp), all_gradients(plain)) < (3e-2 if dtype == "bf16" else 4e-3)
        optimizer.step()


def test_an_overflow_beside_the_cpu_skips_the_step_on_both():
    model, x = LAYOUTS[0]("cuda:0", "cpu"), torch.randn(16, WIDTH, device="cuda:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    amp = amprewrite.rewrite(model, optimizer=optimizer, dtype="fp16", loss_scale=DynamicLossScale(init=2.0**14))
    amp(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    (amp(x).square().mean() * 1e30).backward()
    optimizer.step()
    assert all(torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True))
    assert amp.loss_scale.value == 2.0**13


@TWO_GPUS
@FORMATS
def test_data_parallel_has_the_gradients_of_fp32(dtype):
    model, x = block()
    model, x = model.cuda(), torch.cat([x, x]).cuda()
    plain = nn.DataParallel(copy.deepcopy(model))
    data_parallel = nn.DataParallel(amprewrite.rewrite(model, dtype=dtype, loss_scale=1024.0 if dtype == "fp16" else None))
    data_parallel(x).square().mean().backward()
    plain(x).square().mean().backward()
    assert relative(all_gradients(model), all_gradients(plain)) < (3e-2 if dtype == "bf16" else 4e-3)
