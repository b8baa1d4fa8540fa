"""An activation checkpoint whose body reads and writes what the model holds: weights, statistics, counters.

Dynamo makes all of that operands. PyTorch saves operands, and refuses to recompute from one that was written meanwhile; what a function
closes over is read as it is then. So what the model holds goes in as code that closes over it has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def checkpoint_with_state(body: Callable[..., Any], *operands: Any, state: tuple[int, ...], use_reentrant: bool, **options: Any) -> Any:
    """`checkpoint(body, *operands)`, where those at the places `state` are held by the model.

    A reentrant checkpoint gives gradients to operands alone, so what takes one stays an operand there. The others go in a tuple: nothing
    saves what is inside, and the devices whose random states are kept are found in it, too.
    """
    held = tuple((place, operands[place]) for place in state if not (use_reentrant and operands[place].requires_grad))
    apart = {place for place, _ in held}

    def run(held: tuple[tuple[int, Any], ...], *others: Any) -> Any:
        given = list(others)
        for place, tensor in held:  # in order, so that each finds its place
            given.insert(place, tensor)
        return body(*given)

    others = (operand for place, operand in enumerate(operands) if place not in apart)
    return checkpoint(run, held, *others, use_reentrant=use_reentrant, **options)


__all__ = ["checkpoint_with_state"]
