"""What the first call costs: rewritten against torch.compile(backend="eager"), in turns, each on a fresh Dynamo.

    python examples/benchmarks/first_call.py [--nets bert,llama,resnet,generate] [--turns 5] [--profile]

Both capture the same model with the same inputs and run it once; the difference is our passes, the check on fake tensors and the
edited graph's code. Times are processor time. Widths are small, since capture never sees them. Later calls are timed by call_overhead.py.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf
from rich.console import Console
from rich.table import Table
from torch import nn

import amprewrite

Wrap = Callable[[nn.Module], nn.Module]
VOCABULARY = 500


@dataclass(frozen=True)
class Net:
    """A model, and what its first call does."""

    title: str
    make: Callable[[], nn.Module]
    call: Callable[[nn.Module], object]


def words() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, 32))


def bert() -> nn.Module:
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 12, "num_attention_heads": 12}
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=VOCABULARY, **sizes))


def llama(layers: int) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=0, **sizes))


def resnet() -> nn.Module:
    sizes = {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256], "depths": [3, 8, 36, 3]}
    return hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=10, **sizes))


def step_on_words(model: nn.Module) -> None:
    ids = words()
    model(input_ids=ids, labels=ids).loss.backward()


def step_on_images(model: nn.Module) -> None:
    images, labels = torch.randn(2, 3, 64, 64), torch.randint(0, 10, (2,))
    model(pixel_values=images, labels=labels).loss.backward()


def generate(model: nn.Module) -> None:
    model.generate(words(), max_new_tokens=4, do_sample=False)  # type: ignore[operator]


NETS = {
    "bert": Net("BERT of 12 layers, a training step", bert, step_on_words),
    "llama": Net("Llama of 32 layers, a training step", lambda: llama(32), step_on_words),
    "resnet": Net("ResNet-152, a training step", resnet, step_on_images),
    "generate": Net("Llama of 8 layers, generate()", lambda: llama(8), generate),
}


def compiled(model: nn.Module) -> nn.Module:
    """The model with the forward that `generate()` calls compiled, too; sizes that grow are dynamic at once, as ours are."""
    model.forward = torch.compile(model.forward, backend="eager", dynamic=None if model.training else True)  # type: ignore[method-assign]
    return model


WAYS: dict[str, Wrap] = {
    'torch.compile(backend="eager")': compiled,
    "rewrite, bf16": lambda model: amprewrite.rewrite(model, dtype="bf16"),
    "rewrite, fp16, loss scaling": lambda model: amprewrite.rewrite(model, dtype="fp16"),
}


def first_call(net: Net, wrap: Wrap) -> tuple[float, nn.Module]:
    """Seconds of processor time, wrapping and calling."""
    torch.manual_seed(0)
    model = net.make().train(net.call is not generate)
    torch._dynamo.reset()
    gc.collect()
    start = time.process_time()
    made = wrap(model)
    net.call(made)
    return time.process_time() - start, made


def measure(net: Net, turns: int) -> Table:
    """The ways in turns, and their medians against torch.compile."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    nodes = 0
    for _ in range(turns):
        for name, wrap in WAYS.items():
            spent, made = first_call(net, wrap)
            seconds[name].append(spent)
            if name.startswith("rewrite"):
                nodes = len(made.plan.nodes)  # type: ignore[union-attr, arg-type]
    base = next(iter(seconds.values()))
    table = Table("way", "times the first", "s added a 1,000 nodes", title=f"first call of {net.title}, {nodes} nodes")
    for name, spent in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(spent, base, strict=True))
        added = statistics.median(a - b for a, b in zip(spent, base, strict=True)) * 1000 / nodes
        table.add_row(name, f"{ratio:.2f}", f"{added:.2f}")
    return table


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--nets", default=",".join(NETS))
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--profile", action="store_true", help="where our time goes, too")
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    for wrap in WAYS.values():  # imports and first touches
        for warm in (Net("", lambda: llama(1), step_on_words), Net("", lambda: llama(1), generate)):
            first_call(warm, wrap)
    for name in asked.nets.split(","):
        Console().print(measure(NETS[name], asked.turns))
        if asked.profile:
            profile = cProfile.Profile()
            profile.runcall(first_call, NETS[name], WAYS["rewrite, bf16"])
            pstats.Stats(profile).sort_stats("cumulative").print_stats("amprewrite|passes", 40)


if __name__ == "__main__":
    main()
