"""The loss scale in an optimizer's own state_dict, so that whatever saves and loads the optimizer resumes the scale.

1. Saving: `state_dict()` of a guarded optimizer gets the states of its loss scales, under KEY in its first parameter group.
2. Loading: torch puts what stands in the saved groups into the optimizer's own. There it is found, and taken out, when the
   optimizer is loaded, guarded for the first time, or about to be used by a forward.
3. The scales of one optimizer are known by their order, which is that of the models that it trains.
4. One scale may be carried by several optimizers, each with a part of the parameters. They bring the same state; it is loaded once,
   for a scale that has moved on since the first of them was found must not go back.

Only dynamic scales move, so only those are resumed. A static one is what the code says.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

from torch.optim.optimizer import Optimizer

from amprewrite.runtime.training.loss_scale import LossScale
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.errors import AmpRewriteWarning, PolicyError

KEY = "amprewrite_loss_scale"
"""Where the first parameter group of a checkpoint has the list of states."""

Brought = tuple["weakref.ref[Optimizer]", Any]
_BROUGHT: weakref.WeakKeyDictionary[LossScale, Brought] = weakref.WeakKeyDictionary()
"""The optimizer that resumed a scale last, and the state it brought."""


def save(scales: Sequence[LossScale], state: dict[str, Any]) -> None:
    """Put the states of these scales into an optimizer's state_dict."""
    groups = state.get("param_groups")
    if groups and any(scale.kind == "dynamic" for scale in scales):
        groups[0][KEY] = [scale.state_dict() for scale in scales]


class Arrived:
    """The loss scales that a checkpoint has brought to one optimizer, until the scale that they belong to is known."""

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}

    def resume(self, optimizer: Optimizer, scales: Sequence[LossScale]) -> None:
        """Load what came with a checkpoint, if any, into these scales."""
        if optimizer.param_groups and KEY in optimizer.param_groups[0]:
            found = optimizer.param_groups[0].pop(KEY)
            if not isinstance(found, list | tuple):
                raise PolicyError(f"{KEY} in the optimizer's first parameter group holds {shown(found)}; it must be a list of states")
            self._states = dict(enumerate(found))
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
    """Whether two optimizers step different parameters."""
    own = {id(p) for group in one.param_groups for p in group["params"]}
    return not any(id(p) in own for group in other.param_groups for p in group["params"])


__all__ = ["KEY", "Arrived", "save"]
