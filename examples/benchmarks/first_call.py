"""What the first call costs: rewritten against torch.compile(backend="eager"), in turns, each on a fresh Dynamo.

    python examples/benchmarks/first_call.py [--layers 12] [--turns 5] [--profile]

Both capture the same model with the same inputs and run it once; the difference is our passes, the check on fake tensors and the
edited graph's code. Later calls are timed by call_overhead.py.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import nn

import amprewrite


def bert(layers: int) -> tuple[nn.Module, torch.Tensor]:
    """BERT-base in everything but width, which capture never sees."""
    config = hf.BertConfig(hidden_size=48, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=12, vocab_size=500)
    return hf.BertForMaskedLM(config).train(), torch.randint(1, 500, (2, 32))


def first_call(make: Callable[[nn.Module], nn.Module], layers: int) -> tuple[float, nn.Module]:
    model, ids = bert(layers)
    torch._dynamo.reset()
    start = time.perf_counter()
    made = make(model)
    made(input_ids=ids, labels=ids).loss.backward()
    return time.perf_counter() - start, made


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--profile", action="store_true", help="where our time goes, too")
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        'torch.compile(backend="eager")': lambda model: torch.compile(model, backend="eager"),
        "rewrite, bf16": lambda model: amprewrite.rewrite(model, dtype="bf16"),
        "rewrite, fp16, loss scaling": lambda model: amprewrite.rewrite(model, dtype="fp16"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    nodes = 0
    for make in ways.values():  # imports and first touches
        first_call(make, 1)
    for _ in range(asked.turns):
        for name, make in ways.items():
            spent, made = first_call(make, asked.layers)
            seconds[name].append(spent)
            if name.startswith("rewrite"):
                nodes = len(made.plan.nodes)  # type: ignore[union-attr, arg-type]
    base = seconds['torch.compile(backend="eager")']
    title = f"first call of BERT, {asked.layers} layers, {nodes} nodes"
    table = Table("way", "times the first", "s added a 1,000 nodes", title=title)
    for name, spent in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(spent, base, strict=True))
        added = statistics.median(a - b for a, b in zip(spent, base, strict=True)) * 1000 / nodes
        table.add_row(name, f"{ratio:.2f}", f"{added:.2f}")
    Console().print(table)
    if asked.profile:
        profile = cProfile.Profile()
        profile.runcall(first_call, ways["rewrite, bf16"], asked.layers)
        pstats.Stats(profile).sort_stats("cumulative").print_stats("amprewrite", 40)


if __name__ == "__main__":
    main()
