"""Hide code of this package from Dynamo, autograd hooks and checkpoints, so that they do not take it for code of the model.

1. Dynamo (`uncaptured`). A model that computes gradients itself runs a backward while Dynamo still captures. Without `uncaptured`, Dynamo
   would capture the functions and hooks of this package that the backward calls, and they would be rewritten like code of the model.
2. Hooks on saved tensors (`unhooked`). An activation checkpoint counts the tensors that are saved for backward while it runs. Tensors saved
   while this package runs a model or an op on trial must not be counted.
3. Selective checkpoints (`unselected`). Such a checkpoint keeps the results of ops in order, and takes them in this order when it
   recomputes. Copies of weights must not be among these results, because the recomputation makes no copy that exists already.
4. Errors (`closed_if_raised`). If a graph raises an error inside a region such as `torch.no_grad()`, the region stays open, unlike in eager
   code. It must be closed, because code that runs after the error would otherwise run inside the region.
"""

from __future__ import annotations

import contextlib
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import _functorch
from torch._C._functorch import TransformType
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._python_dispatch import _pop_mode, _push_mode

from amprewrite.graphs.fx.node_facts import ENTER_AUTOCAST, bodies, example_value
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.torch_internals.dispatch import (
    count_dispatch_modes,
    current_transform,
    disable_dispatch_modes,
    dispatch_modes,
    in_forward_mode,
    leave_forward_mode,
    saved_tensors_are_hooked,
    set_grad_enabled,
)
from amprewrite.torch_internals.dynamo import skip_code

P = ParamSpec("P")
R = TypeVar("R")

_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)
"""Dispatch modes of a selective checkpoint: the first keeps results in the forward, the second returns them in the recomputation."""

_CLOSES = {
    TransformType.Grad: _functorch._grad_decrement_nesting,
    TransformType.Jvp: _functorch._jvp_decrement_nesting,
    TransformType.Vmap: _functorch._vmap_decrement_nesting,
    TransformType.Functionalize: _functorch._func_decrement_nesting,
}
"""The function that closes a torch.func transform, by the kind of the transform."""
_AUTOCASTS = ("cpu", "cuda")
"""Devices for which a graph may enable or disable autocast."""
_ATTENTION_KERNELS = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)
"""For each attention kernel that `torch.nn.attention.sdpa_kernel` can choose: (function that returns whether it is enabled, setter)."""


def uncaptured(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude `function`, and everything that it calls, from Dynamo's capture. Return `function` itself, so calls have no extra cost."""
    assert isinstance(function, types.FunctionType)
    skip_code(function.__code__, callees=True)
    return function


class GradMode:
    """A context that enables gradients (`on`) or disables them. It takes 1 us, torch.set_grad_enabled takes 3 us."""

    __slots__ = ("_before", "_on")

    def __init__(self, on: bool) -> None:
        self._on = on

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        set_grad_enabled(self._on)

    def __exit__(self, *_: object) -> None:
        set_grad_enabled(self._before)


def unhooked() -> contextlib.AbstractContextManager[Any]:
    """Return a context that hides tensors saved for backward from saved-tensor hooks of outer code, such as a checkpoint's."""
    around = saved_tensors_are_hooked()
    return saved_tensors_hooks(_itself, _itself) if around else contextlib.nullcontext()


def enters_regions(graph: torch.fx.Graph) -> bool:
    """True if `graph`, or a body graph in it, may change a mode of the thread, such as grad mode.

    Every call without tensor operands that returns None counts, because calls that change a mode have this form.
    """
    calls = (node for node in graph.nodes if node.op == "call_function" and not node.all_input_nodes)
    inside = (body.graph for node in graph.nodes for body in bodies(node))
    # a call that enters autocast is found by name, because a dry run stores the context object as its value
    return any(example_value(node) is None or op_name(node.target) == ENTER_AUTOCAST for node in calls) or any(map(enters_regions, inside))


@contextlib.contextmanager
def closed_if_raised() -> Iterator[None]:
    """Context manager that, on an error, closes the torch.func transforms and regions that a graph left open.

    It also restores the modes of the thread, such as grad mode, and raises the error again.
    """
    transforms = _functorch.get_dynamic_layer_stack_depth()
    forward_mode = in_forward_mode()
    hooks_barred = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
    inference, grad, caches = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    autocasts = [(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in _AUTOCASTS]
    kernels = [(enable, enabled()) for enabled, enable in _ATTENTION_KERNELS]
    nested = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try:
        yield
    except BaseException as error:
        if torch.is_inference_mode_enabled() and not inference:
            traceback.clear_frames(error.__traceback__)  # inference mode ends when its guard, an object in these frames, is freed
        if not forward_mode:
            leave_forward_mode()
        # close the transforms one by one with _CLOSES: torch 2.11's own function closes two transforms in one call
        while _functorch.get_dynamic_layer_stack_depth() > transforms:
            _CLOSES[current_transform().key()]()
        if not hooks_barred:
            torch._C._autograd._saved_tensors_hooks_enable()
        torch.set_grad_enabled(grad)
        for device, dtype, enabled in autocasts:
            torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_cache_enabled(caches)
        while torch.autocast_increment_nesting() > nested:
            torch.autocast_decrement_nesting()
            if not torch.autocast_decrement_nesting():
                torch.clear_autocast_cache()
        torch.autocast_decrement_nesting()
        for enable, on in kernels:
            enable(on)
        raise


def unselected() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no outer selective checkpoint sees the ops that run. Other dispatch modes still see them."""
    if not count_dispatch_modes():
        return contextlib.nullcontext()
    modes = dispatch_modes()
    others = not_selective(modes)
    return contextlib.nullcontext() if len(others) == len(modes) else _under(others)


def not_selective(modes: Sequence[Any]) -> list[Any]:
    """Return the dispatch modes in `modes` that do not belong to a selective activation checkpoint, in the same order."""
    return [mode for mode in modes if not isinstance(mode, _SELECTIVE)]


@contextlib.contextmanager
def _under(modes: Sequence[Any]) -> Iterator[None]:
    """Run the code of the `with` block under the dispatch modes `modes` alone."""
    with disable_dispatch_modes(), pushed(modes):
        yield


@contextlib.contextmanager
def pushed(modes: Sequence[Any]) -> Iterator[None]:
    """Push `modes` on the stack of dispatch modes, the first one lowest, and pop them at the end of the context."""
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
