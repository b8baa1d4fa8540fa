"""Private functions of torch for dispatch modes, torch.func transforms, autocast, fake tensors and wrapper subclasses, and for autograd's
state in this thread: the running backward, hooks on saved tensors, grad mode, forward-mode AD.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.parameter import Parameter
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass

__all__ = [
    "FakeTensor",
    "are_plain",
    "count_dispatch_modes",
    "current_transform",
    "disable_dispatch_modes",
    "dispatch_modes",
    "enter_autocast",
    "exit_autocast",
    "is_any_autocast_enabled",
    "is_legacy_batched",
    "is_plain",
    "is_traceable_wrapper_subclass",
    "is_wrapped_by_transform",
    "tracing_context",
]

disable_dispatch_modes = _disable_current_modes
"""A context manager that switches all active dispatch modes off."""
dispatch_modes = _get_current_dispatch_mode_stack
"""Return the list of active dispatch modes, the innermost last."""
count_dispatch_modes = torch._C._len_torch_dispatch_stack
"""Return the number of active dispatch modes."""
tracing_context = TracingContext.try_get
"""Return the context of the trace that Dynamo or AOTAutograd runs now; None outside a trace."""
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
"""True if autocast is on for any device type."""
enter_autocast, exit_autocast = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
"""The two functions that Dynamo calls in a captured graph where the model enters and leaves `with torch.autocast(...)`."""
current_transform = torch._C._functorch.peek_interpreter_stack
"""Return the innermost transform of torch.func that runs; None outside a transform."""
is_wrapped_by_transform = torch._C._functorch.is_functorch_wrapped_tensor
"""True if a tensor is wrapped by a running transform of torch.func, for example as a batched tensor of vmap."""
is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
"""True if a tensor is batched by `torch.autograd.grad(..., is_grads_batched=True)`."""


def is_plain(tensor: Tensor) -> bool:
    """True if `tensor` has the class Tensor or Parameter and is strided, and if no transform, batching or functionalization wraps it."""
    if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided:
        return False
    wrapped = is_wrapped_by_transform(tensor) or is_legacy_batched(tensor)
    return not (wrapped or torch._is_functional_tensor(tensor))


_PLAIN, _STRIDED, _layout = {Tensor, Parameter}, {torch.strided}, operator.attrgetter("layout")


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """True if `is_plain` holds for each of `tensors`. Faster than calling `is_plain` for each."""
    if not (_PLAIN.issuperset(map(type, tensors)) and _STRIDED.issuperset(map(_layout, tensors))):
        return False
    wrapped = any(map(is_wrapped_by_transform, tensors)) or any(map(is_legacy_batched, tensors))
    return not (wrapped or any(map(torch._is_functional_tensor, tensors)))


current_backward = torch._C._current_graph_task_id
"""Return autograd's id of the backward pass that runs in this thread; -1 outside a backward pass."""
call_after_backward: Callable[[Callable[[], Any]], None] = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
"""Call the given function once, at the end of the backward that runs now. Call this function only inside a backward."""
set_grad_enabled = torch._C._set_grad_enabled
"""Switch grad mode on or off. Graphs that Dynamo captures contain calls of this function."""


@contextlib.contextmanager
def outside_capture(shapes: Any) -> Iterator[Callable[[Any], Any]]:
    """Provide the tracing context that a compiler needs if it runs while Dynamo captures nothing. `shapes` is a new `ShapeEnv`.

    Yields a function that turns a tensor into a fake tensor for the compiler. The sizes of fake tensors are constants. A number that the
    graph reads from a tensor (`x.item()`) stays variable.
    """
    with tracing(TracingContext(mode := FakeTensorMode(shape_env=shapes, static_shapes=True))):
        yield lambda value: mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value


def saved_tensors_are_hooked() -> bool:
    """True if hooks set by `torch.autograd.graph.saved_tensors_hooks` are active in this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def in_forward_mode() -> bool:
    """True inside a level of `torch.autograd.forward_ad`, where ops compute tangents."""
    return forward_ad._current_level >= 0


def leave_forward_mode() -> None:
    """Leave the level of forward-mode AD that a graph has entered. Do nothing if the graph entered none.

    Levels do not nest, so the function exits once. It does not ask `in_forward_mode`, which does not see a level that a graph has entered.
    """
    with contextlib.suppress(RuntimeError):  # torch raises this error if no level is open, and no function tells whether one is
        torch._C._exit_dual_level(level=0)
