"""Models and optimizers that other libraries wrapped, before or after the rewrite."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from runtime_help import data, low, matmul_dtypes, mlp, ran_low
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import amprewrite
from amprewrite import AmpRewriteWarning, CaptureError, PolicyError


# -- optimizers -----------------------------------------------------------------------------
class Accelerated(torch.optim.Optimizer):
    """As accelerate's: an Optimizer by class, which never ran Optimizer's constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Holder:
    """No Optimizer by class, as Lightning's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


WRAPPERS = [Accelerated, Holder, lambda optimizer: Accelerated(Accelerated(optimizer))]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("way", ["attach", "option", "option in a list"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_optimizer_inside_a_wrapper_is_guarded(wrap, way, dtype):
    model = mlp()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    options = {"optimizer": [wrap(inner)]} if way == "option in a list" else {"optimizer": wrap(inner)} if way == "option" else {}
    amp = amprewrite.rewrite(model, dtype=dtype, cache_weights="step", **options)
    if way == "attach":
        amp.attach(wrap(inner))
    with pytest.raises(PolicyError, match="attached already"):
        amp.attach(inner)
    before = model.first.weight.detach().clone()
    amp(data()).sum().backward()
    model.first.weight.grad[0, 0] = float("inf")
    inner.step()
    assert torch.equal(model.first.weight, before) is (dtype == "fp16")


def test_a_wrapper_around_no_torch_optimizer_is_refused():
    empty = Holder(None)
    empty.optimizer = empty
    inside = "attach the torch optimizer inside it"
    for bad, remedy in ((Accelerated(None), "attach the optimizer that it wraps"), (Holder(3), inside), (empty, inside)):
        with pytest.raises(PolicyError, match=remedy):
            low(mlp()).attach(bad)
        with pytest.raises(PolicyError, match=remedy):
            low(mlp(), optimizer=bad)


# -- models ------------------------------------------------------------------------------------
@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("which", ["the model", "a block"])
def test_fully_shard_before_the_rewrite_is_refused(which):
    model = blocks()
    fully_shard(model if which == "the model" else model[0])
    with pytest.raises(CaptureError, match=r"fully_shard, which must come after the rewrite.*granularity='blocks'"):
        low(model)


@pytest.mark.usefixtures("one_process")
def test_fsdp_before_the_rewrite_is_refused():
    with pytest.raises(CaptureError, match=r"wrapped in FSDP.*after the rewrite.*use_orig_params=True"):
        low(FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")))


@pytest.mark.usefixtures("one_process")
def test_fsdp_after_the_rewrite_says_how_parameters_stay_in_sight():
    model, x = mlp(), data()
    wanted = model(x)
    hidden = FullyShardedDataParallel(low(model), device_id=torch.device("cpu"))
    with pytest.warns(AmpRewriteWarning, match=r"FSDP\(amp, use_orig_params=True\)"):
        torch.testing.assert_close(hidden(x), wanted)
    shown = FullyShardedDataParallel(low(mlp()), device_id=torch.device("cpu"), use_orig_params=True)
    assert ran_low(shown(x), wanted)


def test_what_deepspeed_has_taken_over_is_refused():
    """By the marks of its engine and of the parameters that ZeRO-3 partitions."""
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine", "zero_optimization": lambda self: True})()
    with pytest.raises(CaptureError, match=r"is a DeepSpeed engine.*use fully_shard"):
        low(engine)
    model = mlp()
    model.first.weight.ds_id = 0
    with pytest.raises(CaptureError, match=r"ZeRO-3 has partitioned the parameters.*use fully_shard"):
        low(model)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("order", ["DDP, rewrite", "rewrite, DDP"])
@pytest.mark.filterwarnings("ignore:DistributedDataParallel has code that runs as it is written:amprewrite.AmpRewriteWarning")
def test_ddp_before_or_after_the_rewrite(order):
    model, x = mlp(), data()
    wanted = model(x)
    wrapped = low(DistributedDataParallel(model)) if order == "DDP, rewrite" else DistributedDataParallel(low(model))
    assert isinstance(wrapped, DistributedDataParallel) and ran_low(wrapped(x), wanted)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        losses.append(F.mse_loss(wrapped(x), torch.ones_like(wanted)))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] and matmul_dtypes(wrapped, x) == {torch.bfloat16}


# -- forwards that others replaced ---------------------------------------------------------------
def hook(module: nn.Module, calls: list[str]) -> None:
    """As accelerate's hooks: the forward on the instance is replaced, the old one kept beside it."""
    old = module._old_forward = module.forward

    def forward(self, *args, **kwargs):
        calls.append("before")
        result = old(*args, **kwargs)
        calls.append("after")
        return result

    module.forward = types.MethodType(forward, module)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("where", ["the model", "a part"])
@pytest.mark.filterwarnings("ignore::amprewrite.AmpRewriteWarning")
def test_a_forward_replaced_on_the_instance_keeps_working(when, where):
    model, x, calls = mlp(), data(), []
    wanted = model(x)
    if when == "before":
        hook(model if where == "the model" else model.first, calls)
    amp = low(model)
    if when == "after":
        amp(x)
        hook(amp if where == "the model" else amp.first, calls)
    calls.clear()
    assert ran_low(amp(x), wanted)
    assert ran_low(amp(x), wanted) and calls[:2] == ["before", "after"]


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)

        def tie_weights(self) -> None:
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    model, ids = Tied(), torch.arange(4)
    amp = low(model)
    amp(ids)
    amp.tie_weights()
    model.tie_weights()
    assert amp.head.weight is amp.embed.weight is model.embed.weight and ran_low(amp(ids), model(ids))
    amp(ids).sum().backward()
    assert amp.embed.weight.grad is amp.head.weight.grad and amp.embed.weight.grad.dtype == torch.float32
