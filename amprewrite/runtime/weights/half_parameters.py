"""Handle parameters that are in half precision before the rewrite: frozen parameters are accepted, trainable parameters are refused.

1. A frozen half parameter is read in its own dtype: an op that computes in half precision in the original does so in the rewrite, too.
   So LoRA over a half-precision base works.
2. A trainable half parameter would be its own master weight, and small updates of it would be lost. So every way to rewrite a model
   refuses it, or makes it fp32 in place if the user asks for that (`upcast=True`). A model for evaluation is refused, too, as long as its
   parameters require gradients, because nothing shows that it will not be trained.
3. Half inputs of a model in fp32 are not converted. torch.autocast casts the operands of each op to one dtype, and so does a captured
   graph. But some ops refuse operands of two dtypes at capture: their error, PyTorch's own, gets a note that says so.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from amprewrite.tables.boundary.members import buffers_in, named_parameters_in, parameters_in
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import LOW_DTYPES, dtype_name
from amprewrite.torch_internals.trees import tree_leaves


def _trainable(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the (name, parameter) pairs in `named` whose parameter is in half precision and takes gradients."""
    return [(name, each) for name, each in named if each.requires_grad and each.dtype in LOW_DTYPES]


def refuse_trainable(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise PolicyError if a parameter in `named` is in half precision and takes gradients."""
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
    """Convert the half parameters that take gradients to fp32, in place, and return a note of their number; "" if there are none.

    The Parameter objects are kept. Half buffers become fp32, too, as the statistics of a batch norm must. If the model also has frozen half
    parameters, only buffers of modules with a converted parameter become fp32: ops on frozen parameters read the other buffers.
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
        gradient, each.grad = each.grad, None  # PyTorch requires a gradient in the dtype of its parameter, so set it again afterwards
        each.data = each.data.float()
        each.grad = None if gradient is None else gradient.float()
    some = f"{len(own)} parameters" if len(own) > 1 else "1 parameter"
    return f"{some} in {formats} became fp32 master weights (upcast=True)"


@contextlib.contextmanager
def half_put_back(model: nn.Module, always: bool = False) -> Iterator[None]:
    """Context manager around an `upcast`: if the block raises, or if `always`, parameters and buffers are half again afterwards."""
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
    """Return the plan's note on parameters in half precision; "" if there are none."""
    every = list(parameters_in(model))
    half = [each for each in every if each.dtype in LOW_DTYPES]
    if not half:
        return ""
    formats = " and ".join(sorted({dtype_name(each.dtype) for each in half}))
    if len(half) == len(every):
        return f"all parameters are {formats} already: the model runs as it is, and there is nothing to gain from rewriting it"
    return f"{len(half)} of {len(every)} parameters are {formats} already and frozen: ops that compute in {formats} stay as they are"


def conversion_warning(model: nn.Module) -> str:
    """Return the warning for a rewritten model with trainable parameters in half precision, or with all in fp64; "" for other models."""
    found = _trainable(named_parameters_in(model))
    if not found:
        wide = {each.dtype for each in parameters_in(model)} == {torch.float64}
        said = "all parameters are fp64, so the model computes in fp64, as under torch.autocast, and nothing is rewritten: call amp.float()"
        return f"{type(model).__name__}: {said}" if wide else ""
    more = f" and {len(found) - 1} more are" if len(found) > 1 else " is"
    return (
        f"{type(model).__name__}: parameter {found[0][0]}{more} {dtype_name(found[0][1].dtype)} now: the fp32 master weights are "
        "gone, small updates are lost, and there is nothing left to rewrite. Keep a rewritten model in fp32: call amp.float() and "
        "leave out .half(), .bfloat16() and .to(dtype) (Lightning: precision='32-true')"
    )


def note_half_inputs(error: Exception, model: nn.Module, inputs: Any) -> None:
    """Add to the `error` of a call, whose code was not captured, that a model in fp32 got half `inputs`; nothing if it did not."""
    half = {each.dtype for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.dtype in LOW_DTYPES}
    if half and all(each.dtype not in LOW_DTYPES for each in parameters_in(model)) and not hasattr(error, "__notes__"):
        formats = " and ".join(sorted(map(dtype_name, half)))
        error.add_note(
            f"amprewrite: {type(model).__name__} was called with {formats} tensors, and its weights are fp32. torch.autocast casts the "
            "operands of such an op; a rewritten model is captured as the fp32 model that it was: pass fp32 tensors, the graph casts them"
        )
