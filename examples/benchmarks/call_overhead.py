"""What a call costs above the model's own ops: torch.compile(backend="eager") and a rewritten model, against the model as it is.

With dtype="fp32" there is nothing to cast, so that all a rewritten call takes more is overhead. In bf16 it casts its weights, too, and runs
other kernels. All run in turns, in many short rounds, and the table holds the best of each: what a busy machine adds is left out.

    python examples/benchmarks/call_overhead.py [--rounds 150] [--only mlp]
"""

from __future__ import annotations

import argparse
import copy
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


MOST_SECONDS = 10.0
"""For the rounds of one case: where a CPU has no bf16 kernels, a call may take long."""


def mlp(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp, tiny": (lambda: mlp(8, 2), (4, 8)),
    "mlp, 12 layers": (lambda: mlp(8, 12), (4, 8)),
    "transformer, small": (lambda: transformer(64, 4), (4, 16, 64)),
    "cnn, small": (lambda: cnn(16, 6), (2, 3, 16, 16)),
}


def seconds(call: Callable[[], object], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def compare(make: Callable[[], nn.Module], x: torch.Tensor, train: bool, rounds: int) -> list[float]:
    """Best seconds of the model as it is, compiled, and rewritten in fp32 and in bf16."""
    model = make().train(train)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    calls = [model, compiled, *(amprewrite.rewrite(copy.deepcopy(model), dtype=dtype) for dtype in ("fp32", "bf16"))]
    for each in calls:
        seconds(lambda each=each: each(x), 4)
    repeat = max(1, int(0.003 / seconds(lambda: model(x), 5)))
    best, end = [float("inf")] * len(calls), time.perf_counter() + MOST_SECONDS
    for _ in range(rounds):
        if time.perf_counter() > end:
            break
        for place, each in enumerate(calls):
            best[place] = min(best[place], seconds(lambda each=each: each(x), repeat))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("model", "mode", "as is", "compiled", "fp32", "bf16", "compiled, more", "fp32, more", "ratio")
    table = Table(*columns, title="µs of a forward call, and what it takes more than the model as it is")
    for name, (make, shape) in CASES.items():
        for mode in ("train", "eval, no_grad"):
            if asked.only not in name:
                continue
            with torch.set_grad_enabled(mode == "train"):
                plain, *others = compare(make, torch.randn(shape), mode == "train", asked.rounds)
            compiled, high, low = others
            more = (1e6 * (compiled - plain), 1e6 * (high - plain))
            shown = [f"{1e6 * each:.0f}" for each in (plain, compiled, high, low)]
            table.add_row(name, mode, *shown, f"{more[0]:.0f}", f"{more[1]:.0f}", f"{more[1] / more[0]:.2f}" if more[0] > 0 else "")
    Console().print(table)


if __name__ == "__main__":
    main()
