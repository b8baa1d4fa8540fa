"""torch.nn.DataParallel over a rewritten model, on CPU replicas: the mechanics of replicate, threads and gather without a second device."""

from __future__ import annotations

import copy
import gc
import importlib
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amprewrite
from amprewrite.tables.vocabulary import Colour

replicate = importlib.import_module("torch.nn.parallel.replicate")
WIDTH, ROWS = 64, 1024


class Net(nn.Module):
    """Tied weights, a buffer that is written, a norm, a method, and a part that is called by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.table.weight
        self.body = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self.norm(self.body(self.table(x)))) * scale


def broadcast(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
    """What replicate gets of tensors: the first device reads the very memory, others have copies, and gradients come back as a sum."""
    given = [t.detach() if detach else t.view_as(t) for t in tensors]
    return [given if device == devices[0] else [t.clone() for t in given] for device in devices]


class Replicated(nn.Module):
    """nn.DataParallel over two CPU replicas: scatter, replicate, a thread for each, gather."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        replicas = replicate.replicate(self.module, [0, 1], not torch.is_grad_enabled())
        results: list[Any] = [None, None]
        grad = torch.is_grad_enabled()

        def work(place: int, part: Tensor) -> None:
            with torch.set_grad_enabled(grad):
                try:
                    results[place] = replicas[place](part, **kwargs)
                except Exception as error:
                    results[place] = error

        threads = [threading.Thread(target=work, args=each) for each in enumerate(x.chunk(2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return torch.cat(results)


@pytest.fixture(autouse=True)
def cpu_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(replicate, "_broadcast_coalesced_reshape", broadcast)
    monkeypatch.setattr(replicate, "_get_device_index", lambda device, optional=False: device)


def words(step: int = 0) -> Tensor:
    return torch.randint(0, WIDTH, (ROWS,), generator=torch.Generator().manual_seed(step))


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def grads(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("granularity", ["model", ["body.*"]])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_replicas_train_as_fp32_does(dtype: str, granularity: Any) -> None:
    model = Net()
    plain = Replicated(copy.deepcopy(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scale = amprewrite.DynamicLossScale(init=2.0**10) if dtype == "fp16" else "auto"
    amp = amprewrite.rewrite(model, dtype=dtype, granularity=granularity, loss_scale=scale)
    data_parallel = Replicated(amp)
    for step in range(4):
        plain.module.load_state_dict(model.state_dict())
        x = words(step)
        optimizer.zero_grad()
        plain.zero_grad()
        F.cross_entropy(data_parallel(x, scale=2.0), x).backward()
        F.cross_entropy(plain(x, scale=2.0), x).backward()
        assert error(grads(model), grads(plain)) < (4e-2 if dtype == "bf16" else 5e-3)
        assert error(model.norm.running_mean, plain.module.norm.running_mean) < 2e-2 and model.norm.num_batches_tracked == step + 1
        optimizer.step()
    assert all(p is q and type(p) is nn.Parameter for p, q in zip(amp.parameters(), model.parameters(), strict=True))
    assert any(node.op == "linear" and node.colour is Colour.LOW for node in amp.plan.nodes)
    amp.eval()
    plain.module.load_state_dict(model.state_dict())
    plain.eval()
    with torch.no_grad():
        assert error(data_parallel(words()), plain(words())) < 2e-2


def test_one_scale_serves_all_replicas_and_an_overflow_of_one_skips_the_step() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    amp = amprewrite.rewrite(model, dtype="fp16", loss_scale=amprewrite.DynamicLossScale(init=2.0**14))
    data_parallel, x = Replicated(amp), words()
    for overflows in (False, False, True, False):
        optimizer.zero_grad()
        out = data_parallel(x)
        weights = torch.ones(ROWS)
        weights[-1] = 1e30 if overflows else 1.0  # a row of the second replica
        (F.cross_entropy(out, x, reduction="none") * weights).mean().backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        moved = [not torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True)]
        assert not any(moved) if overflows else all(moved)
    report = amp.loss_scale.report()
    assert (report.steps, report.skipped, amp.loss_scale.value) == (4, 1, 2.0**13)


def test_the_model_itself_goes_on_beside_its_replicas() -> None:
    model, x = Net(), words()
    amp = amprewrite.rewrite(model, dtype="bf16").eval()
    want = amp(x)
    got = Replicated(nn.Sequential(amp))(x)
    assert torch.equal(got, want) and torch.equal(amp(x), want)
    body = torch.randn(ROWS, WIDTH)
    assert torch.equal(Replicated(amp.body)(body), amp.body(body))


def test_hooks_run_once_a_replica_and_an_error_leaves_the_parameters() -> None:
    model, x = Net(), words()
    calls: list[str] = []
    amp = amprewrite.rewrite(model, dtype="bf16")
    amp.register_forward_hook(lambda module, args, out: calls.append("hook"))
    data_parallel = Replicated(amp)
    data_parallel(x)
    assert calls == ["hook"] * 2
    with pytest.raises((IndexError, RuntimeError)):
        data_parallel(x + WIDTH)
    assert all(p is q for p, q in zip(amp.parameters(), model.parameters(), strict=True))


def test_replicas_are_let_go_without_the_garbage_collector() -> None:
    amp = amprewrite.rewrite(Net(), dtype="bf16")
    gc.disable()
    try:
        replicas = replicate.replicate(amp, [0, 1], True)
        copies = [weakref.ref(t) for t in replicas[1]._former_parameters.values()] + [weakref.ref(replicas[1].body[0].weight)]
        del replicas
        assert all(each() is None for each in copies)
    finally:
        gc.enable()


def test_a_frozen_model_has_no_replicas() -> None:
    amp = amprewrite.rewrite(Net(), dtype="bf16").eval()
    with torch.no_grad():
        amp(words())
    amp.freeze()
    with pytest.raises(amprewrite.AmpRewriteError, match="frozen"):
        amp._replicate_for_data_parallel()
