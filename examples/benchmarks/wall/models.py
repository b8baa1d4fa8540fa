"""Every architecture of transformers, shrunk, rewritten and trained a step in fp16 and bf16, beside fp32 and torch.autocast.

    python examples/benchmarks/wall/models.py [--dtype bf16,fp16] [--out models.jsonl] [--only bert,llama] [--shard 0/20] [--html FILE]

A configuration of each model type is made small by the names of its fields: widths, depths, heads, vocabularies, image sizes. Nothing is
downloaded, and no model has a rule of its own. What fp32 does not run shrunk, says so and counts for nothing.
"""

from __future__ import annotations

import copy
import functools

import torch
import transformers
from children import chosen, follow, parser, run_cases
from judging import GOOD, SECONDS, Given, asks_formats, formats, judge, seeds, show, warm_up
from shrinking import inputs, shrink
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

LARGEST = 3e7
"""Parameters beyond which a model has not been made small."""


def built(name: str) -> tuple[nn.Module, Given]:
    """The base model of a type, shrunk, in train mode, and its inputs."""
    transformers.logging.set_verbosity_error()
    config = shrink(transformers.CONFIG_MAPPING[name]())
    seeds(0)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in transformers.AutoModel.from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"it has {size:.2g} parameters when shrunk")
    seeds(0)
    model: nn.Module = transformers.AutoModel.from_config(config).float().train()
    seeds(2)
    return model, inputs(model)


def main() -> None:
    options = parser(__doc__)
    asks_formats(options)
    asked = options.parse_args()
    kept = chosen(MODEL_MAPPING_NAMES, asked)
    warm_up()
    rows = follow(run_cases(kept, functools.partial(judge, built, formats(asked)), asked.out, SECONDS), len(kept), GOOD)
    show(f"transformers {transformers.__version__}, shrunk", rows, asked)


if __name__ == "__main__":
    main()
