"""Mark the sizes that vary while a model generates (batch, prompt, length of the cache), so that Dynamo captures them dynamic at once.

Without a mark Dynamo treats a size as fixed until it sees another value: the prompt and the steps of decoding would be captured again
for each new size. Sizes of one are not marked, because PyTorch broadcasts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from amprewrite.runtime.ambient.low_cache import layers_of, tensors_of

_IN_CACHE, _IN_STATES = (0, 2), (0, 1)
"""Dims of batch and length: in keys and values (batch × heads × length × width), and in hidden states (batch × length × width)."""


def mark_growing(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """In the arguments of a step of `generate()`, mark the dims whose sizes will change, so that Dynamo captures them as dynamic."""
    for value in (*args, *kwargs.values()):
        for tensor, dims in _growing(value):
            torch._dynamo.maybe_mark_dynamic(tensor, [dim for dim in dims if tensor.shape[dim] > 1])


def _growing(value: Any) -> Iterator[tuple[Tensor, Iterable[int]]]:
    """Yield each tensor in `value` with the dims whose sizes vary. `value` is a tensor, a mapping of tensors, or a cache."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            yield value, range(value.dim())  # tokens, positions and masks have only batch and length dims
        elif value.dim() == 3:
            yield value, _IN_STATES
    elif isinstance(value, Mapping):
        for inner in value.values():  # a mapping is, for example, the outputs of an encoder
            yield from _growing(inner)
    else:
        for layer in layers_of(value):
            for held in tensors_of(layer):
                if isinstance(held, Tensor) and held.dim() == 4:
                    yield held, _IN_CACHE
