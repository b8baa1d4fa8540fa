"""What the planner's plans cost beside those of painting rules, under one table of prices, on real architectures at full size.

    python examples/benchmarks/planner_cost.py [--device a100] [--dtype fp16] [--train] [--only bert,vit] [--perturb 3]

Models live on torch's meta device: nothing is computed, so base-size transformers are planned on a laptop. Each cell is how
much more a plan takes than ours: that of `lists="tf"`, of `lists="autocast"`, of our lists painted by TensorFlow's rules; and
ours when it was planned with every price off by a log-normal factor of σ = 0.3 (the worst of `--perturb` draws).
"""

from __future__ import annotations

import argparse
import random
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers as hf
from torch import nn

from amprewrite.ir.cost import TICK, CostModel, price
from amprewrite.ir.op_graph import OpNode
from amprewrite.ir.pass_base import Decisions, Problem, run_passes
from amprewrite.ir.policies.policy import Policy
from amprewrite.passes import decide, plan_region
from amprewrite.passes.driver import read_problem
from amprewrite.passes.paint.paint_after_deny import PaintAfterDeny
from amprewrite.passes.paint.paint_lists import PaintLists
from amprewrite.passes.paint.paint_ties import PaintTies
from amprewrite.passes.weigh_plans import PLANNED
from amprewrite.passes.weigh_plans import weighed as priced
from amprewrite.planner.assignment import cheapest
from amprewrite.tables.formats import FORMATS, Format
from amprewrite.tables.vocabulary import Colour

BATCH, LENGTH, LAYERS = 8, 512, 4
Make = Callable[[], tuple[nn.Module, dict[str, Any]]]


def text(config: Any, auto: Any, **more: Any) -> Make:
    """A model that reads token ids."""

    def make() -> tuple[nn.Module, dict[str, Any]]:
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
        return auto(config), {"input_ids": ids, **more}

    return make


def image(config: Any, auto: Any, size: int = 224) -> Make:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        return auto(config), {"pixel_values": torch.zeros(BATCH, 3, size, size, device="meta")}

    return make


def both(config: Any, auto: Any) -> Make:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
        return auto(config), {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}

    return make


def sound(config: Any, auto: Any) -> Make:
    def make() -> tuple[nn.Module, dict[str, Any]]:
        return auto(config), {"input_values": torch.zeros(BATCH, 16000, device="meta")}

    return make


N = {"num_hidden_layers": LAYERS}
NO_CACHE = {"use_cache": False}
EAGER = {"attn_implementation": "eager"}
CASES: dict[str, Make] = {
    "bert": text(hf.BertConfig(**N), hf.BertForMaskedLM),
    "bert-eager": text(hf.BertConfig(**N, **EAGER), hf.BertForMaskedLM),
    "roberta": text(hf.RobertaConfig(**N), hf.RobertaModel),
    "distilbert": text(hf.DistilBertConfig(n_layers=LAYERS), hf.DistilBertModel),
    "albert": text(hf.AlbertConfig(**N, hidden_size=768, num_attention_heads=12, intermediate_size=3072), hf.AlbertModel),
    "electra": text(hf.ElectraConfig(**N), hf.ElectraModel),
    "mpnet": text(hf.MPNetConfig(**N), hf.MPNetModel),
    "gpt2": text(hf.GPT2Config(n_layer=LAYERS), hf.GPT2LMHeadModel, **NO_CACHE),
    "gpt2-eager": text(hf.GPT2Config(n_layer=LAYERS, **EAGER), hf.GPT2LMHeadModel, **NO_CACHE),
    "gpt-neox": text(hf.GPTNeoXConfig(**N, hidden_size=768, num_attention_heads=12, intermediate_size=3072), hf.GPTNeoXModel, **NO_CACHE),
    "opt": text(hf.OPTConfig(**N), hf.OPTModel, **NO_CACHE),
    "bloom": text(hf.BloomConfig(n_layer=LAYERS, hidden_size=768, n_head=12), hf.BloomModel, **NO_CACHE),
    "llama": text(hf.LlamaConfig(**N, hidden_size=1024, intermediate_size=2816, num_attention_heads=16), hf.LlamaForCausalLM, **NO_CACHE),
    "mistral": text(
        hf.MistralConfig(**N, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4),
        hf.MistralForCausalLM, **NO_CACHE,
    ),
    "qwen2": text(
        hf.Qwen2Config(**N, hidden_size=1024, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4),
        hf.Qwen2ForCausalLM, **NO_CACHE,
    ),
    "gemma": text(
        hf.GemmaConfig(**N, hidden_size=1024, intermediate_size=4096, num_attention_heads=8, num_key_value_heads=1, head_dim=128),
        hf.GemmaForCausalLM, **NO_CACHE,
    ),
    "phi": text(hf.PhiConfig(**N, hidden_size=1024, intermediate_size=4096, num_attention_heads=16), hf.PhiForCausalLM, **NO_CACHE),
    "t5": both(hf.T5Config(num_layers=2, num_decoder_layers=2), hf.T5ForConditionalGeneration),
    "bart": both(hf.BartConfig(encoder_layers=2, decoder_layers=2), hf.BartModel),
    "vit": image(hf.ViTConfig(**N), hf.ViTForImageClassification),
    "deit": image(hf.DeiTConfig(**N), hf.DeiTModel),
    "beit": image(hf.BeitConfig(**N), hf.BeitModel),
    "dinov2": image(hf.Dinov2Config(**N), hf.Dinov2Model),
    "swin": image(hf.SwinConfig(depths=[2, 2], num_heads=[3, 6]), hf.SwinModel),
    "convnext": image(hf.ConvNextConfig(), hf.ConvNextModel),
    "resnet": image(hf.ResNetConfig(), hf.ResNetForImageClassification),
    "regnet": image(hf.RegNetConfig(), hf.RegNetModel),
    "mobilenet-v2": image(hf.MobileNetV2Config(), hf.MobileNetV2Model),
    "segformer": image(hf.SegformerConfig(), hf.SegformerModel),
    "wav2vec2": sound(hf.Wav2Vec2Config(**N), hf.Wav2Vec2Model),
}  # fmt: skip


@dataclass(frozen=True)
class Noisy(CostModel):
    """Prices that are off: each op's and each copy's by a log-normal factor of its own."""

    seed: int = 0

    def factor(self, *what: str) -> float:
        return random.Random("|".join((str(self.seed), *what))).lognormvariate(0, 0.3)

    def op(self, node: OpNode, fmt: Format, read: int) -> int:
        return round(super().op(node, fmt, read) * self.factor(node.name, fmt.name))

    def cast(self, node: OpNode) -> int:
        return round(super().cast(node) * self.factor(node.name))


Problems = dict[str, list[Problem]]
"""By the name of the lists; one problem for each graph that Dynamo captures."""


def problems(model: nn.Module, inputs: dict[str, Any], policy: Policy, train: bool) -> Problems:
    """The model's graphs as the planner reads them, and as the lists of others do."""
    found: Problems = {lists: [] for lists in ("default", "tf", "autocast")}

    def keep(module: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        for lists, read in found.items():
            read.append(read_problem(module, replace(policy, lists=lists), name=f"graph{len(read)}", training=train).problem)
        return module.forward

    torch._dynamo.reset()
    with torch.set_grad_enabled(train):
        torch.compile(model.train(train), backend=keep)(**inputs)
    return found


def weighed(found: Problems) -> dict[str, float]:
    """Seconds of the plan and of each rule's, all graphs together."""
    total = dict.fromkeys((PLANNED, "tf rules", "autocast rules", "our lists, tf rules"), 0.0)
    for lists, read in found.items():
        for problem in read:
            seconds = {candidate.name: candidate.seconds for candidate in priced(plan_region(problem)).candidates}
            if lists == "default":
                total[PLANNED] += seconds[PLANNED]
                total["our lists, tf rules"] += seconds["our lists, tf rules"]
            else:
                total[f"{lists} rules"] += price(problem.graph, decide(problem).colours, problem.costs).total * TICK
    return total


def regret(found: list[Problem], seed: int) -> float:
    """How much more the plan takes, at true prices, that was made with prices that are off."""
    best = planned = 0
    for problem in found:
        costs, colours, scratch = problem.costs, decide(problem).colours, Decisions()
        best += price(problem.graph, colours, costs).total
        run_passes((PaintLists(), PaintAfterDeny(), PaintTies()), problem, scratch)
        open_nodes = [node for node in problem.graph if node.name not in scratch.paints]
        off = Noisy(costs.device, costs.low, costs.training, costs.cached_weights, seed=seed)
        low = cheapest(problem.graph, scratch.colours, open_nodes, off).low if open_nodes else frozenset()
        colours |= {node.name: Colour.LOW if node.name in low else Colour.HIGH for node in open_nodes}
        planned += price(problem.graph, colours, costs).total
    return planned / max(best, 1) - 1


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="a100")
    options.add_argument("--dtype", default="fp16", choices=["bf16", "fp16"])
    options.add_argument("--train", action="store_true")
    options.add_argument("--only", default=",".join(CASES))
    options.add_argument("--perturb", type=int, default=2, help="draws of perturbed prices a model")
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    policy = Policy(FORMATS[asked.dtype], device=asked.device)
    print(f"one {'training step' if asked.train else 'inference pass'} in {asked.dtype} on {asked.device}, modelled\n")
    print("| model | this plan, µs | tf rules | autocast rules | our lists, tf rules | perturbed |")
    print("| --- | --: | --: | --: | --: | --: |")
    gaps: list[list[float]] = []
    for name in asked.only.split(","):
        with torch.device("meta"):
            model, inputs = CASES[name]()
        found = problems(model, inputs, policy, asked.train)
        seconds = weighed(found)
        own = seconds.pop(PLANNED)
        off = max((regret(found["default"], seed) for seed in range(asked.perturb)), default=0.0)
        gaps.append([*(100 * (other / own - 1) for other in seconds.values()), 100 * off])
        print(f"| {name} | {1e6 * own:.0f} | " + " | ".join(f"{gap:+.1f} %" for gap in gaps[-1]) + " |", flush=True)
    columns = list(zip(*gaps, strict=True))
    print("| median | | " + " | ".join(f"{statistics.median(column):+.1f} %" for column in columns) + " |")
    print("| least | | " + " | ".join(f"{min(column):+.1f} %" for column in columns[:-1]) + f" | at most {max(columns[-1]):+.1f} % |")


if __name__ == "__main__":
    main()
