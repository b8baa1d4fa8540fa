"""The graphs that a forward ran, for the recomputation that its backward asks for.

An activation checkpoint runs a part of a forward again in backward, and what that saves must be what the forward saved. Meanwhile the
graph may have been decided anew. Autograd numbers its nodes in the order in which they are made: the node that asks for the
recomputation tells by its number what was there when it was made. That holds where saved tensors are asked for. A reentrant checkpoint
compares nothing: its recomputation is a forward of its own, on what is there now.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch.utils.checkpoint import CheckpointFunction

from amprewrite.torch_internals.autograd import current_backward, saved_tensors_are_hooked

T = TypeVar("T")

_KEPT = 2
"""Things that are remembered: graphs are decided anew in first calls, and seldom after."""
_CHANGES = 64
"""Changes of place that are remembered: a module that stands inside a region and outside of it changes twice in a forward."""


def asking_node() -> Any:
    """The autograd node whose saved tensors are being recomputed; None in any other call."""
    if current_backward() < 0 or not saved_tensors_are_hooked():
        return None
    node = torch._C._current_autograd_node()
    return None if isinstance(node, CheckpointFunction._backward_cls) else node  # type: ignore[attr-defined]


def asking_number() -> tuple[int, int] | None:
    """Numbers of the backward and of the node that ask for the recomputation under way; None in any other call."""
    node = asking_node()
    return None if node is None else (current_backward(), node._sequence_nr())


class CallsInRegions:
    """Whether calls of an entry stood inside an autocast region of the model's own. A recomputation stands where its forward stood.

    A checkpoint restores autocast, but which of its regions are the model's own is not to be seen in backward.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[int, bool]] = []
        """The number of the next autograd node at each call whose answer differs from that of the call before."""

    def note(self, inside: bool) -> None:
        """Remember where a call of a forward stands."""
        if inside != (bool(self.changes) and self.changes[-1][1]):
            self.changes = [*self.changes[1 - _CHANGES :], (torch.autograd._get_sequence_nr(), inside)]

    def of_forward(self) -> bool:
        """Whether the call that is being recomputed stood inside one; false in any other call."""
        if not self.changes or current_backward() < 0:
            return False
        node = torch._C._current_autograd_node()
        reentrant = isinstance(node, CheckpointFunction._backward_cls)  # type: ignore[attr-defined]
        if not reentrant and not saved_tensors_are_hooked():
            return False
        number = node._sequence_nr() + reentrant  # a reentrant checkpoint numbers its node before it runs its body
        return next((inside for first, inside in reversed(self.changes) if first <= number), False)


class Past(Generic[T]):
    """Former values of one place, each with the number of the first autograd node that came after it."""

    def __init__(self) -> None:
        self._first = torch.autograd._get_sequence_nr()
        """An earlier forward had nothing in this place: its recomputation is the first to come here."""
        self._before: list[tuple[int, T]] = []

    def keep(self, value: T) -> None:
        """Remember `value`, which is being replaced, for recomputations of earlier forwards."""
        self._before = [*self._before[1 - _KEPT :], (torch.autograd._get_sequence_nr(), value)]

    def of_forward(self, now: T) -> T:
        """The value at the time of the forward whose saved tensors are being recomputed; `now` in any other call."""
        node = asking_node() if self._before else None
        if node is None:
            return now
        number = node._sequence_nr()
        return next((value for until, value in self._before if self._first <= number < until), now)


__all__ = ["CallsInRegions", "Past", "asking_node", "asking_number"]
