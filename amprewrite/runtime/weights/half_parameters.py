"""Parameters that are in half precision already: what is allowed, and what users are told.

1. Frozen ones are read in their own dtype: an op that computes in half precision in the original does so in the rewrite, too. LoRA
   over a half-precision base works so.
2. Trainable ones would be their own master weights, in which small updates are lost. They are refused, whichever way the model comes in,
   or made fp32 in place if the user asks for it (`upcast=True`). A model that is only evaluated is told the same: nothing shows that it is.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from amprewrite.tables.boundary.members import buffers_in, named_parameters_in, parameters_in
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import LOW_DTYPES, dtype_name


def _trainable(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(name, each) for name, each in named if each.requires_grad and each.dtype in LOW_DTYPES]


def refuse_trainable(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise PolicyError if one of these parameters is in half precision and takes gradients."""
    found = _trainable(named)
    if found:
        name, first = found[0]
        some = f"parameters such as {name} ({len(found)} in all) are" if len(found) > 1 else f"parameter {name} is"
        raise PolicyError(
            f"{some} {dtype_name(first.dtype)} already, and fp32 parameters are the master weights: load the model in fp32 "
            "(from_pretrained(..., dtype=torch.float32)), convert it in place (amprewrite.rewrite(model, upcast=True), or model.float()), "
            "or freeze what is not to be trained (requires_grad_(False)), which for a model that is only evaluated is all of it"
        )


def upcast(model: nn.Module) -> str:
    """Make fp32 master weights of the half parameters that take gradients, in place, and say how many; "" if there are none.

    The Parameter objects stay. Half buffers become fp32 with them, as those of batch norm must, but not beside half parameters that are
    frozen: what computes with these reads such buffers.
    """
    chosen = [each for _, each in _trainable(named_parameters_in(model))]
    if not chosen:
        return ""
    formats = " and ".join(sorted({dtype_name(each.dtype) for each in chosen}))
    own = {id(each) for each in chosen}
    frozen = any(each.dtype in LOW_DTYPES and id(each) not in own for each in parameters_in(model))
    for module in model.modules():
        if not frozen or any(id(each) in own for each in module._parameters.values()):
            chosen += [each for each in module._buffers.values() if each is not None and each.dtype in LOW_DTYPES]
    for each in chosen:
        gradient, each.grad = each.grad, None  # PyTorch wants a gradient in the dtype of its parameter
        each.data = each.data.float()
        each.grad = None if gradient is None else gradient.float()
    some = f"{len(own)} parameters" if len(own) > 1 else "1 parameter"
    return f"{some} in {formats} became fp32 master weights (upcast=True)"


@contextlib.contextmanager
def half_put_back(model: nn.Module, always: bool = False) -> Iterator[None]:
    """Around an `upcast`: parameters and buffers are half again if this raises, or `always`."""
    held = itertools.chain(parameters_in(model), buffers_in(model))
    before = [(each, each.data, each.grad) for each in held if each.dtype in LOW_DTYPES]
    done = False
    try:
        yield
        done = True
    finally:
        for each, data, gradient in before if always or not done else ():
            each.grad = None
            each.data, each.grad = data, gradient


def frozen_note(model: nn.Module) -> str:
    """The plan's note on frozen parameters in half precision; "" if there are none."""
    every = list(parameters_in(model))
    half = [each for each in every if each.dtype in LOW_DTYPES]
    if not half:
        return ""
    formats = " and ".join(sorted({dtype_name(each.dtype) for each in half}))
    if len(half) == len(every):
        return f"all parameters are {formats} already: the model runs as it is, and there is nothing to gain from rewriting it"
    return f"{len(half)} of {len(every)} parameters are {formats} already and frozen: ops that compute in {formats} stay as they are"


def lost_masters(model: nn.Module) -> str:
    """The warning for a rewritten model whose trainable parameters were converted to half precision; "" if they were not."""
    found = _trainable(named_parameters_in(model))
    if not found:
        return ""
    more = f" and {len(found) - 1} more are" if len(found) > 1 else " is"
    return (
        f"{type(model).__name__}: parameter {found[0][0]}{more} {dtype_name(found[0][1].dtype)} now: the fp32 master weights are "
        "gone, small updates are lost, and there is nothing left to rewrite. Keep a rewritten model in fp32: call amp.float() and "
        "leave out .half(), .bfloat16() and .to(dtype) (Lightning: precision='32-true')"
    )


__all__ = ["frozen_note", "half_put_back", "lost_masters", "refuse_trainable", "upcast"]
