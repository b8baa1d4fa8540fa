"""Whether training, evaluation, inference and export of a model give the same numbers, and what that costs.

    python examples/benchmarks/parity.py [--only gpt2,bert] [--dtype bf16,fp16] [--rows] [--cost] [--device a100]
    python examples/benchmarks/parity.py --compiler [--only gpt2,bert] [--layers 1] [--dtype bf16]

Small models with random weights run in train mode (without dropout), in eval mode, under no_grad, under inference_mode, and as an exported
program. A row has the largest difference of log-probabilities between the first and the others: of the fp32 model, under torch.autocast,
and rewritten. With `--rows` follow rows of a batch of 8 against the same rows alone: of fp32, of torch.autocast, of a copy wholly in the
format, and ours, in units in the last place of the format that computes.

`--compiler` trains each model one step in eager code, through inductor, and through "inductor-exact": relative L2 difference of outputs
and of gradients from eager code's, and the kernels that inductor generates by its own count, with the calls of libraries beside them;
`--fp32` does so in fp32, too. C++ is built without vectors, which takes a third of the time; `--vectors` builds it with them.

`--cost` plans base-size architectures on torch's meta device, and compares the modelled time of a plan that serves training and inference
with that of plans of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.utils import logging

import amprewrite
from amprewrite.ir.cost import TICK, price
from amprewrite.ir.policies.policy import Policy
from amprewrite.passes import decide
from amprewrite.passes.driver import read_problem
from amprewrite.tables.formats import FORMATS, FP32

WORDS, LENGTH, BATCH = 211, 16, 8
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
DRY: dict[str, Any] = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Inputs = dict[str, Tensor]
Forward = Callable[[nn.Module, Inputs], Tensor]


def reader(model: type, config: Any) -> Callable[[], tuple[nn.Module, Inputs]]:
    """A model of text, and token ids."""
    return lambda: (model(config), {"input_ids": torch.randint(3, WORDS, (BATCH, LENGTH))})


def writer(model: type, config: Any) -> Callable[[], tuple[nn.Module, Inputs]]:
    """A model of text that writes it from left to right, without a cache."""
    config.use_cache = False
    return reader(model, config)


def t5() -> tuple[nn.Module, Inputs]:
    config = hf.T5Config(
        vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
        use_cache=False,
    )
    model, inputs = reader(hf.T5ForConditionalGeneration, config)()
    return model, {**inputs, "decoder_input_ids": inputs["input_ids"].flip(1)}


def padded_bert() -> tuple[nn.Module, Inputs]:
    model, inputs = reader(hf.BertForMaskedLM, hf.BertConfig(**DRY))()
    lengths = torch.arange(LENGTH - BATCH, LENGTH)
    return model, {**inputs, "attention_mask": (torch.arange(LENGTH) <= lengths[:, None]).long()}


def image(model: type, config: Any, size: int) -> Callable[[], tuple[nn.Module, Inputs]]:
    return lambda: (model(config), {"pixel_values": torch.randn(BATCH, 3, size, size)})


GPT2 = hf.GPT2Config(
    vocab_size=WORDS, n_embd=64, n_layer=3, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ENDS
)
OPT = hf.OPTConfig(
    vocab_size=WORDS, hidden_size=64, ffn_dim=128, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64,
    word_embed_proj_dim=64, dropout=0.0, **ENDS,
)  # fmt: skip
DISTILBERT = hf.DistilBertConfig(vocab_size=WORDS, dim=64, hidden_dim=128, n_layers=3, n_heads=4, dropout=0.0, attention_dropout=0.0)
DEBERTA = hf.DebertaV2Config(**DRY, relative_attention=True, position_buckets=16, pos_att_type=["p2c", "c2p"])
VIT = hf.ViTConfig(**{k: v for k, v in DRY.items() if k != "vocab_size"}, image_size=32, patch_size=8, num_labels=10)
RESNET = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], num_labels=10)
CONVNEXT = hf.ConvNextConfig(hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 2, 1], num_labels=10)
MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    "gpt2": writer(hf.GPT2LMHeadModel, GPT2),
    "llama": writer(hf.LlamaForCausalLM, hf.LlamaConfig(**GROUPED)),
    "qwen2": writer(hf.Qwen2ForCausalLM, hf.Qwen2Config(**GROUPED)),
    "qwen3": writer(hf.Qwen3ForCausalLM, hf.Qwen3Config(**GROUPED, head_dim=16)),
    "gemma": writer(hf.GemmaForCausalLM, hf.GemmaConfig(**GROUPED, head_dim=16)),
    "mistral": writer(hf.MistralForCausalLM, hf.MistralConfig(**GROUPED)),
    "opt": writer(hf.OPTForCausalLM, OPT),
    "phi": writer(hf.PhiForCausalLM, hf.PhiConfig(**SIZES)),
    "gpt-neox": writer(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**SIZES)),
    "falcon": writer(hf.FalconForCausalLM, hf.FalconConfig(vocab_size=WORDS, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)),
    "bloom": writer(hf.BloomForCausalLM, hf.BloomConfig(vocab_size=WORDS, hidden_size=64, n_layer=3, n_head=4)),
    "mixtral": writer(hf.MixtralForCausalLM, hf.MixtralConfig(**GROUPED, num_local_experts=4)),
    "bert": reader(hf.BertForMaskedLM, hf.BertConfig(**DRY)),
    "bert, padded": padded_bert,
    "roberta": reader(hf.RobertaForMaskedLM, hf.RobertaConfig(**DRY)),
    "distilbert": reader(hf.DistilBertForMaskedLM, DISTILBERT),
    "electra": reader(hf.ElectraForMaskedLM, hf.ElectraConfig(**DRY, embedding_size=32)),
    "albert": reader(hf.AlbertForMaskedLM, hf.AlbertConfig(**DRY, embedding_size=32)),
    "deberta-v2": reader(hf.DebertaV2ForMaskedLM, DEBERTA),
    "t5": t5,
    "vit": image(hf.ViTForImageClassification, VIT, 32),
    "convnext": image(hf.ConvNextForImageClassification, CONVNEXT, 64),
    "resnet, frozen statistics": image(hf.ResNetForImageClassification, RESNET, 64),
}
PEAKED = 3.0
"""Matrices of models of text are multiplied by this: log-probabilities of new ones are all but equal."""


def made(name: str, layers: int = 0) -> tuple[nn.Module, Inputs]:
    """A model and its inputs, of fewer `layers` if a number is given."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    if layers:
        fewer(model, layers)
    for parameter in model.parameters() if "input_ids" in inputs else ():
        if parameter.dim() > 1:
            parameter.data.mul_(PEAKED)
    return model, inputs


def fewer(model: nn.Module, layers: int) -> None:
    """Leave the first `layers` of each list of alike modules."""
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.ModuleList) and len({tuple(p.shape for p in each.parameters()) for each in part}) == 1:
                setattr(module, name, part[:layers])


def train(model: nn.Module) -> None:
    """Train mode, but for the statistics of batch norms."""
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def log_probabilities(model: nn.Module, inputs: Inputs, keep: bool = False) -> Tensor:
    """Detached, or with their graph if that is to be kept."""
    logits = model(**inputs).logits
    return (logits if keep else logits.detach()).float().log_softmax(-1).clone()  # type: ignore[no-any-return]


def modes(model: nn.Module, inputs: Inputs, export: Callable[[], Any] | None, run: Forward) -> Iterator[Tensor]:
    """Log-probabilities in train mode, then in every other way to run the model."""
    train(model)
    yield run(model, inputs)
    model.eval()
    yield run(model, inputs)
    with torch.no_grad():
        yield run(model, inputs)
    with torch.inference_mode():
        yield run(model, inputs)
    if export is not None:
        exported = export().module()
        with torch.no_grad():
            yield run(exported, inputs)


def spread(found: Iterator[Tensor]) -> float:
    """The largest difference between the first and any other."""
    first, *others = found
    return max(float((first.double() - other.double()).abs().max()) for other in others)


def rows_apart(model: nn.Module, inputs: Inputs, eps: float, run: Forward = log_probabilities) -> float:
    """The largest difference between rows of a batch and the same rows alone, in units of the last place of the largest result."""
    model.eval()
    with torch.no_grad():
        together = run(model, inputs).double()
        alone = torch.cat([run(model, {k: v[i : i + 1] for k, v in inputs.items()}) for i in range(BATCH)]).double()
    return float((together - alone).abs().max() / together.abs().max() / eps)


def under_autocast(dtype: torch.dtype) -> Forward:
    def run(model: nn.Module, inputs: Inputs) -> Tensor:
        with torch.autocast("cpu", dtype, cache_enabled=False):
            return log_probabilities(model, inputs)

    return run


def rows_of(model: nn.Module, amp: nn.Module, inputs: Inputs, low: torch.dtype) -> tuple[float, ...]:
    """Rows apart of fp32, of torch.autocast, of a copy wholly in `low`, and of ours."""
    eps, half = torch.finfo(low).eps, copy.deepcopy(model).to(low)
    cast = {name: value.to(low) if value.is_floating_point() else value for name, value in inputs.items()}
    return (
        rows_apart(model, inputs, torch.finfo(FP32.dtype).eps),
        rows_apart(model, inputs, eps, under_autocast(low)),
        rows_apart(half, cast, eps),
        rows_apart(amp, inputs, eps),
    )


def measured(name: str, dtype: str, rows: bool) -> tuple[float, ...]:
    """One row of the table: spreads of fp32, of torch.autocast and of ours, then rows apart, if they are asked for."""
    low = FORMATS[dtype].dtype
    torch._dynamo.reset()
    model, inputs = made(name)
    exact = spread(modes(model, inputs, lambda: torch.export.export(model, (), dict(inputs), strict=False), log_probabilities))
    theirs = spread(modes(model, inputs, None, under_autocast(low)))
    amp = amprewrite.rewrite(model, dtype=dtype)
    ours = spread(modes(amp, inputs, lambda: amp.export_program((), dict(inputs)), log_probabilities))  # type: ignore[operator]
    return exact, theirs, ours, *(rows_of(model, amp, inputs, low) if rows else ())


def compare(names: list[str], formats: list[str], rows: bool) -> None:
    print("largest difference of log-probabilities, train mode against the other ways to run a model\n")
    print("| model | format | fp32 | torch.autocast | ours |" + " rows apart, ulps: fp32 | torch.autocast | all half | ours |" * rows)
    print("| --- | --- | --: | --: | --: |" + " --: | --: | --: | --: |" * rows)
    for dtype in formats:
        for name in names:
            found = measured(name, dtype, rows)
            cells = [f"{each:.1e}" if each else "0" for each in found[:3]] + [f"{each:.2f}" for each in found[3:]]
            print(f"| {name} | {dtype} | " + " | ".join(cells) + " |", flush=True)


class Counted:
    """Inductor's hook after fusion: how many kernels it generates, and how many calls of libraries it makes."""

    def __init__(self) -> None:
        self.kernels = self.calls = 0

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor.ir import MultiOutput
        from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

        for node in nodes:
            if isinstance(node, ExternKernelSchedulerNode):
                self.calls += not isinstance(node.node, MultiOutput)  # one result of a call that has several
            else:
                self.kernels += not isinstance(node, NopKernelSchedulerNode)
        return nodes


def one_step(name: str, layers: int, dtype: str, backend: str) -> tuple[Tensor, Tensor, int, Counted]:
    """Outputs and gradients of a step of training, what `metrics` counts, and what the scheduler holds."""
    from torch._inductor import config, metrics

    torch._dynamo.reset()
    metrics.reset()
    model, inputs = made(name, layers)
    train(model)
    counted = Counted()
    run = torch.compile(model, backend=backend) if dtype == FP32.name else amprewrite.rewrite(model, dtype=dtype, backend=backend)
    with config.patch(_post_fusion_custom_pass=counted, force_disable_caches=True):
        outputs = log_probabilities(run, inputs, keep=True)
        outputs.square().mean().backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return outputs.detach(), gradients, metrics.generated_kernel_count, counted


def apart(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def compilers(names: list[str], formats: list[str], layers: int, fp32: bool) -> None:
    print("relative L2 difference from eager code, outputs and gradients of one step")
    print("kernels by inductor's metrics; generated kernels + calls of libraries by its scheduler\n")
    print("| model | through | format | outputs | gradients | kernels | kernels + calls |")
    print("| --- | --- | --- | --: | --: | --: | --: |")
    for dtype in formats:
        for name in names:
            for format_, backend in ((dtype, "inductor-exact"), (dtype, "inductor"), *([(FP32.name, "inductor")] if fp32 else [])):
                want, wanted, *_ = one_step(name, layers, format_, "eager")
                got, found, kernels, counted = one_step(name, layers, format_, backend)
                differ = [f"{each:.1e}" if each else "0" for each in (apart(got, want), apart(found, wanted))]
                cells = [name, backend, format_, *differ, str(kernels), f"{counted.kernels} + {counted.calls}"]
                print("| " + " | ".join(cells) + " |", flush=True)


def planned(model: nn.Module, inputs: dict[str, Any], policy: Policy, grad: bool) -> float:
    """Modelled seconds of one step of training or one pass without gradients, by its own prices."""
    seconds: list[float] = []

    def keep(module: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., Any]:
        problem = read_problem(module, policy, name=f"graph{len(seconds)}", training=grad).problem
        seconds.append(price(problem.graph, decide(problem).colours, problem.own_costs.time).total * TICK)
        return module.forward

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        torch.compile(model.eval(), backend=keep)(**inputs)
    return sum(seconds)


def costs(names: list[str], formats: list[str], device: str, parity: float) -> None:
    from planner_cost import CASES

    print(f"modelled time on {device} of one plan for training and inference, over that of plans of their own\n")
    print("| model | format | step of training | pass without gradients |")
    print("| --- | --- | --: | --: |")
    found: list[tuple[float, float]] = []
    for dtype in formats:
        for name in names or CASES:
            with torch.device("meta"):
                model, inputs = CASES[name]()
            own, shared = (Policy(FORMATS[dtype], device=device, parity=each) for each in (None, parity))
            step, run = (planned(model, inputs, shared, grad) / planned(model, inputs, own, grad) for grad in (True, False))
            found.append((step, run))
            print(f"| {name} | {dtype} | {step:.3f} | {run:.3f} |", flush=True)
    for word, of in (("median", statistics.median), ("most", max)):
        print(f"| {word} | | " + " | ".join(f"{of(column):.3f}" for column in zip(*found, strict=True)) + " |")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="")
    options.add_argument("--dtype", default="bf16,fp16")
    options.add_argument("--rows", action="store_true", help="rows of a batch against the same rows alone, too")
    options.add_argument("--compiler", action="store_true", help="eager code against inductor and inductor-exact")
    options.add_argument("--layers", type=int, default=1, help="layers of each model, for --compiler")
    options.add_argument("--fp32", action="store_true", help="the fp32 model through inductor, too, for --compiler")
    options.add_argument("--vectors", action="store_true", help="vectorised C++, for --compiler")
    options.add_argument("--cost", action="store_true")
    options.add_argument("--device", default="a100")
    options.add_argument("--parity", type=float, default=1.0, help="how much training counts, for --cost")
    asked = options.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    names, formats = [name for name in asked.only.split(",") if name], asked.dtype.split(",")
    with contextlib.suppress(KeyboardInterrupt):
        if asked.compiler:
            from torch._inductor import config

            with config.patch({} if asked.vectors else {"cpp.simdlen": 1}):
                compilers(names or list(MODELS), formats, asked.layers, asked.fp32)
        elif asked.cost:
            costs(names, formats, asked.device, asked.parity)
        else:
            compare(names or list(MODELS), formats, asked.rows)


if __name__ == "__main__":
    main()
