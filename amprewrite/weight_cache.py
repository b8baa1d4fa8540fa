"""Low copies of weights, kept between inference calls for as long as nothing has written the weights."""

from __future__ import annotations

import weakref

import torch

from amprewrite.pad_ops import pad_cast
from amprewrite.pad_plan import Layout


class WeightCache:
    """Copies by (tensor, dtype, padded layout), each valid for one version of its tensor.

    PyTorch counts every write to a tensor but those through `.data`: a write of that kind between two inference calls is not
    seen. Call `clear()` after one, switch the mode once, or rewrite with `cache_weights=False`.

    A copy has its weight's `requires_grad`, though no graph is recorded: `matmul` looks at the flag to choose between one mm
    and an expanded bmm (should_fold in ATen/native/LinearAlgebra.cpp).
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype, Layout], tuple[weakref.ref[torch.Tensor], int, int, torch.Tensor]] = {}

    def get(self, weight: torch.Tensor, dtype: torch.dtype, layout: Layout = ()) -> torch.Tensor:
        """The copy of `weight` in `dtype`, padded as `layout`, made now where there is none or the weight has changed."""
        if weight.is_inference():  # such tensors count no versions
            return pad_cast(weight, dtype, layout)
        key = (id(weight), dtype, layout)
        found = self._copies.get(key)
        if found is not None and found[1] == weight._version and found[2] == weight.data_ptr() and found[0]() is weight:
            return found[3]
        copy = pad_cast(weight.detach(), dtype, layout).requires_grad_(weight.requires_grad)
        self._copies[key] = (weakref.ref(weight, lambda _: self._copies.pop(key, None)), weight._version, weight.data_ptr(), copy)
        return copy

    def clear(self) -> None:
        self._copies.clear()

    def __len__(self) -> int:
        return len(self._copies)
