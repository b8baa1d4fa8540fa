"""Sizes that grow while a model generates: the batch, the prompt, what a cache holds. They are captured dynamic at once.

Dynamo takes a size for fixed until it has seen another one: a prompt and a step of decoding would be captured once for each change.
A size of one stays apart, for PyTorch computes otherwise with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from amprewrite.runtime.ambient.low_cache import layers_of, tensors_of

_IN_CACHE, _IN_STATES = (0, 2), (0, 1)
"""The dims of batch and length: of keys and values, batch × heads × length × width, and of hidden states, batch × length × width."""


def mark_growing(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Tell Dynamo which sizes of the arguments of a step of `generate()` will change."""
    for value in (*args, *kwargs.values()):
        for tensor, dims in _growing(value):
            torch._dynamo.maybe_mark_dynamic(tensor, [dim for dim in dims if tensor.shape[dim] > 1])


def _growing(value: Any) -> Iterator[tuple[Tensor, Iterable[int]]]:
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            yield value, range(value.dim())  # tokens, positions and masks have no other sizes
        elif value.dim() == 3:
            yield value, _IN_STATES
    elif isinstance(value, Mapping):
        for inner in value.values():  # what an encoder gave
            yield from _growing(inner)
    else:
        for layer in layers_of(value):
            for held in tensors_of(layer):
                if isinstance(held, Tensor) and held.dim() == 4:
                    yield held, _IN_CACHE


__all__ = ["mark_growing"]
