"""An activation checkpoint whose body reads and writes tensors that the model holds: weights, statistics, counters.

Dynamo makes all of them operands. PyTorch saves operands, and refuses to recompute if one was written in the meantime. It reads closed-over
variables again instead. So tensors that the model holds are passed to the body in the same way as closed-over variables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def checkpoint_with_state(body: Callable[..., Any], *operands: Any, state: tuple[int, ...], use_reentrant: bool, **options: Any) -> Any:
    """`checkpoint(body, *operands)`, with the operands at the positions `state` held by the model.

    A reentrant checkpoint gives gradients to operands alone, so an operand that requires one stays an operand there. The others are passed
    in a tuple: PyTorch saves nothing inside it, and still finds the devices whose random states it keeps.
    """
    held = tuple((place, operands[place]) for place in state if not (use_reentrant and operands[place].requires_grad))
    apart = {place for place, _ in held}

    def run(held: tuple[tuple[int, Any], ...], *others: Any) -> Any:
        given = list(others)
        for place, tensor in held:  # in order, so that each lands at its position
            given.insert(place, tensor)
        return body(*given)

    others = (operand for place, operand in enumerate(operands) if place not in apart)
    return checkpoint(run, held, *others, use_reentrant=use_reentrant, **options)


__all__ = ["checkpoint_with_state"]
