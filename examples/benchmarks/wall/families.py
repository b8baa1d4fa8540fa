"""Fourteen families of decoders at width 1,024, two layers deep, beside torch.autocast, for a version of transformers.

    python examples/benchmarks/wall/families.py [--only llama,phi] [--dtype bf16,fp16] [--length 1024,4096] [--out rows.jsonl]

One step each, in fp32, under torch.autocast and rewritten, of a causal model's logits. A family is right if its gradients are no
further from fp32's than 1.5 times autocast's. Weights are drawn as if trained, which makes attention sharp; `--initial` leaves them
as they are drawn. Each row shows by how much results change with positions in reverse. A row names the versions, so that one file
holds runs under several; a case that has a row there is not run again.

In fp16, products are computed in fp32 from fp16 operands and rounded once, under torch.autocast and rewritten, because a CPU without units
for fp16 takes many times longer for products of its own. Llama's ratio is 1.15 with both.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf
from children import GIGABYTES, Row, chosen, follow, parser, run_cases
from judging import Given, asks_formats, error, formats, seeds, step, warm_up
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from weights import as_trained, of_positions

import amprewrite
from amprewrite.tables.formats import parse_format

FAMILIES = {
    "llama": hf.LlamaConfig, "qwen2": hf.Qwen2Config, "qwen3": hf.Qwen3Config, "gemma2": hf.Gemma2Config, "gemma3": hf.Gemma3TextConfig,
    "mistral": hf.MistralConfig, "mixtral": hf.MixtralConfig, "phi": hf.PhiConfig, "gpt_neox": hf.GPTNeoXConfig, "falcon": hf.FalconConfig,
    "stablelm": hf.StableLmConfig, "cohere": hf.CohereConfig, "bloom": hf.BloomConfig, "mpt": hf.MptConfig,
}  # fmt: skip
WORDS = 2000
SHARE = 1.5
SECONDS = 900.0
PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")}


class Fp16Products(TorchDispatchMode):
    """Products of fp16 operands in fp32, with results rounded to fp16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        low = func in PRODUCTS and any(isinstance(each, Tensor) and each.dtype is torch.float16 for each in args)
        given = [each.float() if low and isinstance(each, Tensor) else each for each in args]
        result = func(*given, **(kwargs or {}))
        return result.half() if low else result


def built(name: str, length: int, width: int, initial: bool) -> tuple[nn.Module, Given]:
    """A causal model of a family in train mode, and its tokens."""
    hf.logging.set_verbosity_error()
    seeds(0)
    config = FAMILIES[name](
        vocab_size=WORDS, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
        max_position_embeddings=length, use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model: nn.Module = hf.AutoModelForCausalLM.from_config(config).float().train()
    return model if initial else as_trained(model), {"input_ids": torch.randint(3, WORDS, (1, length))}


def judged(width: int, initial: bool, case: str) -> Row:
    """The row of a family, format and length: errors of results and gradients, ours and torch.autocast's."""
    warnings.simplefilter("ignore")
    name, dtype, length = case.split()[:3]
    model, given = built(name, int(length), width, initial)
    moved = of_positions(model, given)
    exact = step(model, given)
    low = parse_format(dtype).dtype
    products = Fp16Products() if low is torch.float16 else contextlib.nullcontext()
    with products, torch.autocast("cpu", dtype=low):
        theirs = step(model, given)
    amp = amprewrite.rewrite(model, dtype=dtype)
    with products:
        ours = step(amp, given)
    errors, against = ([error(a, b) for a, b in zip(exact, each, strict=True)] for each in (ours, theirs))
    ratio = errors[1] / against[1]
    row: Row = {"outcome": "right" if ratio <= SHARE else "off", "ratio": ratio, "errors": errors, "autocast": against, "positions": moved}
    return {**row, "why": f"gradients {errors[1]:.2e}, autocast's {against[1]:.2e}", "versions": versions()}


def versions() -> str:
    return f"torch {torch.__version__.partition('+')[0]}, transformers {hf.__version__}"


def table(rows: Sequence[Row]) -> Table:
    """A row a case: gradients' errors, and how much results change with positions in reverse."""
    shown = Table("family, format, tokens", "outcome", "gradients", "autocast's", "ratio", "positions change", "seconds", title=versions())
    for row in (each for each in rows if "ratio" in each):
        moved = "not taken" if row["positions"] is None else f"{row['positions']:.2f}"  # Bloom and MPT count the tokens themselves
        numbers = f"{row['errors'][1]:.2e}", f"{row['autocast'][1]:.2e}", f"{row['ratio']:.2f}", moved
        shown.add_row(" ".join(row["name"].split()[:3]), row["outcome"], *numbers, f"{row['seconds']:.0f}")
    return shown


def main() -> None:
    options = parser(__doc__, SECONDS)
    asks_formats(options)
    options.add_argument("--length", default="1024", help="tokens, with commas between")
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--initial", action="store_true", help="leave weights as they are drawn")
    asked = options.parse_args()
    warm_up()
    kind = f"{asked.width} {'initial' if asked.initial else 'trained'}, {versions()}"
    each = itertools.product(asked.length.split(","), chosen(FAMILIES, asked), formats(asked))
    kept = [f"{name} {dtype} {length} {kind}" for length, name, dtype in each]
    work = functools.partial(judged, asked.width, asked.initial)
    rows = follow(run_cases(kept, work, asked.out, asked.seconds, 2 * GIGABYTES), len(kept), frozenset({"right"}))
    Console(width=140).print(table(rows))
    sys.exit(any(row["outcome"] != "right" for row in rows))


if __name__ == "__main__":
    main()
