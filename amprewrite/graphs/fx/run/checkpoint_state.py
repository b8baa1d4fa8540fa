"""Run an activation checkpoint whose body graph reads and writes tensors that the model holds: weights, statistics, counters.

Dynamo makes all these tensors operands of the checkpoint. PyTorch saves operands, and refuses to recompute if an operand was written since.
It does not save variables that a body closes over: the recomputation reads these variables again. So this file passes the tensors of the
model in a way that PyTorch treats like closed-over variables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def checkpoint_with_state(body: Callable[..., Any], *operands: Any, state: tuple[int, ...], use_reentrant: bool, **options: Any) -> Any:
    """Return `checkpoint(body, *operands)`, where the model holds the operands at the positions `state` (in ascending order).

    These operands are passed in a tuple. PyTorch saves no tensor inside a tuple, but it does find the devices of these tensors, whose
    random states it keeps. A reentrant checkpoint gives gradients to direct operands only, so there a tensor that requires a gradient stays
    a direct operand.
    """
    held = tuple((place, operands[place]) for place in state if not (use_reentrant and operands[place].requires_grad))
    apart = {place for place, _ in held}

    def run(held: tuple[tuple[int, Any], ...], *others: Any) -> Any:
        given = list(others)
        for place, tensor in held:  # positions ascend, so each insertion puts a tensor at its original position
            given.insert(place, tensor)
        return body(*given)

    others = (operand for place, operand in enumerate(operands) if place not in apart)
    return checkpoint(run, held, *others, use_reentrant=use_reentrant, **options)
