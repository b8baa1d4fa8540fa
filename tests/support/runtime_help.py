"""Small models and what DDP puts behind one; and two questions: did the model run low, and in which dtypes did matmuls run?"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amprewrite

MATMULS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "mkldnn_convolution", "_scaled_dot_product_flash_attention_for_cpu"}


class Sink(torch.autograd.Function):
    """What DDP puts behind a model under `find_unused_parameters=True`: a result that the loss does not read gets None, not zeros."""

    @staticmethod
    def forward(ctx, *results):
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in results)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


class MLP(nn.Module):
    """Two linear layers: the smallest model with something to rewrite."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.second = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Broken(nn.Module):
    """A model that Dynamo captures in two graphs: a print stands in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def mlp(seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP()


class BatchMean(nn.Module):
    """Two layers, and a mean over the batch, whose size is part of the graph."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).sum(0) / x.shape[0]


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*(shape or (3, 8)), generator=torch.Generator().manual_seed(seed))


def low(model: nn.Module, **options: object) -> nn.Module:
    return amprewrite.rewrite(model, **{"dtype": "bf16", **options})


class Observer(TorchDispatchMode):
    """Every op that runs, with the dtype of its first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, torch.dtype | None]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        self.ops.append((func.overloadpacket.__name__, None if first is None else first.dtype))
        return func(*args, **(kwargs or {}))

    @property
    def matmuls(self) -> list[torch.dtype | None]:
        return [dtype for name, dtype in self.ops if name in MATMULS]

    def count(self, name: str) -> int:
        return sum(op == name for op, _ in self.ops)


def matmul_dtypes(function, *args, **kwargs) -> set[torch.dtype | None]:
    """The dtypes in which the matmuls of one call ran."""
    with Observer() as watch:
        function(*args, **kwargs)
    return set(watch.matmuls)


def ran_low(got: torch.Tensor, fp32: torch.Tensor) -> bool:
    """Close to the fp32 result, in fp32, and not the same bits: it went through bf16."""
    assert got.dtype == fp32.dtype and got.shape == fp32.shape
    torch.testing.assert_close(got, fp32, rtol=5e-2, atol=5e-2)
    return not torch.equal(got, fp32)
