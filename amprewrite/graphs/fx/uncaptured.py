"""Keep what is ours from Dynamo and from autograd's hooks, which must not take it for the model's.

A model that takes gradients itself runs a backward while Dynamo still captures what is called: the functions and hooks that autograd
then calls would become graphs of their own, planned and rewritten as if the model had them. An activation checkpoint counts what is
saved for backward while it runs: what a trial run of ours saves must not be among it. A selective one keeps the results of ops in the
order in which they came: copies of weights that are there already when it runs again must not be among those. A trial run that raises
must not leave open the transforms and modes that its graph had opened: what runs next would run inside them.
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
"""What keeps results in the forward of a selective checkpoint, and what gives them back."""

_CLOSES = {
    TransformType.Grad: _functorch._grad_decrement_nesting,
    TransformType.Jvp: _functorch._jvp_decrement_nesting,
    TransformType.Vmap: _functorch._vmap_decrement_nesting,
    TransformType.Functionalize: _functorch._func_decrement_nesting,
}
"""What closes a torch.func transform of each kind."""
_AUTOCASTS = ("cpu", "cuda")
"""Devices whose autocast a graph may switch."""


def uncaptured(function: Callable[P, R]) -> Callable[P, R]:
    """`function` itself, which runs as it is written, and all that it calls. A call costs nothing more."""
    assert isinstance(function, types.FunctionType)
    skip_code(function.__code__, callees=True)
    return function


class GradMode:
    """A context in which gradients are recorded, or are not: torch.set_grad_enabled, which takes 3 us, in one."""

    __slots__ = ("_before", "_on")

    def __init__(self, on: bool) -> None:
        self._on = on

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        set_grad_enabled(self._on)

    def __exit__(self, *_: object) -> None:
        set_grad_enabled(self._before)


def unhooked() -> contextlib.AbstractContextManager[Any]:
    """A context in which what is saved for backward reaches no hook around it."""
    around = saved_tensors_are_hooked()
    return saved_tensors_hooks(_itself, _itself) if around else contextlib.nullcontext()


@contextlib.contextmanager
def closed_if_raised() -> Iterator[None]:
    """A context that raises what is raised in it and closes what a graph had opened: torch.func transforms, autocast, a grad mode."""
    transforms = _functorch.get_dynamic_layer_stack_depth()
    hooks_barred = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
    grad = torch.is_grad_enabled()
    autocasts = [(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in _AUTOCASTS]
    nested = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try:
        yield
    except BaseException:
        while _functorch.get_dynamic_layer_stack_depth() > transforms:  # one by one: torch 2.11's own way closes two at once
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
    """A context in which no selective checkpoint around it sees what is computed; other dispatch modes do."""
    if not count_dispatch_modes():
        return contextlib.nullcontext()
    modes = dispatch_modes()
    others = not_selective(modes)
    return contextlib.nullcontext() if len(others) == len(modes) else _under(others)


def not_selective(modes: Sequence[Any]) -> list[Any]:
    """Those of the dispatch modes that are of no selective checkpoint."""
    return [mode for mode in modes if not isinstance(mode, _SELECTIVE)]


@contextlib.contextmanager
def _under(modes: Sequence[Any]) -> Iterator[None]:
    """No other dispatch modes than these."""
    with disable_dispatch_modes(), pushed(modes):
        yield


@contextlib.contextmanager
def pushed(modes: Sequence[Any]) -> Iterator[None]:
    """Put dispatch modes on the stack, the first one lowest."""
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
