"""What padding to Tensor Core multiples is worth: seconds of a training step of odd-sized nets, padded and not, taken in turns.

    python examples/benchmarks/padding.py                 # on a CUDA device: all nets, formats and back ends
    python examples/benchmarks/padding.py --quick         # small nets, eager, on whatever there is: shows that it runs

Compared are pad="never", "auto" and "always", and for inductor its own shape_padding on an unpadded graph. Times are medians
of interleaved rounds; a ratio above 1 means faster than pad="never" on the same back end.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import amprewrite


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())), nn.Linear(width, 11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for t in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """GPT-2's shape, with its vocabulary of 50257."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Cnn(nn.Module):
    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        pairs = zip((3, *channels), channels, strict=False)
        self.net = nn.Sequential(*(layer for a, b in pairs for layer in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())))
        self.head = nn.Linear(channels[-1], 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x).mean((2, 3))).square().mean()


Case = tuple[Callable[[], nn.Module], Callable[[str], torch.Tensor]]


def cases(quick: bool) -> dict[str, Case]:
    if quick:
        return {
            "odd mlp": (lambda: Mlp(101), lambda d: torch.randn(16, 101, device=d)),
            "gpt": (lambda: Gpt(509, 36, 3, 1), lambda d: torch.randint(0, 509, (2, 16), device=d)),
            "odd cnn": (lambda: Cnn((15, 25)), lambda d: torch.randn(2, 3, 12, 12, device=d)),
        }
    return {
        "odd mlp, 4095 wide": (lambda: Mlp(4095), lambda d: torch.randn(4096, 4095, device=d)),
        "gpt2 small, 50257": (lambda: Gpt(50257, 768, 12, 12), lambda d: torch.randint(0, 50257, (8, 512), device=d)),
        "odd cnn, 3-61-123-251": (lambda: Cnn((61, 123, 251)), lambda d: torch.randn(32, 3, 112, 112, device=d)),
    }


def stepper(amp: Any, batch: torch.Tensor, around: Callable[[], Any]) -> Callable[[], None]:
    """One training step without the optimizer, which padding does not touch."""

    def step() -> None:
        with around():
            amp(batch).backward()
        for parameter in amp.parameters():
            parameter.grad = None

    return step


def seconds(step: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def shape_padding(on: bool) -> Any:
    from torch._inductor import config

    return config.patch(shape_padding=on)


def compare(case: Case, dtype: str, backend: str, device: str, rounds: int) -> dict[str, float]:
    """Median seconds of a step by variant, rounds interleaved."""
    make, batch_of = case
    torch.manual_seed(0)
    model, batch = make().to(device), batch_of(device)
    variants: dict[str, tuple[str, Callable[[], Any]]] = {pad: (pad, nullcontext) for pad in ("never", "auto", "always")}
    if backend == "inductor":
        variants = {pad: (pad, lambda: shape_padding(False)) for pad in variants}
        variants["shape_padding"] = ("never", lambda: shape_padding(True))
    steps = {}
    for name, (pad, around) in variants.items():
        amp = amprewrite.rewrite(copy.deepcopy(model), dtype=dtype, pad=pad, backend=backend, loss_scale=None)
        steps[name] = stepper(amp, batch, around)
        for _ in range(3):
            steps[name]()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds(step, device))
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small nets, eager, few rounds; runs on a CPU")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="nets whose name holds this")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.quick:
        raise SystemExit("the benchmark wants a CUDA device; --quick runs small nets on the CPU, where padding gains nothing")
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, torch {torch.__version__}\n")
    print("| net | dtype | back end | never, ms | auto | always | inductor's shape_padding |")
    print("| --- | --- | --- | --: | --: | --: | --: |")
    for name, case in cases(arguments.quick).items():
        for dtype in ("fp16", "bf16") if arguments.only in name else ():
            for backend in ("eager",) if arguments.quick else ("eager", "inductor"):
                taken = compare(case, dtype, backend, device, 2 if arguments.quick else arguments.rounds)
                ratios = [f"{taken['never'] / taken[v]:.2f}x" if v in taken else "-" for v in ("auto", "always", "shape_padding")]
                print(f"| {name} | {dtype} | {backend} | {1e3 * taken['never']:.2f} | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
