"""Every architecture of transformers, shrunk, rewritten and trained a step in fp16 and bf16, beside fp32 and torch.autocast.

    python examples/benchmarks/wall/models.py [--dtype bf16,fp16] [--out models.jsonl] [--only bert,llama] [--shard 0/20] [--html FILE]
    python examples/benchmarks/wall/models.py --length 1024  # positions that low formats do not hold, weights as if trained
    python examples/benchmarks/wall/models.py --side 224 --sound 10 --width 1024 --batch 1

A configuration of each model type is made small by the names of its fields: widths, depths, heads, vocabularies, image sizes. Where the
small widths do not fit each other, all are divided by one number. Nothing is downloaded, and no model has a rule of its own. What fp32 does
not run shrunk, says so and counts for nothing. Models that hold one of timm's ask for timm and pillow, not for torchvision.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import stand_ins
import torch
import transformers
from children import chosen, follow, parser, run_cases
from dividing import Division
from feeding import inputs
from judging import GOOD, SECONDS, Given, asks_formats, formats, judge, seeds, show, warm_up
from shrinking import shrink
from sizes import SIZES, Sizes, asks_sizes, lengthen, sizes_of, take
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from weights import as_trained

WAYS: tuple[Callable[[Any], Any], ...] = (
    shrink, Division(8), Division(8, heads=True), Division(4), Division(4, heads=True), Division(16), Division(1)
)  # fmt: skip
"""How a configuration is made small; what fp32 runs first, counts."""


def built(sizes: Sizes, name: str) -> tuple[nn.Module, Given]:
    """The base model of a type, made small, in train mode, and its inputs.

    Raises:
        Exception: what the first way to make it small raised, if fp32 ran none
    """
    transformers.logging.set_verbosity_error()
    take(sizes)
    problems: list[Exception] = []
    for way in WAYS:
        try:
            return _small(name, way)
        except Exception as problem:  # the next way may do
            problems.append(problem)
    raise problems[0]


def _small(name: str, way: Callable[[Any], Any]) -> tuple[nn.Module, Given]:
    config = lengthen(way(transformers.CONFIG_MAPPING[name]()))
    seeds(0)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in transformers.AutoModel.from_config(copy.deepcopy(config)).parameters())
    if size > SIZES.largest:
        raise ValueError(f"it has {size:.2g} parameters when shrunk")
    seeds(0)
    model: nn.Module = transformers.AutoModel.from_config(config).float().train()
    if SIZES.trained:
        as_trained(model)
    seeds(2)
    return model, inputs(model)


def lend_timm() -> None:
    """Let transformers find timm if it is installed, also without torchvision, which it asks for as well: no model needs it."""
    asked = transformers.utils.import_utils
    if importlib.util.find_spec("timm") is None or importlib.util.find_spec("PIL") is None:
        return
    asked.is_timm_available.cache_clear()
    asked.is_torchvision_available.cache_clear()
    with stand_ins.lent():
        importlib.import_module("timm")
        asked.is_timm_available()  # the answer is kept
    asked.is_torchvision_available.cache_clear()


def main() -> None:
    options = parser(__doc__, SECONDS)
    asks_formats(options)
    asks_sizes(options)
    asked = options.parse_args()
    kept = chosen(MODEL_MAPPING_NAMES, asked)
    lend_timm()
    warm_up()
    work = functools.partial(judge, functools.partial(built, sizes_of(asked)), formats(asked))
    rows = follow(run_cases(kept, work, asked.out, asked.seconds), len(kept), GOOD)
    show(f"transformers {transformers.__version__}, shrunk", rows, asked)


if __name__ == "__main__":
    main()
