"""What a call of a rewritten model costs when there is nothing to rewrite: dtype="fp32" against the original, forward only.

Both run in turns, in many short rounds, and the table holds the best of each: what a busy machine adds is left out.
Run: python examples/benchmarks/call_overhead.py [--rounds 150]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import amprewrite


def transformer(width: int, depth: int) -> nn.Module:
    layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(depth)]
    return nn.Sequential(*layers)


def cnn(width: int, depth: int) -> nn.Module:
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        blocks += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer, small": (lambda: transformer(64, 4), (4, 16, 64)),
    "transformer, medium": (lambda: transformer(256, 6), (4, 64, 256)),
    "cnn, small": (lambda: cnn(16, 6), (2, 3, 16, 16)),
    "cnn, medium": (lambda: cnn(64, 10), (4, 3, 32, 32)),
}


def seconds(call: Callable[[], object], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def compare(model: nn.Module, x: torch.Tensor, rounds: int) -> tuple[float, float]:
    """Best seconds of the original and of the rewritten model."""
    amp = amprewrite.rewrite(model, dtype="fp32")
    for each in (model, amp):
        seconds(lambda each=each: each(x), 3)
    repeat = max(1, int(0.003 / seconds(lambda: model(x), 5)))
    plain, rewritten = [], []
    for _ in range(rounds):
        plain.append(seconds(lambda: model(x), repeat))
        rewritten.append(seconds(lambda: amp(x), repeat))
    return min(plain), min(rewritten)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    table = Table("model", "mode", "original µs", "rewritten µs", "ratio", title='dtype="fp32": nothing to cast, forward')
    for name, (make, shape) in CASES.items():
        for mode in ("train", "eval, no_grad"):
            model = make().train(mode == "train")
            with torch.set_grad_enabled(mode == "train"):
                plain, rewritten = compare(model, torch.randn(shape), rounds)
            table.add_row(name, mode, f"{1e6 * plain:.0f}", f"{1e6 * rewritten:.0f}", f"{rewritten / plain:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
