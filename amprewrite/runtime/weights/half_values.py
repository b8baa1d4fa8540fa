"""Handle parameters and inputs of a model that are in half precision (fp16 or bf16) already.

1. A half parameter that requires no gradients is read in its own dtype: an op that computes in half precision in the original does so in
   the rewrite, too. So LoRA over a half-precision base works.
2. A trainable half parameter would be its own master weight, and small updates of it would be lost. So every way to rewrite a model
   refuses it, or makes it fp32 in place if the user asks for that (`upcast=True`). A model in eval mode is refused, too, as long as its
   parameters require gradients, because it may still be trained.
3. A model in fp32 may get half inputs, such as cached latents or images of a half data loader. PyTorch refuses most products of half
   inputs and fp32 weights; torch.autocast casts their operands. If capture finds such a product, the call gets fp32 copies of its inputs
   (`Widened`), and the graph casts them like any fp32 input. If there is none, PyTorch runs the model with half inputs, and so do we.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import UserDict
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn

from amprewrite.graphs.fx.node_facts import example_value, tensors
from amprewrite.tables.boundary.members import buffers_in, named_parameters_in, parameters_in
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.formats import LOW_DTYPES, dtype_name
from amprewrite.tables.ops.op_lists import OPS, op_name
from amprewrite.tables.vocabulary import OpKind
from amprewrite.torch_internals.trees import tree_leaves


def _trainable(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the (name, parameter) pairs in `named` whose parameter is in half precision and requires gradients."""
    return [(name, each) for name, each in named if each.requires_grad and each.dtype in LOW_DTYPES]


def refuse_trainable(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise PolicyError if a parameter in `named` is in half precision and requires gradients."""
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
    """Convert the half parameters that require gradients to fp32, in place. Return a note with their number; "" if there are none.

    The Parameter objects stay the same. Half buffers become fp32, too, because a batch norm needs fp32 statistics. If the model also has
    frozen half parameters, only buffers of modules with a converted parameter become fp32: ops on frozen parameters read the other buffers.
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
        gradient, each.grad = each.grad, None  # remove the gradient before the dtype changes: parameter and gradient must have one dtype
        each.data = each.data.float()
        each.grad = None if gradient is None else gradient.float()
    some = f"{len(own)} parameters" if len(own) > 1 else "1 parameter"
    return f"{some} in {formats} became fp32 master weights (upcast=True)"


@contextlib.contextmanager
def half_put_back(model: nn.Module, always: bool = False) -> Iterator[None]:
    """Context manager for a block that calls `upcast(model)`. At the end, undo the upcast if the block failed or `always` is True."""
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
    """Return a warning if a conversion, such as `.half()` or `.double()`, has left nothing to rewrite in a rewritten model; otherwise "".

    This is the case if a trainable parameter is in half precision, or if all parameters are fp64.
    """
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


class TwoDtypes(Exception):
    """Raised at capture, to restart the call with fp32 copies of its half inputs.

    The reason is an op that reads half and fp32 operands, or code that asks if autocast is on, which the new capture answers by yes.
    """


def is_half(value: Any) -> bool:
    """True if `value` is a tensor in half precision."""
    return isinstance(value, Tensor) and value.dtype in LOW_DTYPES


def _has_fields(value: Any) -> bool:
    """True if `value` is a dataclass, a namespace or a UserDict, and keeps its members in a `__dict__`."""
    known = isinstance(value, SimpleNamespace | UserDict) or (is_dataclass(value) and not isinstance(value, type | nn.Module))
    return known and hasattr(value, "__dict__")


def _leaves(inputs: Any) -> Iterator[Any]:
    """Yield the leaves of the nested value `inputs`. If a leaf has fields, as a dataclass does, also yield the leaves in its fields."""
    left, seen = [inputs], set[int]()
    while left:
        for each in tree_leaves(left.pop()):
            yield each
            if _has_fields(each) and id(each) not in seen:
                seen.add(id(each))
                left.append(vars(each))


def half_beside_fp32(model: nn.Module, inputs: Any) -> bool:
    """True if `inputs` holds half tensors, and `model` has fp32 parameters and no half parameters."""
    if not any(map(is_half, _leaves(inputs))):
        return False
    dtypes = {each.dtype for each in parameters_in(model)}
    return torch.float32 in dtypes and dtypes.isdisjoint(LOW_DTYPES)


def reads_two_dtypes(module: torch.fx.GraphModule) -> bool:
    """True if an op such as a matmul reads half and fp32 operands in the captured graph `module` or in its subgraphs.

    Capture does not fail at such an op, because Dynamo's fake tensors allow it, but PyTorch's kernels refuse it.
    """
    graphs = (each.graph for each in module.modules() if isinstance(each, torch.fx.GraphModule))
    return any(_of_two_dtypes(node) for graph in graphs for node in graph.nodes if node.op in ("call_function", "call_method"))


def _of_two_dtypes(node: torch.fx.Node) -> bool:
    row = OPS.get(op_name(node.target))
    if row is None or row.kind is not OpKind.ALLOW:
        return False
    dtypes = {tensor.dtype for each in node.all_input_nodes for tensor in tensors(example_value(each))}
    return torch.float32 in dtypes and not dtypes.isdisjoint(LOW_DTYPES)


class Widened:
    """Context manager around a call of a model with half inputs. `args` and `kwargs` are its arguments, with fp32 copies of half tensors.

    Half tensors in lists, tuples, dicts and dataclasses are replaced, too. A tuple is copied. Any other container is changed in place,
    because the model may add to it: it holds the fp32 copies inside the `with` block, and the half tensors again afterwards. If the model
    writes to an fp32 copy, the half tensor gets the new values at the end. It also gets a new shape, for example after `unsqueeze_`.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._made: dict[int, tuple[Tensor, Tensor, int, Tensor]] = {}
        self._items: list[tuple[Any, Any, Any, Any]] = []
        """The items to replace in lists and dicts, as (container, index or key, item before, item inside the block)."""
        self._seen: set[int] = set()
        self.args: tuple[Any, ...] = self._wide(args)
        self.kwargs: dict[str, Any] = {name: self._wide(each) for name, each in kwargs.items()}

    def __bool__(self) -> bool:
        """True if there are half tensors among the arguments."""
        return bool(self._made)

    def __enter__(self) -> Self:
        for container, key, _, inside in self._items:
            container[key] = inside
        return self

    def __exit__(self, *_: object) -> None:
        for container, key, before, inside in self._items:
            there = container[key] if (key < len(container) if isinstance(container, list) else key in container) else None
            if there is inside:
                container[key] = before
        for half, wide, version, first in self._made.values():
            if wide._version != version:
                with torch.no_grad():
                    if (wide.shape, wide.stride()) != (first.shape, first.stride()):
                        # if `half` is a view such as x[:, ::2], the strides of `wide`, its dense copy, would reach other elements of x
                        made = half.as_strided if half.stride() == first.stride() else half.new_empty_strided
                        half.data = made(wide.shape, wide.stride())
                    half.copy_(wide)

    def _wide(self, value: Any) -> Any:
        """Return the fp32 copy of a half tensor; for a tuple that holds half tensors, a new tuple. Return any other value itself.

        If a list, dict or dataclass holds half tensors, `_items` records which of its items the `with` block must replace.
        """
        kind = type(value)
        if isinstance(value, tuple) and (kind is tuple or hasattr(kind, "_make")):  # a namedtuple has `_make`
            inside = tuple(map(self._wide, value))
            made = inside if kind is tuple else kind._make(inside)
            return value if all(map(operator.is_, inside, value)) else made
        held = value if kind is list or isinstance(value, dict) else vars(value) if _has_fields(value) else ()
        if held and id(value) not in self._seen:
            self._seen.add(id(value))
            for key, before in held.items() if isinstance(held, dict) else enumerate(held):
                inside = self._wide(before)
                if inside is not before:
                    self._items.append((held, key, before, inside))
        if not is_half(value):
            return value
        if id(value) not in self._made:
            wide = _counted(value)
            self._made[id(value)] = value, wide, wide._version, wide.detach()
        return self._made[id(value)][1]


def _counted(half: Tensor) -> Tensor:
    """Return an fp32 copy of `half` that has a version counter even in inference mode. The counter tells if code writes to the copy."""
    if not torch.is_inference_mode_enabled():
        return half.float()
    with torch.inference_mode(False), torch.no_grad():
        return half.float()


def note_half_inputs(error: Exception, model: nn.Module, inputs: Any) -> None:
    """Add a note to `error`, raised by a call that Dynamo failed to capture, if the fp32 `model` was called with half `inputs`."""
    if half_beside_fp32(model, inputs) and not hasattr(error, "__notes__"):
        half = {each.dtype for each in filter(is_half, _leaves(inputs))}
        formats = " and ".join(sorted(map(dtype_name, half)))
        error.add_note(
            f"amprewrite: {type(model).__name__} was called with {formats} tensors, and its weights are fp32. torch.autocast casts the "
            "operands of such an op; a rewritten model is captured as the fp32 model that it was: pass fp32 tensors, the graph casts them"
        )
