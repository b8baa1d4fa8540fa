"""Functions that list all parameters and buffers of a user's module.

A class may override `named_parameters` with another signature, or leave out some parameters, as loss modules with target networks do. So
these functions call PyTorch's own method first, which finds every registered member, whatever the class overrides. As in PyTorch, a member
with several names is yielded once if `remove_duplicate` is True.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn


def named_parameters_in(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter): the registered parameters, then further parameters that an overridden `named_parameters` returns.

    With `remove_duplicate`, a parameter with several names is yielded under the first name only.
    """
    return _members(model, "named_parameters", remove_duplicate)


def parameters_in(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of `named_parameters_in`, without names."""
    return (parameter for _, parameter in named_parameters_in(model))


def named_buffers_in(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer): the registered buffers, then further buffers that an overridden `named_buffers` returns.

    With `remove_duplicate`, a buffer with several names is yielded under the first name only.
    """
    return _members(model, "named_buffers", remove_duplicate)


def buffers_in(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of `named_buffers_in`, without names."""
    return (buffer for _, buffer in named_buffers_in(model))


def _members(model: nn.Module, method: str, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    own, registered = getattr(type(model), method), getattr(nn.Module, method)
    found: Iterator[tuple[str, Any]] = registered(model, remove_duplicate=remove_duplicate)
    if own is registered or not _takes_nothing(own):
        return found
    first = list(found)
    known = {id(member) for _, member in first}
    return chain(first, ((name, member) for name, member in own(model) if id(member) not in known))


@functools.lru_cache(maxsize=64)
def _takes_nothing(method: Callable[..., Any]) -> bool:
    """True if a method can be called without arguments."""
    given = list(inspect.signature(method).parameters.values())[1:]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(each.default is not inspect.Parameter.empty or each.kind in variable for each in given)
