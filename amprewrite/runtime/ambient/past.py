"""Remember which graph each forward ran, so that an activation checkpoint recomputes with the same graph.

An activation checkpoint runs a part of a forward again in backward, and must save the same tensors as the forward did. Between forward and
backward the graph may have been planned anew. Autograd numbers its nodes in the order of their creation. So the number of the node that
asks for the recomputation shows which graph was in use when the node was made.

This applies to non-reentrant checkpoints, which recompute when backward reads a saved tensor. A reentrant checkpoint does not compare
saved tensors, so its recomputation may run the present graphs, like any other forward.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from amprewrite.torch_internals.dispatch import current_backward, saved_tensors_are_hooked

T = TypeVar("T")

_KEPT = 2
"""Number of former values that a `Past` keeps. Two are enough: graphs are planned anew in first calls, and seldom later."""
_CHANGES = 64
"""Number of changes that a `CallsInRegions` keeps. A forward that calls a module inside an autocast region, then outside, makes two."""

next_node = torch.autograd._get_sequence_nr
"""Return the number of the autograd node that this thread makes next. Autograd numbers its nodes in the order of their creation."""


def existed(value: Tensor, number: int) -> bool:
    """True if `value` existed before autograd made its node `number`: it is a leaf, or the number of its own node (`grad_fn`) is lower."""
    return value.grad_fn is None or value.grad_fn._sequence_nr() < number


def asking_node() -> Any:
    """Return the autograd node whose saved tensors a non-reentrant checkpoint is recomputing; None in any other call."""
    if current_backward() < 0 or not saved_tensors_are_hooked():
        return None
    node = torch._C._current_autograd_node()
    return None if isinstance(node, CheckpointFunction._backward_cls) else node  # type: ignore[attr-defined]


def asking_number() -> tuple[int, int] | None:
    """Return (number of the running backward, number of the autograd node whose saved tensors a checkpoint is recomputing).

    The pair identifies the recomputation. Return None if no non-reentrant checkpoint is recomputing.
    """
    node = asking_node()
    return None if node is None else (current_backward(), node._sequence_nr())


class CallsInRegions:
    """Remembers which calls of a module were inside a torch.autocast region of the model's own code, for recomputations of these calls.

    A checkpoint restores the autocast state in backward, but this state does not show whether the model or its caller entered the region.
    """

    def __init__(self) -> None:
        self.changes: list[tuple[int, bool]] = []
        """(number of the next autograd node, True for inside) at each switch between calls inside and calls outside of a region."""

    def note(self, inside: bool) -> None:
        """Record a call of the module. `inside`: whether the call is inside an autocast region of the model."""
        if inside != (bool(self.changes) and self.changes[-1][1]):
            self.changes = [*self.changes[1 - _CHANGES :], (next_node(), inside)]

    def of_forward(self) -> bool:
        """True in a recomputation of a forward that was called inside an autocast region of the model; False in any other call."""
        if not self.changes or current_backward() < 0:
            return False
        node = torch._C._current_autograd_node()
        reentrant = isinstance(node, CheckpointFunction._backward_cls)  # type: ignore[attr-defined]
        if not reentrant and not saved_tensors_are_hooked():
            return False
        number = node._sequence_nr() + reentrant  # a reentrant checkpoint makes node n before it calls the module, so `note` stored n + 1
        return next((inside for first, inside in reversed(self.changes) if first <= number), False)


class Past(Generic[T]):
    """Former values of one variable, such as the graphs of a module, for recomputations by activation checkpoints.

    A recomputation needs the value that the variable had when its forward ran. Autograd numbers its nodes in the order of creation. Each
    former value is stored with the number of the next node at the time when the value was replaced. So a node with a lower number was
    made while the variable still had this value, or an older one.
    """

    def __init__(self) -> None:
        self._first = next_node()
        """Number of the next autograd node when this object was made. A recomputation of an earlier forward gets the present value."""
        self.before: list[tuple[int, T]] = []
        """The former values that are kept, each with the number of the first autograd node made after its replacement."""

    def keep(self, value: T) -> None:
        """Store `value`, the value until now, for recomputations of earlier forwards. Call this method when a new value replaces it."""
        self.before = [*self.before[1 - _KEPT :], (next_node(), value)]

    def of_forward(self, now: T) -> T:
        """If a non-reentrant checkpoint is repeating a forward, return the value used in that forward; otherwise `now`, the present one."""
        node = asking_node() if self.before else None
        if node is None:
            return now
        number = node._sequence_nr()
        return next((value for until, value in self.before if self._first <= number < until), now)
