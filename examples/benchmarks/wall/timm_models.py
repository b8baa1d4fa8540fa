"""timm's registered models at small images, rewritten and trained a step in fp16 and bf16, beside fp32 and torch.autocast.

    python examples/benchmarks/wall/timm_models.py [--dtype bf16,fp16] [--out timm.jsonl] [--only resnet] [--shard 0/20] [--html FILE]

    pip install --no-deps timm pillow  # where there is no torchvision for the torch that is installed

timm imports torchvision for its data pipelines and for one class that some of its tools ask for; no model needs it. Where torchvision
is not there, names that stand for its classes are imported instead. One model of each file and kind of name is tried unless `--all` is
given: the smallest name of those that differ in size alone.
"""

from __future__ import annotations

import contextlib
import functools
import re

import stand_ins
import torch
from children import chosen, follow, parser, run_cases
from judging import GOOD, SECONDS, Given, asks_formats, formats, judge, seeds, show, warm_up
from torch import nn

SIDES = (64, 96, 224)
"""Sides of an image in pixels; the first with which a model can be made and run."""
LARGEST = 3e7
"""Parameters beyond which a model is too large for this wall."""


# -- models ----------------------------------------------------------------------------------
class TooLarge(ValueError):
    """A model has more parameters than this wall takes."""


SMALL = r"(_|^)(tiny|small|nano|pico|femto|atto|micro|mini|xx?s|s|ti)(_|$|\d)"
SIZES = r"(_|^)(tiny|small|base|large|huge|giant|xlarge|xxlarge|nano|pico|femto|atto|micro|mini|[smlbx]+)(?=_|$)|\d+"


def kinds(names: list[str]) -> list[str]:
    """One name of those that differ in numbers, sizes and what they were trained on: that of a small model if its name tells."""
    first: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (re.search(SMALL, name) is None, len(name), name)):
        first.setdefault(re.sub(SIZES, "", name), name)
    return sorted(first.values())


def _check_size(model: nn.Module) -> None:
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST:
        raise TooLarge(f"it has {size:.2g} parameters")


def built(sides: tuple[int, ...], name: str) -> tuple[nn.Module, Given]:
    """A registered model without weights, in train mode, and two images."""
    import timm

    with contextlib.suppress(NotImplementedError, RuntimeError), torch.device("meta"):  # some read values when they are made
        _check_size(timm.create_model(name))
    problems: list[Exception] = []
    for side in sides:
        for options in ({"img_size": side}, {}):
            seeds(0)
            try:
                model: nn.Module = timm.create_model(name, num_classes=10, **options).float().train()
                _check_size(model)
                seeds(2)
                given = {"x": torch.randn(2, 3, side, side)}
                with torch.no_grad():
                    model(**given)
                return model, given
            except TooLarge:
                raise
            except Exception as problem:  # the next side may do
                problems.append(problem)
    raise problems[0]


def main() -> None:
    options = parser(__doc__, SECONDS)
    asks_formats(options)
    options.add_argument("--side", type=int, help=f"pixels of a side of an image; else the first of {SIDES} that a model takes")
    options.add_argument("--all", action="store_true", help="every registered name")
    asked = options.parse_args()
    stand_ins.install()
    import timm

    names = timm.list_models()
    kept = chosen(names if asked.all else kinds(names), asked)
    warm_up()
    work = functools.partial(judge, functools.partial(built, (asked.side,) if asked.side else SIDES), formats(asked))
    rows = follow(run_cases(kept, work, asked.out, asked.seconds), len(kept), GOOD)
    show(f"timm {timm.__version__}", rows, asked)


if __name__ == "__main__":
    main()
