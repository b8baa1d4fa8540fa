"""Attention whose scores depend on positions, with rotary angles in the spellings that models use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Angles = Callable[[Tensor, Tensor], Tensor]


def maybe_autocast(device: str, enabled: bool) -> contextlib.AbstractContextManager[None]:
    """A region that transformers opens only if autocast is on."""
    on = torch.is_autocast_enabled(device) or enabled
    return torch.autocast(device, enabled=enabled) if on else contextlib.nullcontext()


@contextlib.contextmanager
def full_precision(x: Tensor) -> Iterator[None]:
    """A helper as libraries write it: a generator that asks first."""
    if not torch.is_autocast_enabled(x.device.type):
        yield
        return
    with torch.autocast(x.device.type, enabled=False):
        yield


def product(inv_freq: Tensor, positions: Tensor) -> Tensor:
    return (inv_freq[None, :, None].float() @ positions[:, None, :].float()).transpose(1, 2)


def in_maybe_region(inv_freq: Tensor, positions: Tensor) -> Tensor:
    with maybe_autocast("cpu", enabled=False):
        return product(inv_freq, positions)


def in_region(inv_freq: Tensor, positions: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return product(inv_freq, positions)


def in_helper(inv_freq: Tensor, positions: Tensor) -> Tensor:
    with full_precision(positions):
        return product(inv_freq, positions)


ANGLES: dict[str, Angles] = {
    "matmul": product,
    "asked": in_maybe_region,
    "region": in_region,
    "decorator": torch.autocast("cpu", enabled=False)(product),
    "helper": in_helper,
    "einsum": lambda f, p: torch.einsum("bs,d->bsd", p.float(), f),
    "einsum of one": lambda f, p: torch.einsum("bsk,kd->bsd", p.float()[..., None], f[None]),
    "outer": lambda f, p: torch.outer(p[0].float(), f)[None],
    "linear": lambda f, p: F.linear(p[..., None].float(), f[:, None]),
    "half way": lambda f, p: (p[..., None].float() + 0.5) @ (f / 2)[None],
}


class Rotary(nn.Module):
    """Attention whose scores depend on the distance of positions, with angles of a spelling."""

    def __init__(self, angles: Angles, width: int = 256, heads: int = 4, turn: str = "cos and sin", sharp: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.angles, self.turn, self.sharp, dim = heads, angles, turn, sharp, width // heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, dim, 2).float() / dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        angles = self.angles(self.inv_freq, torch.arange(length, device=x.device)[None])
        q, k, v = (f(x).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (self.sharp * getattr(self, "_by_complex" if self.turn == "complex" else "_by_halves")(t, angles) for t in (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)

    def _by_halves(self, t: Tensor, angles: Tensor) -> Tensor:
        angles = torch.cat((angles, angles), -1)[:, None]
        first, second = t.chunk(2, -1)
        return t * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def _by_complex(self, t: Tensor, angles: Tensor) -> Tensor:
        turned = torch.view_as_complex(t.float().unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).flatten(-2).type_as(t)


__all__ = ["ANGLES", "Rotary", "product"]
