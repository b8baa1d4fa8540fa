"""Nets of odd sizes, and counters for what a padded graph really runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import amprewrite
from amprewrite.ir.plans.pad_plan import PadPlan

aten = torch.ops.aten
OPERANDS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}
LOW = (torch.float16, torch.bfloat16)


class OddMLP(nn.Module):
    def __init__(self, width: int = 101, out: int = 10) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.GELU()),
            *(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            t.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for t in self.qkv(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.up, self.down = nn.Linear(width, 3 * width + 1), nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class TinyGPT(nn.Module):
    """Vocabulary 509, hidden 100, embedding and head tied; gives the loss."""

    def __init__(self, vocabulary: int = 509, width: int = 100, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.blocks = nn.Sequential(*(Block(width, 4, causal=True) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


class TinyViT(nn.Module):
    """197 tokens, hidden 90."""

    def __init__(self, width: int = 90) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, 197, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, 6, causal=False) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class OddCNN(nn.Module):
    """3 → 30 → 50 channels."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        norms = (nn.BatchNorm2d(30), nn.BatchNorm2d(50)) if norm else (nn.Identity(), nn.Identity())
        self.net = nn.Sequential(
            nn.Conv2d(3, 30, 3, padding=1), norms[0], nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(30, 50, 3), norms[1], nn.SiLU()
        )
        self.head = nn.Linear(50 * 6 * 6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(self.net(x), 1))


class OddLSTM(nn.Module):
    """Hidden 70, two layers."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, both: bool = False) -> None:
        super().__init__()
        self.rnn = kind(30, 70, 2, batch_first=True, bidirectional=both)
        self.head = nn.Linear(70 * (1 + both), 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0])


def ids() -> torch.Tensor:
    return torch.randint(0, 509, (2, 16), generator=torch.Generator().manual_seed(3))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "mlp": (OddMLP, lambda: (noise(8, 101),)),
    "gpt": (TinyGPT, lambda: (ids(), ids().flip(1))),
    "vit": (TinyViT, lambda: (noise(1, 3, 56, 56),)),
    "cnn": (OddCNN, lambda: (noise(4, 3, 16, 16),)),
    "cnn with batch norm": (lambda: OddCNN(norm=True), lambda: (noise(4, 3, 16, 16),)),
    "lstm": (OddLSTM, lambda: (noise(3, 5, 30),)),
    "lstm both ways": (lambda: OddLSTM(both=True), lambda: (noise(3, 5, 30),)),
    "gru": (lambda: OddLSTM(nn.GRU), lambda: (noise(3, 5, 30),)),
}


def seeded(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return NETS[name][0]()


def pads_of(amp: Any) -> PadPlan:
    (region,) = amp.plan.regions
    found: PadPlan = region.pads
    return found


def padded(model: nn.Module, dtype: str = "bf16", **options: Any) -> Any:
    return amprewrite.rewrite(model, dtype=dtype, **{"pad": "always", **options})


class Operands(TorchDispatchMode):
    """Inner sizes of every low matrix product and convolution that runs: (op, K, N), channels for convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        if packet in OPERANDS:
            a, b = (args[i] for i in OPERANDS[packet])
            if a.dtype in LOW:
                self.sizes.append((packet.__name__, a.shape[-1], b.shape[-1]))
        elif packet is aten.convolution and args[0].dtype in LOW:
            self.sizes.append(("convolution", args[1].shape[1], args[1].shape[0]))
        elif "scaled_dot_product" in str(packet) and args[0].dtype in LOW:
            self.sizes.append(("attention", args[0].shape[-1], args[2].shape[-1]))
        elif "rnn_layer" in str(packet) or packet in (aten.lstm, aten.gru):
            weights = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 2]
            self.sizes += [("rnn", w.shape[1], w.shape[0]) for w in weights]
        return func(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    """Names of the ops that run, but views and allocations: each is a kernel, and a `_foreach_copy_` a copy for each of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._overloadpacket not in (aten.detach, aten.empty_like):
            name = func._overloadpacket.__name__
            self.names += ["copy_"] * len(args[0]) if name == "_foreach_copy_" else [name]
        return func(*args, **(kwargs or {}))
