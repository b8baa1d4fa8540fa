"""Casts that a training step really executes, rewritten against torch.autocast, on real architectures of small width.

    python examples/benchmarks/casts_vs_autocast.py [--dtype bf16] [--layers 12] [--only bert,vit]

Counts `aten._to_copy` between floating dtypes. "activation" counts the casts of the plan that are not of weights.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import amprewrite

Case = tuple[nn.Module, dict[str, Any]]


class Casts(TorchDispatchMode):
    """Counts copies from one floating dtype to another."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("dtype")
        if func._overloadpacket is torch.ops.aten._to_copy and to is not None and to.is_floating_point:
            self.count += args[0].is_floating_point() and args[0].dtype != to
        return func(*args, **kwargs)


def ids(high: int = 200) -> torch.Tensor:
    return torch.randint(1, high, (2, 16))


def bert(layers: int) -> Case:
    config = hf.BertConfig(vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4)
    x = ids()
    return hf.BertForMaskedLM(config), {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x}


def gpt2(layers: int) -> Case:
    x = ids()
    config = hf.GPT2Config(vocab_size=200, n_embd=64, n_layer=layers, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0)
    return hf.GPT2LMHeadModel(config), {"input_ids": x, "labels": x, "use_cache": False}


def llama(layers: int) -> Case:
    x = ids()
    config = hf.LlamaConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return hf.LlamaForCausalLM(config), {"input_ids": x, "labels": x, "use_cache": False}


def vit(layers: int) -> Case:
    config = hf.ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    return hf.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}


def t5(layers: int) -> Case:
    half = max(layers // 2, 1)
    config = hf.T5Config(
        vocab_size=200,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=half,
        num_decoder_layers=half,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config), {"input_ids": ids(), "labels": ids(), "use_cache": False}


def resnet(layers: int) -> Case:
    del layers
    config = hf.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
    )
    return hf.ResNetForImageClassification(config), {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([1, 2])}


CASES: dict[str, Callable[[int], Case]] = {"bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit, "t5": t5, "resnet": resnet}


def step_casts(run: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """Casts of one forward pass, and of the forward and backward pass; a first step captures and warms caches."""
    run().backward()
    with Casts() as casts:
        loss = run()
        forward = casts.count
        loss.backward()
    return forward, casts.count


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dtype", default="bf16", choices=["bf16", "fp16"])
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--only", default=",".join(CASES))
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[asked.dtype]

    print(f"casts a training step, {asked.dtype}, {asked.layers} layers, torch {torch.__version__}\n")
    print("| model | autocast fwd | ours fwd | autocast fwd+bwd | ours fwd+bwd | ratio | activation casts in the plan |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for name in asked.only.split(","):
        torch.manual_seed(0)
        model, inputs = CASES[name](asked.layers)
        model.train()

        def autocast_step(model: nn.Module = model, inputs: dict[str, Any] = inputs) -> torch.Tensor:
            with torch.autocast("cpu", dtype):
                loss: torch.Tensor = model(**inputs).loss
            return loss

        theirs = step_casts(autocast_step)
        amp = amprewrite.rewrite(model, dtype=asked.dtype)
        ours = step_casts(lambda amp=amp, inputs=inputs: amp(**inputs).loss)  # type: ignore[misc]
        activations = sum(not cast.weight for cast in amp.plan.casts)
        share = ours[1] / max(theirs[1], 1)
        print(f"| {name} | {theirs[0]} | {ours[0]} | {theirs[1]} | {ours[1]} | {share:.2f} | {activations} |", flush=True)


if __name__ == "__main__":
    main()
