"""Replace the handlers by which Dynamo reads calls of some functions, for as long as it converts a frame of a model.

Dynamo's own lock for conversions is held meanwhile, so that no other thread captures with these handlers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables import builder
from torch._dynamo.variables import torch as torch_functions
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx.experimental.symbolic_shapes import DimDynamic

from amprewrite.graphs.fx.run.recurrent_layers import LAYERS, in_one_step
from amprewrite.torch_internals.dynamo import Unsupported

_FOLDED: dict[Any, Any] = torch_functions.constant_fold_functions  # type: ignore[assignment]
"""Functions that Dynamo evaluates as constants, before it looks for a handler."""
_CAPTURES_HOOKS = find_spec("torch._higher_order_ops.register_hook") is not None
"""True if Dynamo captures a hook on a tensor by an op of its own, since torch 2.13."""


@contextlib.contextmanager
def handling(handlers: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Context manager in which Dynamo reads calls of some functions by handlers of ours. `handlers`: {function: its handler}."""
    table = torch_functions.TorchInGraphFunctionVariable._get_handlers()
    with compile_lock:
        folded, before = dict(_FOLDED), {each: table[each] for each in handlers if each in table}
        for function in handlers:
            _FOLDED.pop(function, None)
        table.update(handlers)
        try:
            yield
        finally:
            for function in handlers:
                table.pop(function, None)
            table.update(before)
            _FOLDED.update(folded)


@contextlib.contextmanager
def sharing_sizes(shared: Callable[[Any], Iterable[int]]) -> Iterator[None]:
    """Context manager in which dynamic sizes that are equal get one symbol, in the dims that `shared` returns for a tensor.

    Dynamo has no mark for this. It guards on such sizes to be equal, and captures again if they differ.
    """
    given: Callable[..., Any] = builder._automatic_dynamic

    def sizes_of(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        context = given(tensor, *args, **kwargs)
        for dim in shared(tensor):
            if context.dynamic_sizes[dim] is DimDynamic.DYNAMIC:
                context.dynamic_sizes[dim] = DimDynamic.DUCK
        return context

    with compile_lock:
        builder._automatic_dynamic = sizes_of  # type: ignore[assignment]
        try:
            yield
        finally:
            builder._automatic_dynamic = given  # type: ignore[assignment]


@contextlib.contextmanager
def breaking_at_gradients() -> Iterator[None]:
    """Context manager in which `torch.autograd.grad` breaks the graph, and Dynamo captures the code after it. Only for eager graphs.

    Since torch 2.15 Dynamo gives up the frame if later code reads a differentiable value of the graph, because a compiler loses the edges
    of autograd between the results of a graph. A graph that runs eagerly keeps them.
    """
    given = torch_functions.TorchInGraphFunctionVariable._get_handlers()[torch.autograd.grad]

    def handle(*args: Any, **kwargs: Any) -> Any:
        try:
            return given(*args, **kwargs)
        except Unsupported as refused:
            vars(refused).update(skip_frame=False, preserve_skip_frame_after_inline=False, apply_to_code=True)
            raise

    with handling({torch.autograd.grad: handle}):
        yield


@contextlib.contextmanager
def breaking_at_hooks() -> Iterator[None]:
    """Context manager in which a hook on a tensor that the code computes breaks the graph, before torch 2.13. PyTorch then sets the hook.

    Dynamo of torch 2.11 and 2.12 captures the hook as an autograd Function of this tensor alone. Without an error, a hook on
    `x.contiguous()` misses other gradients of `x`, and the first of two hooks runs last.
    """
    if _CAPTURES_HOOKS:
        yield
        return
    given: Callable[..., Any] = TensorVariable._method_register_hook

    def handle(tensor: Any, *args: Any) -> Any:
        if not tensor.source:
            raise Unsupported("a hook on a tensor that the captured code computes")
        return given(tensor, *args)

    with compile_lock:
        TensorVariable._method_register_hook = handle  # type: ignore[assignment]
        try:
            yield
        finally:
            TensorVariable._method_register_hook = given  # type: ignore[method-assign]


@contextlib.contextmanager
def recurrent_layers_whole() -> Iterator[None]:
    """Context manager in which Dynamo computes the fake results of a recurrent layer from one time step, and records the whole layer."""

    def handle(layer: Callable[..., Any], _: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        proxy = tx.output.create_proxy("call_function", in_one_step(layer), *proxy_args_kwargs(args, kwargs))
        results = wrap_fx_proxy(tx, proxy)
        proxy.node.target = layer
        return results

    with handling({layer: partial(handle, layer) for layer in LAYERS}):
        yield
