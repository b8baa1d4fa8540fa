"""What a GPU asks of a step, asked on a CPU: no op that waits for the device, and a step that can be recorded and replayed; two nets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from runtime_help import data
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import amprewrite
import amprewrite.graphs.fx.weights.weight_cache
import amprewrite.runtime.captured.look_ahead
import amprewrite.runtime.captured.region
import amprewrite.runtime.training.loss_scale
import amprewrite.runtime.training.optimizers.optimizer_hooks
import amprewrite.runtime.training.training
import amprewrite.runtime.weights.weight_reads
from amprewrite.runtime.training.loss_scale import LossScale

SYNCS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "tolist", "nonzero", "nonzero_numpy", "argwhere", "masked_select",
    "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "repeat_interleave", "bincount",
    "_assert_async",
}  # fmt: skip
"""Ops whose result, or its size, the host reads from the device."""


class Syncs(TorchDispatchMode):
    """Names of the ops that ran and would have made the host wait for a GPU; indexing by a mask is one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.ops += 1
        masked = name in ("index", "index_put", "index_put_") and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if name in SYNCS or masked:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """Stands in for a CUDA graph: keeps every op with its very tensors, and runs them again into the same memory.

    As a real one it knows nothing of Python, and refuses what would make the host wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in SYNCS, f"{func} waits for the device while a graph is being recorded"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tensors(result)))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, outs in self.calls:
                for out, new in zip(outs, tensors(func(*args, **kwargs)), strict=True):
                    if out.data_ptr() != new.data_ptr():
                        out.detach().copy_(new)


Mode = TypeVar("Mode", bound=TorchDispatchMode)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def everything(mode: Mode) -> Iterator[Mode]:
    """`mode`, on for the loss scale, too: a rewritten model shows the modes around it what its graphs run, and no more."""
    snapshot = LossScale.snapshot

    def shown(*args: Any) -> Any:
        if torch._C._len_torch_dispatch_stack():
            return snapshot(*args)
        with mode:
            return snapshot(*args)

    with mock.patch.object(LossScale, "snapshot", shown), mode:
        yield mode


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    """Record what runs inside, and let amprewrite believe that it is a CUDA graph that records."""
    with monkeypatch.context() as patch:
        captured, training = amprewrite.runtime.captured, amprewrite.runtime.training
        weights = (amprewrite.runtime.weights.weight_reads, amprewrite.graphs.fx.weights.weight_cache)
        steps, graphs = (training.loss_scale, training.step_record), (captured.look_ahead, captured.region, *weights)
        for module in (*steps, *graphs):
            patch.setattr(module, "recording", lambda _: True)
        with everything(Recording()) as recorded:
            yield recorded


def syncs(run: Callable[[], Any]) -> list[str]:
    """The ops that `run` runs and that would make the host wait."""
    with everything(Syncs()) as found:
        run()
    assert found.ops > 0
    return found.found


class Block(nn.Module):
    """A norm, attention and an MLP, small; its inputs are batches of 6 vectors."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def block() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()), data(2, 6, 16)


def conv() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Conv(), data(2, 3, 8, 8)


class Training:
    """A rewritten model, its optimizer, and one step of a loop that nobody changed; `factor` is a static input that may be infinite."""

    def __init__(
        self, made: tuple[nn.Module, Tensor], device: str = "cpu", fused: bool = True, attach: bool = True, **options: object
    ) -> None:
        self.model, self.x, self.factor = made[0].to(device), made[1].to(device), torch.ones((), device=device)
        self.amp = amprewrite.rewrite(self.model, **{"dtype": "fp16", **options})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=fused, capturable=device != "cpu")
        if attach:
            self.amp.attach(self.optimizer)

    def forward_backward(self) -> Tensor:
        loss = self.amp(self.x).square().mean() * self.factor
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.forward_backward()
        self.optimizer.step()
        return loss

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]
