"""Saves loss scales in the state_dict of an optimizer, so that any code that saves and loads the optimizer also resumes the scales.

1. Saving: `state_dict()` of a guarded optimizer also has the states of its loss scales, under KEY in its first parameter group.
2. Loading: torch copies all entries of the saved groups into the groups of the optimizer. The states are taken out of there when the
   optimizer is loaded, when it is guarded, and before each forward of a model that it trains.
3. If an optimizer has several loss scales, the states belong to them in order: the order of the models that it trains.
4. Several optimizers may step parts of one model and carry its scale. Their checkpoints bring the same state, and only the first is loaded.
   The scale may have changed by the time when the second state arrives, and must not be reset.

Only dynamic scales change, so only dynamic scales are loaded. A static scale has the value that the code gives.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer

from amprewrite.runtime.training.loss_scale import LossScale
from amprewrite.runtime.training.nonfinite import params_of
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.errors import AmpRewriteWarning, PolicyError

KEY = "amprewrite_loss_scale"
"""Key in the first parameter group of an optimizer's state_dict. Its value is the list of states of loss scales."""

Brought = tuple["weakref.ref[Optimizer]", Any]
_BROUGHT: weakref.WeakKeyDictionary[LossScale, Brought] = weakref.WeakKeyDictionary()
"""For each scale that was loaded: the optimizer whose checkpoint brought the latest state, and this state."""


def save(scales: Sequence[LossScale], state: dict[str, Any]) -> None:
    """Add the states of `scales` to `state`, an optimizer's state_dict, if one of them is dynamic."""
    groups = state.get("param_groups")
    if groups and any(scale.kind == "dynamic" for scale in scales):
        groups[0][KEY] = [scale.state_dict() for scale in scales]


class Arrived:
    """Loss-scale states that a checkpoint brought to one optimizer. Each waits until `resume` is given the `LossScale` to load it into."""

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}

    def resume(self, optimizer: Optimizer, scales_of: Callable[[], Sequence[LossScale]]) -> None:
        """Take the states of a checkpoint out of the optimizer's first group, if there are any, and load them into its scales, in order.

        `scales_of` returns the scales of the models that the optimizer trains. A state for which there is no scale yet is kept.
        Raises PolicyError if the entry or a state in it is invalid. Warns if a state belongs to a scale that is not dynamic.
        """
        if optimizer.param_groups and KEY in optimizer.param_groups[0]:
            found = optimizer.param_groups[0].pop(KEY)
            if not isinstance(found, list | tuple):
                raise PolicyError(f"{KEY} in the optimizer's first parameter group holds {shown(found)}; it must be a list of states")
            self._states = dict(enumerate(found))
        if not self._states:
            return
        scales = scales_of()
        for place in [place for place in self._states if place < len(scales)]:
            _load(scales[place], self._states.pop(place), optimizer)


def _load(scale: LossScale, state: Any, optimizer: Optimizer) -> None:
    if scale.kind != "dynamic":
        warnings.warn(
            f"the checkpoint of this {type(optimizer).__name__} has a loss scale, which is left out: this model's own is {scale!r}",
            AmpRewriteWarning,
            stacklevel=2,
        )
        return
    earlier = _BROUGHT.get(scale)
    bringer = None if earlier is None else earlier[0]()
    if earlier is None or bringer is None or earlier[1] != state or not _share_nothing(bringer, optimizer):
        scale.load_state_dict(state)
        _BROUGHT[scale] = weakref.ref(optimizer), state


def _share_nothing(one: Optimizer, other: Optimizer) -> bool:
    """True if the two optimizers have no parameter in common."""
    return {*map(id, params_of(one))}.isdisjoint(map(id, params_of(other)))
