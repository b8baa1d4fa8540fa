"""Who else would read a rewritten model instead of calling it: exporters and tracers, a torch.compile that wants one graph, derivatives.

1. A tracer that records what runs is refused when the model is called.
2. Dynamo reads the model's door before it calls anything. Where it breaks its graph there, the model is called as always; where it must
   not break it, as for `fullgraph=True` and a strict `torch.export`, the door refuses it while it is read: Dynamo's own error would
   advise to take our door away.
3. A call on the meta device asks for shapes, as libraries do that infer them: it runs as written, and nothing is captured or told.
4. Transforms of torch.func and forward-mode derivatives go through the original code, in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from amprewrite.graphs.fx.uncaptured import uncaptured
from amprewrite.runtime.compiler.dynamo import ONE_EXPORT, reading, user_modes, wants_one_graph
from amprewrite.runtime.compiler.plain_words import FORWARD_MODE, FUNCTORCH, one_graph, traced
from amprewrite.tables.boundary.members import parameters_in
from amprewrite.tables.errors import CaptureError
from amprewrite.torch_internals.autograd import in_forward_mode
from amprewrite.torch_internals.dispatch import count_dispatch_modes, current_transform, is_any_autocast_enabled, tracing_context
from amprewrite.torch_internals.trees import tree_leaves


class WantsOneGraph(CaptureError, Unsupported):
    """Dynamo may not break its graph at a rewritten model. Also of Dynamo's class: it passes on no other error unchanged."""


def undisturbed() -> bool:
    """Whether there is nothing around a call that it must heed: one look, where all is well, for what is looked at one by one below."""
    return not (
        is_any_autocast_enabled()
        or count_dispatch_modes()
        or torch._C._is_tracing()
        or torch.compiler.is_exporting()
        or is_fx_symbolic_tracing()
        or transform_at_work()
    )


# -- tracers -----------------------------------------------------------------------------
def refuse_tracers() -> None:
    """Raise CaptureError if a foreign tracer would record the graph instead of running it.

    That an export is running is one flag for all threads; the thread that exports has modes or a context of its own.
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
    """Wait until no other thread exports; whether symbolic tracing ended with that.

    That fx traces is one flag for all threads, and Dynamo runs nothing while it is set.
    """
    with ONE_EXPORT:
        return not is_fx_symbolic_tracing()


# -- one graph ---------------------------------------------------------------------------
@torch.compiler.assume_constant_result  # type: ignore[misc]
@uncaptured
def refuse_whole_graph(name: str) -> None:
    """Raise CaptureError if Dynamo must not break its graph at the rewritten model of class `name`.

    Dynamo calls this while it reads the code that calls it. Where Dynamo does not read, nothing is to be refused.
    """
    if wants_one_graph():
        raise WantsOneGraph(traced("torch.export") if reading().export else one_graph(name))


# -- derivatives -------------------------------------------------------------------------
def transform_at_work() -> str:
    """Why a call cannot run its graphs: a transform of torch.func, or a level of forward-mode derivatives; "" for neither."""
    if current_transform() is not None:
        return FUNCTORCH
    return FORWARD_MODE if in_forward_mode() else ""


def asks_shapes(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for shapes alone: it is given tensors on the meta device, and the weights of `root` are elsewhere."""
    if not any(_on_meta(each) for each in (*args, *kwargs.values())):
        return False
    weight = next(parameters_in(root), None)
    return weight is not None and not weight.is_meta


def _on_meta(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta
    return isinstance(value, list | tuple | dict) and any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves(value))


__all__ = ["WantsOneGraph", "asks_shapes", "refuse_tracers", "refuse_whole_graph", "transform_at_work", "undisturbed"]
