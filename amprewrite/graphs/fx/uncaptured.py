"""Hide our own code from Dynamo, autograd hooks and checkpoints, which must not take it for the model's.

A model that computes gradients itself runs a backward while Dynamo still captures: the functions and hooks that autograd then calls would
become graphs of their own, planned and rewritten as the model's. An activation checkpoint counts the tensors saved for backward while it
runs: tensors saved by a trial run of ours must not count. A selective checkpoint keeps the results of ops in order: copies of weights that
already exist when it recomputes must not be among them. A trial run that raises must close the transforms and modes that its graph opened:
otherwise the next code would run inside them.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C import _functorch
from torch._C._functorch import TransformType
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils._python_dispatch import _pop_mode, _push_mode

from amprewrite.torch_internals.autograd import saved_tensors_are_hooked, set_grad_enabled
from amprewrite.torch_internals.dispatch import count_dispatch_modes, current_transform, disable_dispatch_modes, dispatch_modes
from amprewrite.torch_internals.dynamo import skip_code

P = ParamSpec("P")
R = TypeVar("R")

_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)
"""Dispatch modes of a selective checkpoint: the first keeps results in the forward, the second returns them."""

_CLOSES = {
    TransformType.Grad: _functorch._grad_decrement_nesting,
    TransformType.Jvp: _functorch._jvp_decrement_nesting,
    TransformType.Vmap: _functorch._vmap_decrement_nesting,
    TransformType.Functionalize: _functorch._func_decrement_nesting,
}
"""Functions that close a torch.func transform of each kind."""
_AUTOCASTS = ("cpu", "cuda")
"""Devices whose autocast a graph may switch."""


def uncaptured(function: Callable[P, R]) -> Callable[P, R]:
    """`function` itself, excluded from capture with everything that it calls. A call has no extra cost."""
    assert isinstance(function, types.FunctionType)
    skip_code(function.__code__, callees=True)
    return function


class GradMode:
    """A context that records gradients, or does not: torch.set_grad_enabled, which takes 3 us, in one."""

    __slots__ = ("_before", "_on")

    def __init__(self, on: bool) -> None:
        self._on = on

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        set_grad_enabled(self._on)

    def __exit__(self, *_: object) -> None:
        set_grad_enabled(self._before)


def unhooked() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors saved for backward reach no outer hook."""
    around = saved_tensors_are_hooked()
    return saved_tensors_hooks(_itself, _itself) if around else contextlib.nullcontext()


@contextlib.contextmanager
def closed_if_raised() -> Iterator[None]:
    """A context that on an error closes what a graph had opened (torch.func transforms, autocast, a grad mode), and raises it again."""
    transforms = _functorch.get_dynamic_layer_stack_depth()
    hooks_barred = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
    grad = torch.is_grad_enabled()
    autocasts = [(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in _AUTOCASTS]
    nested = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try:
        yield
    except BaseException:
        while _functorch.get_dynamic_layer_stack_depth() > transforms:  # one by one: torch 2.11's own function closes two at once
            _CLOSES[current_transform().key()]()
        if not hooks_barred:
            torch._C._autograd._saved_tensors_hooks_enable()
        torch.set_grad_enabled(grad)
        for device, dtype, enabled in autocasts:
            torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_enabled(device, enabled)
        while torch.autocast_increment_nesting() > nested:
            torch.autocast_decrement_nesting()
            if not torch.autocast_decrement_nesting():
                torch.clear_autocast_cache()
        torch.autocast_decrement_nesting()
        raise


def unselected() -> contextlib.AbstractContextManager[Any]:
    """A context whose computations no outer selective checkpoint sees. Other dispatch modes do."""
    if not count_dispatch_modes():
        return contextlib.nullcontext()
    modes = dispatch_modes()
    others = not_selective(modes)
    return contextlib.nullcontext() if len(others) == len(modes) else _under(others)


def not_selective(modes: Sequence[Any]) -> list[Any]:
    """The dispatch modes that belong to no selective checkpoint."""
    return [mode for mode in modes if not isinstance(mode, _SELECTIVE)]


@contextlib.contextmanager
def _under(modes: Sequence[Any]) -> Iterator[None]:
    """A context with these dispatch modes and no others."""
    with disable_dispatch_modes(), pushed(modes):
        yield


@contextlib.contextmanager
def pushed(modes: Sequence[Any]) -> Iterator[None]:
    """Push dispatch modes on the stack, the first one lowest."""
    for mode in modes:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


__all__ = ["GradMode", "closed_if_raised", "not_selective", "pushed", "uncaptured", "unhooked", "unselected"]
