"""Two moments of every backward that enters a rewritten graph: when it first enters one, and its very end.

1. A hook on the results of a graph runs when a gradient enters. The first hook of a backward queues a callback with autograd.
2. Autograd runs queued callbacks when all gradients are there. DDP and FSDP queue theirs too, and may queue another from it, so
   this callback queues itself again a few times and acts last.

A backward is known by autograd's number for it. Backwards in other threads and inside another one have numbers of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from amprewrite.graphs.fx.uncaptured import uncaptured

_ROUNDS = 3
"""How often the callback queues itself again: DDP with a static graph queues a callback that queues another."""
_MOST = 64
"""Backwards under way that are remembered; one that raised never ends."""


class BackwardEnd:
    """Calls `began()` when a backward first enters a watched result, and `ended(number)` when all its gradients are there."""

    def __init__(self, began: Callable[[], None], ended: Callable[[int], None]) -> None:
        self.began, self.ended = began, ended
        self._under_way: set[int] = set()

    def watch(self, results: Iterable[Any]) -> None:
        """Watch for backwards that enter one of these."""
        for result in results:
            if isinstance(result, Tensor) and result.grad_fn is not None:  # a hook on a leaf would outlive this forward
                result.register_hook(self._entered)

    @uncaptured
    def _entered(self, gradient: Tensor) -> None:
        number = torch._C._current_graph_task_id()
        if number < 0 or number in self._under_way:
            return
        if len(self._under_way) >= _MOST:
            self._under_way.clear()
        self._under_way.add(number)
        self.began()
        self._queue(number, _ROUNDS)

    @uncaptured
    def _queue(self, number: int, rounds: int) -> None:
        callback = functools.partial(self._queue, number, rounds - 1) if rounds else functools.partial(self._end, number)
        torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]

    @uncaptured
    def _end(self, number: int) -> None:
        self._under_way.discard(number)
        self.ended(number)


__all__ = ["BackwardEnd"]
