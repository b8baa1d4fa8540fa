"""Models whose layers lie on two devices and a CPU, and what their gradients are checked by."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class Beside(nn.Module):
    """A model on one device whose output takes a term that was computed on the CPU."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 64).to(first), nn.LayerNorm(64).to(first), nn.Linear(64, WIDTH).to(first)
        self.code, self.spread = nn.Parameter(torch.randn(4, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x)))) + self.spread(self.code).to(x.device).mean(0)


class Halves(nn.Module):
    """Naive model parallelism: the second half of the layers stands on another device."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 64).to(first), nn.LayerNorm(64).to(second), nn.Linear(64, WIDTH).to(second)
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(F.gelu(self.up(x)).to(self.second)))


class Offloaded(nn.Module):
    """Embedding and head on the CPU, what stands between them on two devices."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.first = Halves(first, second), first

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(self.table(x.argsort(-1)[:, 0].cpu()).to(self.first)).cpu())


class Recomputed(Halves):
    """Two stages on two devices, each recomputed in backward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda x: F.gelu(self.up(x)), x, use_reentrant=False)
        return checkpoint(lambda x: self.down(self.norm(x)), hidden.to(self.second), use_reentrant=False)  # type: ignore[union-attr]


class Shared(nn.Module):
    """A weight that is read where it lies and, moved there, on the other device; a hook on the value between them."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH).to(first), nn.LayerNorm(WIDTH).to(second)
        self.second = second

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mix(x).to(self.second)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 0.5)
        return self.norm(F.linear(hidden, self.mix.weight.to(self.second)))


LAYOUTS: tuple[Callable[[str, str], nn.Module], ...] = (Beside, Halves, Offloaded, Recomputed, Shared)


def gradients(model: nn.Module) -> Tensor:
    """All gradients in a row, on the CPU: each is fp32 and lies where its parameter does."""
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32 and parameter.grad.device == parameter.device
    return torch.cat([p.grad.cpu().flatten() for p in model.parameters() if p.grad is not None])


def error(got: Tensor, want: Tensor) -> float:
    return float((got.cpu() - want.cpu()).norm() / want.cpu().norm())
