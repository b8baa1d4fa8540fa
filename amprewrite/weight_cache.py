"""Low copies of weights, kept between calls for as long as nothing has written the weights."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from amprewrite.cuda_graphs import recording
from amprewrite.pad_ops import held_by_nobody_else, pad_cast
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
        """The copy of `weight` in `dtype`, padded as `layout`, made now where there is none or the weight has changed.

        What a CUDA graph records is made there, and not kept: a replay must read the weights again.
        """
        if recording(weight.device):
            with torch.no_grad():
                return pad_cast(weight, dtype, layout).requires_grad_(weight.requires_grad)
        found = self._fresh(weight, dtype, layout)
        if found is not None:
            return found
        with torch.inference_mode(False), torch.no_grad():  # a copy that a training forward may read, too
            return self._keep(weight, layout, pad_cast(weight, dtype, layout))

    def get_many(self, weights: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Copies that outlive a training forward: all that are stale are made in one `_foreach_copy_`.

        Old copies are written over where nobody else holds them; a backward may. What a CUDA graph records is copied there
        and not kept, as by `get`.
        """
        captured = recording(weights[0].device)
        found = [None if captured else self._fresh(weight, dtype, ()) for weight, dtype in zip(weights, dtypes, strict=True)]
        stale = [place for place, copy in enumerate(found) if copy is None]
        if not stale:
            return found  # type: ignore[return-value]
        with torch.inference_mode(False), torch.no_grad():
            made = [self._room(weights[place], dtypes[place], captured) for place in stale]
            torch._foreach_copy_(made, [weights[place] for place in stale])
        for place, copy in zip(stale, made, strict=True):
            found[place] = copy if captured else self._keep(weights[place], (), copy)
        return found  # type: ignore[return-value]

    def _fresh(self, weight: torch.Tensor, dtype: torch.dtype, layout: Layout) -> torch.Tensor | None:
        if weight.is_inference():  # such tensors count no versions
            return None
        found = self._copies.get((id(weight), dtype, layout))
        if found is not None and found[1] == weight._version and found[2] == weight.data_ptr() and found[0]() is weight:
            return found[3]
        return None

    def _room(self, weight: torch.Tensor, dtype: torch.dtype, captured: bool) -> torch.Tensor:
        """Memory for a copy: that of the last one, or new."""
        found = None if captured or weight.is_inference() else self._copies.pop((id(weight), dtype, ()), None)
        if found is not None and found[0]() is weight:
            copy = found[3]
            del found
            if copy.shape == weight.shape and copy.device == weight.device and held_by_nobody_else(copy):
                return copy.requires_grad_(False)
        return torch.empty_like(weight, dtype=dtype)

    def _keep(self, weight: torch.Tensor, layout: Layout, copy: torch.Tensor) -> torch.Tensor:
        if weight.is_inference():
            return copy
        key = (id(weight), copy.dtype, layout)
        copy.requires_grad_(weight.requires_grad)
        self._copies[key] = (weakref.ref(weight, lambda _: self._copies.pop(key, None)), weight._version, weight.data_ptr(), copy)
        return copy

    def clear(self) -> None:
        self._copies.clear()

    def __len__(self) -> int:
        return len(self._copies)
