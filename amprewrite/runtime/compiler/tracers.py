"""Detect contexts in which a rewritten model cannot run its graphs: exporters and tracers, `fullgraph=True`, shape inference, torch.func.

1. If a tracer such as `torch.jit.trace` would record the ops of a call, the call raises an error.
2. Every call of the model runs through `session.enter`. If the user compiles code that calls the model, Dynamo reads `enter`. If Dynamo may
   break its graph there, the model is called as usual. If not, as for `fullgraph=True` and a strict `torch.export`, `enter` raises an error
   while Dynamo reads it. Dynamo's own error would give wrong advice: to remove `enter`.
3. A call on the meta device only asks for shapes. It runs as written, without capture and without a warning.
4. torch.func transforms and forward-mode derivatives run the original code, in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad
from torch import nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.runtime.compiler.dynamo import ONE_EXPORT, reading, user_modes, wants_one_graph
from amprewrite.runtime.compiler.plain_words import FORWARD_MODE, FUNCTORCH, one_graph, traced
from amprewrite.tables.boundary.members import parameters_in
from amprewrite.tables.errors import CaptureError
from amprewrite.torch_internals.dispatch import (
    count_dispatch_modes,
    current_transform,
    in_forward_mode,
    is_any_autocast_enabled,
    tracing_context,
)
from amprewrite.torch_internals.dynamo import Unsupported
from amprewrite.torch_internals.trees import tree_leaves


class WantsOneGraph(CaptureError, Unsupported):
    """Raised if `fullgraph=True` or torch.export forbids a graph break at a rewritten model. An Unsupported, which Dynamo re-raises."""


def undisturbed() -> bool:
    """True if no autocast, dispatch mode, tracer, export or torch.func transform is active. Then a call need not test for each of them."""
    return not (
        is_any_autocast_enabled()
        or count_dispatch_modes()
        or torch._C._is_tracing()
        or torch.compiler.is_exporting()
        or is_fx_symbolic_tracing()
        or current_transform() is not None
        or in_forward_mode()
    )


# -- raise an error under tracers and exporters ------------------------------------------
def refuse_tracers() -> None:
    """Raise CaptureError if a tracer, such as `torch.jit.trace` or make_fx, would record the ops of this call.

    All threads share PyTorch's flag for a running export. This thread exports only if it also has a dispatch mode or a tracing context.
    """
    modes = {type(mode).__name__ for mode in user_modes()} if count_dispatch_modes() else ()
    if torch._C._is_tracing():
        tracer = "torch.jit.trace"
    elif torch.compiler.is_exporting() and (modes or tracing_context() is not None):
        tracer = "torch.export"
    elif "ProxyTorchDispatchMode" in modes or "FunctionalTensorMode" in modes:
        tracer = "make_fx"
    elif is_fx_symbolic_tracing() and not _was_another_export():
        tracer = "make_fx" if modes else "torch.fx.symbolic_trace"
    elif "FakeTensorMode" in modes:
        tracer = "a FakeTensorMode"
    else:
        return
    raise CaptureError(traced(tracer))


def _was_another_export() -> bool:
    """Wait until no other thread exports. Return True if PyTorch then reports no symbolic tracing: the tracing was the other thread's.

    All threads share PyTorch's flag for symbolic tracing. While the flag is set, calls of functions that Dynamo compiled raise an error.
    """
    with ONE_EXPORT:
        return not is_fx_symbolic_tracing()


# -- raise an error if fullgraph=True forbids a graph break ------------------------------
@torch.compiler.assume_constant_result  # type: ignore[misc]
@uncaptured
def refuse_whole_graph(name: str) -> None:
    """Raise CaptureError if Dynamo must not break its graph at the rewritten model of class `name`.

    Dynamo calls this function while it reads the code of the caller. In any other call the function does nothing.
    """
    if wants_one_graph():
        raise WantsOneGraph(traced("torch.export") if reading().export else one_graph(name))


# -- detect torch.func, forward-mode derivatives and calls for shapes --------------------
def transform_at_work() -> str:
    """Return the reason why a call cannot run its graphs: a torch.func transform or forward-mode derivatives; "" if neither is active."""
    if current_transform() is not None:
        return FUNCTORCH
    return FORWARD_MODE if in_forward_mode() else ""


_NESTS = (list, tuple, dict)


def asks_shapes(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call of `root` only asks for the shapes of its results: an argument is on the meta device, and the weights are not."""
    for each in (*args, *kwargs.values()) if kwargs else args:  # not `any`, which takes three times as long: each call runs this
        if each.is_meta if isinstance(each, torch.Tensor) else _holds_meta(each):
            weight = next(parameters_in(root), None)
            return weight is not None and not weight.is_meta
    return False


def _holds_meta(value: Any) -> bool:
    return isinstance(value, _NESTS) and any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves(value))
