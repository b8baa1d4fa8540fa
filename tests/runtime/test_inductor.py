"""Rewritten models through inductor: one graph, eager's numbers, no more kernels than autocast gets, and inputs that stay in place."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from graph_help import block, conv
from runtime_help import data, mlp
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx, config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode, SchedulerNode

import amprewrite
from amprewrite.runtime.training.loss_scale import DynamicLossScale

NETS = pytest.mark.parametrize("made", [block, conv], ids=["transformer", "conv net"])
FORMATS = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graphs of other tests; scalar C++, which builds in a third of the time."""
    torch._dynamo.reset()
    counters.clear()
    with config.patch({"cpp.simdlen": 1}):
        yield


def one_block() -> tuple[nn.Module, torch.Tensor]:
    model, x = block()
    return model[0], x


def small() -> tuple[nn.Module, torch.Tensor]:
    return mlp(), data()


class Loss(nn.Module):
    """A net under its loss: nothing but a number leaves the graph, so what is in low inside need not be widened."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        return nn.functional.mse_loss(out, torch.ones_like(out))


class Run:
    """A model trained by SGD for a few steps, at two batch sizes; `outputs` and `gradients` of every step are kept."""

    def __init__(self, made: Any, backend: Any, **options: Any) -> None:
        self.model, x = made()
        self.batches = [x, x, data(5, *x.shape[1:]), x]
        self.amp = amprewrite.rewrite(self.model, backend=backend, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.amp.attach(self.optimizer) if options["dtype"] == "fp16" else None
        self.outputs: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []

    def train(self) -> Run:
        for x in self.batches:
            self.optimizer.zero_grad()
            out = self.amp(x)
            out.square().mean().backward()
            self.outputs.append(out.detach())
            self.gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]))
            self.optimizer.step()
        return self


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.long
@pytest.mark.parametrize(("made", "dtype"), [(one_block, "bf16"), (one_block, "fp16"), (conv, "bf16")], ids=["block", "block", "conv"])
def test_training_is_one_graph_a_shape_and_gives_eagers_numbers(made, dtype):
    torch._dynamo.reset()
    eager = Run(made, "eager", dtype=dtype).train()
    counters.clear()
    compiled = Run(made, "inductor", dtype=dtype).train()
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]  # one for the first batch size, one for all others
    assert not compiled.amp.plan.skipped
    tolerance = {"bf16": 2e-2, "fp16": 3e-3}[dtype]
    for got, want in zip(compiled.outputs + compiled.gradients, eager.outputs + eager.gradients, strict=True):
        assert got.dtype == torch.float32 and error(got, want) < tolerance


def test_eval_training_and_eval_again():
    model, x = small()
    amp = amprewrite.rewrite(model, dtype="bf16", backend="inductor")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        amp.eval()
        with torch.no_grad():
            assert error(amp(x), model(x)) < 2e-2
        amp.train()
        amp(x).square().mean().backward()
        optimizer.step()
    assert not counters["graph_break"]


def test_an_overflowing_step_is_skipped():
    model, x = small()
    amp = amprewrite.rewrite(model, dtype="fp16", backend="inductor", loss_scale=DynamicLossScale(init=1024.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    amp.attach(optimizer)
    for factor in (1.0, 1.0, float("inf"), 1.0):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        (amp(x).square().mean() * factor).backward()
        optimizer.step()
        same = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        assert same == (factor != 1.0)
    report = amp.loss_scale.report()
    assert (report.scale, report.steps, report.skipped) == (512.0, 4, 1)


def test_a_callable_backend_carries_inductors_options():
    seen = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.append(config.epilogue_fusion)
        return compile_fx.compile_fx_inner(*args, **kwargs)

    model, x = small()
    unfused = functools.partial(compile_fx.compile_fx, inner_compile=spy, config_patches={"epilogue_fusion": False})
    amp = amprewrite.rewrite(model, dtype="bf16", backend=unfused)
    with torch.no_grad(), config.patch(force_disable_caches=True):  # a graph found in a cache is not compiled
        assert error(amp(x), model(x)) < 2e-2
    public = amprewrite.rewrite(model, dtype="bf16", backend=functools.partial(torch._inductor.compile, options={"max_autotune": False}))
    with torch.no_grad():
        assert error(public(x), model(x)) < 2e-2
    assert seen == [False]


# what inductor makes of it ------------------------------------------------------------------------------------------------------


class Look:
    """Inductor's hook after fusion: how many kernels it generates, how many of them only cast what is no input and no result, how
    many calls of libraries there are, and how many bytes the kernels move."""

    def __init__(self) -> None:
        self.kernels = self.casts = self.library = self.bytes = 0

    def __call__(self, nodes: list[Any]) -> list[Any]:
        graph = torch._inductor.virtualized.V.graph
        border = set(graph.graph_input_names) | set(graph.get_output_names())
        for node in nodes:
            if isinstance(node, ExternKernelSchedulerNode):
                self.library += 1
            elif not isinstance(node, NopKernelSchedulerNode):
                self.kernels += 1
                self.bytes += node.get_read_write_buffers_sizes()
                touched = {dep.name for dep in (*node.read_writes.reads, *node.read_writes.writes)}
                self.casts += only_casts(node) and not touched & border
        return nodes


def only_casts(node: Any) -> bool:
    done: Counter[str] = Counter()
    for part in node.get_nodes():
        done += part._body.op_counts if isinstance(part, SchedulerNode) else Counter(call=1)
    return (
        bool(node.get_nodes())
        and done["to_dtype"] > 0
        and not done.keys() - {"load", "store", "to_dtype", "output", "get_index", "index_expr"}
    )


def look_at(run: Any, x: torch.Tensor, training: bool) -> Look:
    """What inductor makes of one call; the C++ is not built, which takes the time and changes no count."""
    look = Look()
    unbuilt = mock.patch.object(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    with unbuilt, config.patch(_post_fusion_custom_pass=look, force_disable_caches=True), torch.set_grad_enabled(training):
        loss = run(x)
        if training:
            loss.backward()
    assert look.library > 0
    return look


@NETS
@FORMATS
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.long
def test_never_more_kernels_bytes_or_lone_casts_than_autocast(made, dtype, training):
    net, x = made()
    enter = nn.Conv2d(3, 3, 1) if made is conv else nn.Linear(16, 16)  # so that both of them need the input in low
    model = Loss(nn.Sequential(enter, net)).train(training)
    plan = amprewrite.plan(model, (x,), dtype=dtype)
    theirs = torch.compile(copy.deepcopy(model))

    def under_autocast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])):
            return theirs(x)

    want = look_at(under_autocast, x, training)
    torch._dynamo.reset()
    got = look_at(amprewrite.rewrite(model, plan=plan, backend="inductor"), x, training)
    assert got.kernels <= want.kernels and got.library <= want.library and got.casts <= want.casts
    # Kernels that unscale a gradient read the inverse of the scale, a number. Trained norms are fp32 on a CPU, where their own kernel
    # adds up gradients in the low format: the statistics that backward reads again are twice as wide.
    assert got.bytes <= 1.002 * want.bytes + 4 * got.kernels


@pytest.mark.parametrize("options", [{}, {"cache_weights": "step"}, {"dtype": "fp16"}], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_parameters_and_kept_copies_are_read_where_they_lie(options, training):
    """CUDA graphs copy every input that is not known to stay in place, at every call: here all but `x` and the two scales."""
    static: list[tuple[int, list[int]]] = []

    def inner(module: torch.fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        static.append((len(inputs), list(kwargs["static_input_idxs"])))
        return module.forward

    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), data()
    backend = functools.partial(compile_fx.compile_fx, inner_compile=inner)
    amp = amprewrite.rewrite(model, backend=backend, **{"dtype": "bf16", **options})
    with torch.set_grad_enabled(training), config.patch(force_disable_caches=True):
        amp(x)
    ((inputs, places),) = static
    scales = 2 * (training and options.get("dtype") == "fp16")
    assert inputs - len(places) == 1 + scales


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.lstm, self.leave = nn.Linear(8, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.lstm(torch.tanh(self.enter(x)))[0])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_recurrent_modules_are_not_unrolled(dtype):
    """They run low in eager graphs of their own: AOTAutograd writes every time step out, which compiles for minutes."""
    compiled: list[torch.fx.GraphModule] = []

    def backend(module, inputs):
        compiled.append(module)
        return module.forward

    eager = amprewrite.rewrite(Recurrent(), dtype=dtype)
    amp = amprewrite.rewrite(Recurrent(), dtype=dtype, backend=backend)
    for shape in ((2, 5, 8), (3, 7, 8)):
        x = torch.randn(shape)
        for net in (eager, amp):
            net.zero_grad()
            net(x).square().mean().backward()
        for p, q in zip(eager.parameters(), amp.parameters(), strict=True):
            assert q.grad.dtype == torch.float32 and (p.grad - q.grad).norm() <= 0.03 * p.grad.norm()
    (lstm,) = [node for region in amp.plan.regions for node in region.nodes if node.op == "lstm"]
    assert lstm.colour.value == "low" and len(amp.plan.regions) == 3
    assert any("LSTM, GRU and RNN modules run low in graphs of their own" in note for note in amp.plan.notes)
    assert not amp.plan.skipped and not any("lstm" in str(node.target) for module in compiled for node in module.graph.nodes)


@pytest.mark.parametrize("planned", ["eager", "aot_eager"])
def test_a_given_plan_says_how_recurrent_modules_are_captured(planned):
    x = torch.randn(2, 5, 8)
    plan = amprewrite.plan(Recurrent(), (x,), dtype="bf16", backend=planned)
    amp = amprewrite.rewrite(Recurrent(), plan=plan, backend="aot_eager")
    amp(x).sum().backward()
    assert len(amp.plan.regions) == len(plan.regions) == (1 if planned == "eager" else 3)


def test_a_recurrent_module_by_itself_and_one_that_must_be_whole():
    seen: list[torch.fx.GraphModule] = []

    def backend(module, inputs):
        seen.append(module)
        return module.forward

    amp = amprewrite.rewrite(nn.LSTM(8, 8), dtype="bf16", backend=backend)
    amp(torch.randn(3, 2, 8))
    assert amp.plan.regions[0].nodes and not seen
    strict = amprewrite.rewrite(Recurrent(), dtype="bf16", backend=backend, strict=True)
    strict(torch.randn(2, 5, 8))
    assert len(strict.plan.regions) == len(seen) == 1


class Head(nn.Module):
    """Logits beside their loss, as a language model gives both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.head = nn.Linear(32, 64), nn.Linear(64, 4096)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(torch.relu(self.up(x))).float()
        return nn.functional.cross_entropy(logits, labels), logits


@FORMATS
def test_nothing_of_the_size_of_logits_waits_for_backward_in_fp32(dtype: str) -> None:
    """AOTAutograd kept the fp32 logits, since they are a result, and made fp32 zeros for their gradient."""
    waits: list[torch.Tensor] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        waits.extend(node.meta["val"] for node in module.graph.find_nodes(op="placeholder"))
        return module

    partition = functools.partial(min_cut_rematerialization_partition, compiler="inductor")
    compilers: dict[str, Any] = {"fw_compiler": lambda module, _: module, "bw_compiler": keep, "partition_fn": partition}
    backend = aot_autograd(**compilers, decompositions=select_decomp_table())
    x, labels = torch.randn(256, 32), torch.randint(0, 4096, (256,))
    got, want = [], []
    for found, options in ((got, {"backend": backend}), (want, {})):
        amp = amprewrite.rewrite(Head(), dtype=dtype, device="h100", loss_scale=2.0**8 if dtype == "fp16" else None, **options)
        loss, logits = amp(x, labels)
        assert logits.dtype == torch.float32
        loss.backward()
        logits = amp(x, labels)[1]
        logits.square().mean().backward()
        found += [loss, logits, *(p.grad for p in amp.parameters())]
    large = [each.dtype for each in waits if isinstance(each, torch.Tensor) and each.shape == (256, 4096)]
    assert large and torch.float32 not in large
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() <= 1e-2 * other.norm()


class Pooled(nn.Module):
    """A value and a view of it, as encoders give all positions and the first one; or the same value twice."""

    def __init__(self, last: nn.Module, twice: bool = False) -> None:
        super().__init__()
        self.up, self.last, self.twice = nn.Linear(16, 16), last, twice

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.last(self.up(x))
        return hidden, hidden.float() if self.twice else hidden[:, 0]


@FORMATS
@pytest.mark.parametrize("last", [nn.Identity, functools.partial(nn.LayerNorm, 16)], ids=["low", "fp32"])
@pytest.mark.parametrize("twice", [False, True], ids=["view", "twice"])
def test_results_that_share_memory_share_it_and_have_their_gradients(dtype: str, last: Any, twice: bool) -> None:
    """A cast after the graph had memory of its own, and in fp16 AOTAutograd made views without gradients."""
    torch.manual_seed(0)
    net, x = Pooled(last(), twice), torch.randn(64, 16)
    amp = amprewrite.rewrite(copy.deepcopy(net), dtype=dtype, backend="aot_eager", loss_scale=2.0**8 if dtype == "fp16" else None)
    for model in (net, amp):
        hidden, part = model(x)
        assert part.untyped_storage().data_ptr() == hidden.untyped_storage().data_ptr() and (hidden is part) == twice
        (hidden.square().mean() + part.square().sum()).backward()
        with torch.no_grad():
            hidden.zero_()
        assert not part.any()
    for got, want in zip(amp.parameters(), net.parameters(), strict=True):
        assert (got.grad - want.grad).norm() <= 2e-2 * want.grad.norm()
