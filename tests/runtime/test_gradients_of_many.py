"""A value that many ops read has gradients as exact as under torch.autocast, which adds them up in fp32.

A weight that many ops read has gradients as exact as under torch.autocast with a copy for each reader (`cache_enabled=False`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amprewrite
from amprewrite.graphs.fx.ops import quantised_products

FLOOR = {"bf16": 1e-2, "fp16": 2e-3}


class Markov(nn.Module):
    """The scaled forward algorithm: one matrix of transitions in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        moves, state, total = self.table.softmax(-1), x[:, 0], torch.zeros(())
        for step in range(1, x.shape[1]):
            state = (state @ moves) * x[:, step]
            size = state.sum(-1, keepdim=True)
            total, state = total + size.log()[:, 0], state / size
        return -total.mean()


class Memory(nn.Module):
    """Layers that all read one normed memory, and one bias of their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)
        self.keys = nn.ModuleList(nn.Linear(32, 32) for _ in range(40))
        self.bias = nn.Parameter(torch.randn(1, 64, 64) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        memory, state, bias = self.norm(self.first(x)), x, self.bias * 2
        for layer in self.keys:
            state = state + F.softmax(state @ layer(memory).mT * 0.1 + bias, -1) @ memory
        return state.square().mean()


@pytest.mark.long
@pytest.mark.parametrize("dtype", FLOOR)
@pytest.mark.parametrize("make", [Markov, Memory])
def test_gradients_of_a_value_that_many_read(make: Callable[[], nn.Module], dtype: str) -> None:
    torch.manual_seed(0)
    net = make()
    x = torch.randn(64, 64, 32).softmax(-1)

    def gradients(model: nn.Module, scale: float, low: torch.dtype | None = None) -> dict[str, Tensor]:
        net.zero_grad()
        with torch.autocast("cpu", dtype=low, enabled=low is not None):
            (model(x) * scale).backward()
        return {name: p.grad / scale for name, p in net.named_parameters()}

    want = gradients(net, 1.0)
    other = gradients(net, 1024.0 if dtype == "fp16" else 1.0, {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    found = gradients(amprewrite.rewrite(net, dtype=dtype, **({"loss_scale": 1024.0} if dtype == "fp16" else {})), 1.0)
    behind = {name: gradient for name, gradient in want.items() if not name.startswith("keys")}  # what many read is made of these
    for name, gradient in behind.items():
        off, others = ((each[name] - gradient).norm() / gradient.norm() for each in (found, other))
        assert off <= max(FLOOR[dtype], 2 * others), name


def test_the_plan_names_the_copies() -> None:
    plan = amprewrite.plan(Memory(), (torch.randn(64, 64, 32),), dtype="bf16")
    assert "has one low copy for groups of readers" in str(plan)


# -- weights --------------------------------------------------------------------------------------------
WIDTH = 256


class Steps(nn.Module):
    """A cell that a loop calls in each time step. `parts` is the number of checkpoints that the loop is divided into, 0 for none."""

    def __init__(self, cell: nn.Module, parts: int = 0) -> None:
        super().__init__()
        self.cell, self.out, self.parts = cell, nn.Linear(WIDTH, WIDTH), parts

    def forward(self, x: Tensor) -> Tensor:
        def run(part: Tensor, state: Tensor) -> Tensor:
            states = [state]
            for now in part.unbind(0):
                linear = isinstance(self.cell, nn.Linear)
                states.append(torch.tanh(self.cell(torch.cat([now, states[-1]], -1))) if linear else self.cell(now, states[-1]))
            return torch.stack(states[1:])

        states = [x.new_zeros(1, x.shape[1], WIDTH)]
        for part in x.chunk(max(1, self.parts)):
            states.append(checkpoint(run, part, states[-1][-1], use_reentrant=False) if self.parts else run(part, states[-1][-1]))
        return self.out(torch.cat(states[1:])).mean(0)


def errors(net: nn.Module, other: nn.Module, low: torch.dtype, steps: int, penalty: bool = False) -> tuple[dict[str, float], ...]:
    """Return the errors of the gradients of `other`, and those under torch.autocast with a cast for each reader, against fp32's."""
    torch.manual_seed(1)
    x, weights = torch.randn(steps, 8, WIDTH) + 1, torch.randn(8, WIDTH)

    def gradients(model: nn.Module, autocast: bool = False) -> dict[str, Tensor]:
        net.zero_grad()
        scale = 1024.0 if autocast and low is torch.float16 else 1.0
        with torch.autocast("cpu", dtype=low, enabled=autocast, cache_enabled=False):
            inputs = x.clone().requires_grad_(penalty)
            loss = (model(inputs) * weights).sum()
            if penalty:
                (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
                loss = slope.square().sum()
            (loss * scale).backward()
        return {name: p.grad / scale for name, p in net.named_parameters() if p.grad is not None and p.grad.any()}

    want = gradients(net)
    measured = (gradients(other), gradients(net, True))
    return tuple({name: float((each[name] - of).norm() / of.norm()) for name, of in want.items()} for each in measured)


def cell_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return {"linear": nn.Linear(2 * WIDTH, WIDTH), "gru": nn.GRUCell(WIDTH, WIDTH)}[kind]


@pytest.mark.long
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["linear", "gru"])
def test_weights_of_a_cell_over_300_steps(kind: str, low: torch.dtype) -> None:
    net = Steps(cell_of(kind))
    found, others = errors(net, amprewrite.rewrite(net, dtype=low), low, 300)
    assert all(found[name] <= 1.3 * others[name] for name in others), (found, others)  # in one low sum: 5 to 20 times


@pytest.mark.long
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("how", ["plain", "kept", "aot_eager", "checkpoints", "penalty"])
def test_weights_of_a_cell_however_it_runs(how: str, low: torch.dtype) -> None:
    net = Steps(cell_of("linear"), parts=2 if how == "checkpoints" else 0)
    options: dict[str, Any] = {"kept": {"cache_weights": "step"}, "aot_eager": {"backend": "aot_eager"}}.get(how, {})
    amp = amprewrite.rewrite(net, dtype=low, **options)
    seen = list[Tensor]()
    hook = net.cell.weight.register_hook(seen.append)  # as DDP: it takes the whole gradient, once
    for _ in range(2):
        del seen[:]
        found, others = errors(net, amp, low, 64, how == "penalty")
        assert len(seen) == 3  # fp32's, ours, torch.autocast's
    hook.remove()
    assert all(found[name] <= 1.5 * others[name] for name in others), (found, others)


class Casts(TorchDispatchMode):
    """Counts the casts that run, by shape and dtype of the results."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[tuple[torch.Size, torch.dtype]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten._to_copy.default:
            self.counts[result.shape, result.dtype] += 1
        return result


def test_a_weight_is_cast_once_and_its_parts_are_added_up_as_they_come() -> None:
    net = Steps(cell_of("linear"))
    amp = amprewrite.rewrite(net, dtype="bf16")
    x = torch.randn(64, 8, WIDTH)
    amp(x).sum().backward()
    with Casts() as casts:
        amp(x).sum().backward()
    for weight in (net.cell.weight, net.cell.bias):
        assert casts.counts[weight.shape, torch.bfloat16] == (1 if weight.dim() > 1 else 2)  # the head's bias has the same shape
        assert casts.counts[weight.shape, torch.float32] == (8 if weight.dim() > 1 else 9)  # a gradient for each group of eight steps


def test_one_fp8_copy_serves_all_readers_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    net, made = Steps(cell_of("linear")), Counter[str]()
    copies = quantised_products.copies

    def counted(matrix: Tensor, role: str, *rest: Any) -> Any:
        made[role] += 1
        return copies(matrix, role, *rest)

    monkeypatch.setattr(quantised_products, "copies", counted)
    amp = amprewrite.rewrite(net, dtype="bf16", products="fp8-all")
    x = torch.randn(20, 32, WIDTH)
    amp(x).sum().backward()
    made.clear()
    net.zero_grad()
    amp(x).sum().backward()
    assert made["w"] == 2  # the cell's and the head's
    assert net.cell.weight.grad is not None
