"""What freezing saves: bytes that parameters hold, casts a call, the largest difference of results, and time beside others.

Four variants of each net run in turns without gradients: fp32, rewritten, frozen, and wholly half. Times are the best of each, as ratios.
Run: python examples/benchmarks/frozen.py [--rounds 20] [--only bert,llama,vit] [--layers 2]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import amprewrite

WIDTH, HEADS, WORDS = 256, 4, 500


class Casts(TorchDispatchMode):
    """Counts the launches that cast."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "_to_copy"
        return func(*args, **(kwargs or {}))


def nets(layers: int) -> dict[str, Callable[[], tuple[nn.Module, Tensor]]]:
    import transformers as hf

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": layers, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH}
    tokens = torch.randint(0, WORDS, (4, 64), generator=torch.Generator().manual_seed(0))
    return {
        "bert": lambda: (hf.BertModel(hf.BertConfig(vocab_size=WORDS, max_position_embeddings=64, **sizes)), tokens),
        "llama": lambda: (hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=WORDS, **sizes)), tokens),
        "vit": lambda: (hf.ViTModel(hf.ViTConfig(image_size=64, **sizes)), torch.randn(4, 3, 64, 64)),
    }


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(dict(model(x))) if isinstance(leaf, Tensor)]


def held(model: nn.Module) -> int:
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}.values())


def casts(model: nn.Module, x: Tensor) -> int:
    with Casts() as counted:
        model(x)
    return counted.count


def row(model: nn.Module, x: Tensor, rounds: int) -> list[str]:
    amp, frozen = (amprewrite.rewrite(copy.deepcopy(model), dtype="bf16", inplace=True) for _ in range(2))
    frozen.freeze(x)
    half = copy.deepcopy(model).bfloat16()
    calls = [(model, x), (amp, x), (frozen, x), (half, x.bfloat16() if x.is_floating_point() else x)]
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for place, (each, given) in enumerate(calls):
            start = time.perf_counter()
            each(given)
            best[place] = min(best[place], time.perf_counter() - start)
    apart = max(float((a - b).abs().max()) for a, b in zip(results(amp, x), results(frozen, x), strict=True))
    ratios = [f"{best[2] / other:.2f}" for other in (best[0], best[1], best[3])]
    return [f"{held(frozen) / held(model):.3f}", f"{casts(amp, x)}", f"{casts(frozen, x)}", f"{apart:g}", *ratios]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", default="bert,llama,vit")
    options = parser.parse_args()
    table = Table("net", "bytes / fp32", "casts a call", "frozen", "difference", "time / fp32", "/ rewritten", "/ wholly half")
    with torch.no_grad():
        for name in options.only.split(","):
            torch.manual_seed(0)
            model, x = nets(options.layers)[name]()
            table.add_row(name, *row(model.eval(), x, options.rounds))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
