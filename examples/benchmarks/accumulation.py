"""What `cache_weights="step"` saves: copies of weights and time of one optimizer step of several micro-steps.

    python examples/benchmarks/accumulation.py [--micro 1,4,8] [--only bert,llama] [--rounds 9] [--full]

Three models take turns in one process: torch.autocast, ours, ours with copies that outlive a forward. Times are medians of
ratios to autocast's step; weights copied are counted in the dispatcher, over one optimizer step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from nets import NETS
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amprewrite


class WeightCopies(TorchDispatchMode):
    """Counts copies of parameters to another floating dtype."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters, self.count = {p.data_ptr() for p in model.parameters()}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        self.count += name == "_to_copy" and args[0].data_ptr() in self.parameters
        return func(*args, **(kwargs or {}))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--micro", default="1,4,8", help="micro-steps a step")
    options.add_argument("--only", default="bert,llama")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--full", action="store_true", help="published sizes")
    asked = options.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = Table("net", "micro-steps", "copies autocast", "ours", "step", "time ours", "time step", title=f"bf16 on {device}, one step")
    for name in asked.only.split(","):
        for micro in map(int, asked.micro.split(",")):
            table.add_row(name, str(micro), *measured(name, micro, asked.rounds, asked.full, device))
    Console(width=110).print(table)


def measured(name: str, micro: int, rounds: int, full: bool, device: str) -> list[str]:
    torch.manual_seed(0)
    model, kwargs = NETS[name].make(full, 1)
    model = model.to(device)
    kwargs = {key: value.to(device) for key, value in kwargs.items()}
    ways = [way(copy.deepcopy(model), kwargs, micro, device, cache) for cache in (None, True, "step")]
    for step, _ in ways:
        step()
    copies = []
    for step, plain in ways:
        with WeightCopies(plain) as counter:
            step()
        copies.append(counter.count)
    ratios: list[list[float]] = [[], []]
    for _ in range(rounds):
        times = []
        for step, _ in ways:
            synchronize(device)
            started = time.perf_counter()
            step()
            synchronize(device)
            times.append(time.perf_counter() - started)
        for place, ratio in enumerate(ratios, 1):
            ratio.append(times[place] / times[0])
    return [*map(str, copies), *(f"{statistics.median(ratio):.3f}" for ratio in ratios)]


def way(model: nn.Module, kwargs: dict[str, Any], micro: int, device: str, cache: Any) -> tuple[Callable[[], None], nn.Module]:
    amp = model if cache is None else amprewrite.rewrite(model, dtype="bf16", cache_weights=cache)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(micro):
            with torch.autocast(device, torch.bfloat16, enabled=cache is None):
                loss = amp(**kwargs)
            loss.backward()
        optimizer.step()

    return step, model


if __name__ == "__main__":
    main()
