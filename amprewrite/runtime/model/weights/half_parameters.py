"""Parameters that are in half precision already: what is allowed, and what users are told.

1. Frozen ones are read as they are: an op that computes in half precision in the original does so in the rewrite, too. LoRA
   over a half-precision base works so.
2. Trainable ones are refused: they would be their own master weights, in which small updates are lost.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from amprewrite.tables.boundary.members import named_parameters_in, parameters_in
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import LOW_DTYPES, dtype_name


def _trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, each) for name, each in named_parameters_in(model) if each.requires_grad and each.dtype in LOW_DTYPES)


def refuse_trainable(model: nn.Module) -> None:
    """Raise PolicyError if a parameter in half precision is to be trained."""
    for name, parameter in _trainable(model):
        raise PolicyError(
            f"parameter {name} is {dtype_name(parameter.dtype)} already and is to be trained: fp32 parameters are the master "
            "weights; call model.float() first, or freeze it (requires_grad_(False)) if it is not to be trained"
        )


def frozen_note(model: nn.Module) -> str:
    """What a plan says of frozen parameters in half precision; "" if there are none."""
    every = list(parameters_in(model))
    half = [each for each in every if each.dtype in LOW_DTYPES]
    if not half:
        return ""
    formats = " and ".join(sorted({dtype_name(each.dtype) for each in half}))
    if len(half) == len(every):
        return f"all parameters are {formats} already: the model runs as it is, and there is nothing to gain from rewriting it"
    return f"{len(half)} of {len(every)} parameters are {formats} already and frozen: ops that compute in {formats} stay as they are"


def lost_masters(model: nn.Module) -> str:
    """What to tell a user who converted a rewritten model to half precision; "" if its trainable parameters are not."""
    found = list(_trainable(model))
    if not found:
        return ""
    more = f" and {len(found) - 1} more are" if len(found) > 1 else " is"
    return (
        f"{type(model).__name__}: parameter {found[0][0]}{more} {dtype_name(found[0][1].dtype)} now: the fp32 master weights are "
        "gone, small updates are lost, and there is nothing left to rewrite. Keep a rewritten model in fp32: call amp.float() and "
        "leave out .half(), .bfloat16() and .to(dtype) (Lightning: precision='32-true')"
    )


__all__ = ["frozen_note", "lost_masters", "refuse_trainable"]
