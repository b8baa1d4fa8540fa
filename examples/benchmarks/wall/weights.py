"""Weights drawn as if trained, and whether results depend on positions.

Small initial weights leave attention flat: every row of scores is nearly constant, so that wrong positions change no result. A test of
positions needs scores that tell one position from another.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

UNSPECIFIED = 0.02
"""Standard deviation that most configurations give all matrices, whatever their width."""
GAIN = 1.5
"""Scores of attention then have a standard deviation of about two."""


def as_trained(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give a new model weights of the size that training reaches; the draw is the same on every device.

    * A matrix with the usual initial deviation of 0.02 gets GAIN / sqrt(inputs). Any other keeps its author's deviation, times GAIN.
    * Gains of norms and other vectors vary by a fifth. Vectors that begin at zero or nearly so, as biases and layer scales do, are 0.1.
    """
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draws).to(parameter)
            size = float(parameter.double().std(unbiased=False)) if parameter.numel() > 1 else 0.0
            if parameter.dim() < 2 or not size:
                small = float(parameter.abs().mean()) < 1e-2
                parameter.copy_(0.1 * noise if small else parameter * (1 + 0.2 * noise))
            elif 0.8 < size / UNSPECIFIED < 1.2:
                parameter.copy_(noise * GAIN / parameter[0].numel() ** 0.5)
            else:
                parameter.mul_(GAIN)
    return model


def of_positions(model: nn.Module, given: dict[str, Any]) -> float | None:
    """Relative change of the first result with all positions in reverse order; None if the model takes no positions.

    A model whose results hardly change proves nothing about positions, however exact it is. A mask of ones is given where the model takes
    one and has none: without it, transformers takes positions that do not rise by one for sequences of their own, and masks each token.
    """
    first, named = given.get("input_ids"), inspect.signature(model.forward).parameters
    if first is None or "position_ids" not in named:
        return None
    if "attention_mask" in named:
        given = {"attention_mask": torch.ones(first.shape[:2], dtype=torch.long, device=first.device), **given}
    model = copy.deepcopy(model).eval()
    places = torch.arange(first.shape[-1], device=first.device).expand(first.shape[0], -1)
    with torch.no_grad():
        try:
            forth, back = (_first(model(**given, position_ids=each)) for each in (places, places.flip(-1)))
        except Exception:  # most models take positions in this shape; of another shape nothing is known
            return None
    size = float(forth.double().norm())
    return float((forth - back).double().norm()) / size if size else 0.0


def _first(results: Any) -> Tensor:
    found = results[0] if isinstance(results, tuple | list) else next(iter(results.values()))
    if not isinstance(found, Tensor):
        raise TypeError(f"the first result is {type(found).__name__}")
    return found
