"""What a token costs: `.generate()` of a Llama, greedy, six ways in turns in one process, and the casts of a step of decoding.

Times are processor time between the first token and the last. Ratios are medians over the rounds, each against the same round's autocast
and wholly bf16. Launches that cast and the bytes that they read are counted in the dispatcher, for a step after the prompt.
Run: python examples/benchmarks/generation.py [--rounds 5] [--prompts 16,512] [--tokens 32] [--batches 1,4] [--profile]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import cProfile
import itertools
import pstats
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import amprewrite

VOCABULARY = 1000
Generate = Callable[[Tensor, int], list[float]]


class Clock(hf.StoppingCriteria):
    """Notes the processor time at each token, and stops nothing."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.ticks.append(time.process_time())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Casts(TorchDispatchMode):
    """Counts launches that cast, and the bytes that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "_to_copy" and args[0].is_floating_point() and result.dtype != args[0].dtype:
            self.launches += 1
            self.bytes += args[0].nbytes
        return result


def llama(layers: int, width: int) -> nn.Module:
    """A Llama with random weights, whose fp32 results all ways start from."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 8, "intermediate_size": 3 * width}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **sizes)).eval()


def ways(layers: int, width: int) -> dict[str, Generate]:
    """What is compared, by name."""
    model = llama(layers, width)
    half = copy.deepcopy(model).bfloat16()
    captured = copy.deepcopy(model)
    captured.forward = torch.compile(captured.forward, backend="eager", dynamic=True)  # type: ignore[method-assign]
    ours = amprewrite.rewrite(model, dtype="bf16")
    frozen = amprewrite.rewrite(copy.deepcopy(model), dtype="bf16", inplace=True)
    greedy(ours)(prompt(1, 4), 2)
    greedy(frozen)(prompt(1, 4), 2)
    frozen.freeze()
    return {
        "fp32": greedy(model),
        "autocast": greedy(model, autocast=True),
        "wholly bf16": greedy(half),
        "ours": greedy(ours),
        "ours, frozen": greedy(frozen),
        'torch.compile(backend="eager")': greedy(captured),
    }


def greedy(model: Any, autocast: bool = False) -> Generate:
    """`generate` of a model that chooses the likeliest token, so many times; when each of them came."""

    def generate(tokens: Tensor, count: int) -> list[float]:
        clock, settings = Clock(), {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        around = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
        with torch.no_grad(), around:
            model.generate(tokens, stopping_criteria=[clock], **settings)
        return clock.ticks

    return generate


def prompt(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


def casts_a_step(generate: Generate, tokens: Tensor) -> tuple[float, float]:
    """Launches that cast in one step of decoding, and the kilobytes that they read."""
    counted = []
    for count in (3, 5):
        with Casts() as casts:
            generate(tokens, count)
        counted.append((casts.launches, casts.bytes))
    (few, little), (many, much) = counted
    return (many - few) / 2, (much - little) / 2 / 1024


def measured(compared: dict[str, Generate], tokens: Tensor, count: int, rounds: int) -> dict[str, list[float]]:
    """Processor seconds a token of each way, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for generate in compared.values():
        generate(tokens, 4)
    for _ in range(rounds):
        for name, generate in compared.items():
            ticks = generate(tokens, count + 1)
            seconds[name].append((ticks[-1] - ticks[0]) / count)
    return seconds


def ratio(ours: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 5, "layers": 8, "width": 512, "tokens": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--prompts", default="16,512")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--profile", action="store_true", help="where our time goes, too")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    compared = ways(asked.layers, asked.width)
    for length, batch in itertools.product(map(int, asked.prompts.split(",")), map(int, asked.batches.split(","))):
        tokens, title = prompt(batch, length), f"Llama {asked.layers} x {asked.width}, prompt {batch} x {length}, {asked.tokens} tokens"
        table = Table("way", "ms a token", "/ autocast", "/ wholly bf16", "/ fp32", "casts a step", "KB read by them", title=title)
        seconds = measured(compared, tokens, asked.tokens, asked.rounds)
        for name, spent in seconds.items():
            ratios = [f"{ratio(spent, seconds[other]):.2f}" for other in ("autocast", "wholly bf16", "fp32")]
            launches, kilobytes = casts_a_step(compared[name], tokens)
            table.add_row(name, f"{1000 * min(spent):.2f}", *ratios, f"{launches:.0f}", f"{kilobytes:.0f}")
        Console(width=120).print(table)
    if asked.profile:
        profile = cProfile.Profile()
        profile.runcall(compared["ours"], prompt(1, 16), asked.tokens)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
