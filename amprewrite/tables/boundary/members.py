"""Functions that list all modules, parameters and buffers of a user's module.

A class may override `named_parameters` with another signature, or leave out some parameters, as loss modules with target networks do. So
these functions first find all parameters or buffers that are registered in the modules of `named_modules`, in PyTorch's order. As in
PyTorch, a member with several names is yielded once if `remove_duplicate` is True. The functions take a fifth of the time of PyTorch's
methods, in which each module passes through one generator for each module above it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from torch import Tensor, nn


def named_modules_in(model: nn.Module, remove_duplicate: bool = True) -> list[tuple[str, nn.Module]]:
    """Return (path, module) for `model`, with path "", and for all modules below it: the result of `model.named_modules`, as a list.

    With `remove_duplicate`, a module with several paths is listed under the first path only.
    """
    if type(model).named_modules is not nn.Module.named_modules:  # an override may list modules that are not registered as children
        return list(model.named_modules() if remove_duplicate else model.named_modules(remove_duplicate=False))
    found: list[tuple[str, nn.Module]] = []
    _add_modules(model, "", found, set() if remove_duplicate else None)
    return found


def _add_modules(module: nn.Module, path: str, found: list[tuple[str, nn.Module]], known: set[int] | None) -> None:
    if known is not None:
        if id(module) in known:
            return
        known.add(id(module))
    found.append((path, module))
    for name, child in module._modules.items():
        if child is not None:
            _add_modules(child, f"{path}.{name}" if path else name, found, known)


def modules_in(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `named_modules_in`, without paths."""
    return [module for _, module in named_modules_in(model)]


def named_parameters_in(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter): the registered parameters, then further parameters that an overridden `named_parameters` returns.

    With `remove_duplicate`, a parameter with several names is yielded under the first name only.
    """
    return iter(_members(model, "_parameters", "named_parameters", remove_duplicate))


def parameters_in(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of `named_parameters_in`, without names."""
    return map(itemgetter(1), named_parameters_in(model))


def named_buffers_in(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer): the registered buffers, then further buffers that an overridden `named_buffers` returns.

    With `remove_duplicate`, a buffer with several names is yielded under the first name only.
    """
    return iter(_members(model, "_buffers", "named_buffers", remove_duplicate))


def buffers_in(model: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of `named_buffers_in`, without names."""
    return map(itemgetter(1), named_buffers_in(model))


def _members(model: nn.Module, table: str, method: str, remove_duplicate: bool) -> list[tuple[str, Any]]:
    """Return (name, member) for all registered parameters or buffers, then for further members that an overridden method returns.

    `table` and `method` are "_parameters" and "named_parameters", or "_buffers" and "named_buffers".
    """
    # PyTorch's methods call an overridden `named_modules`, and list the members of the modules that it returns
    if type(model).named_modules is not nn.Module.named_modules:
        found = list(getattr(nn.Module, method)(model, remove_duplicate=remove_duplicate))
        known = {id(member) for _, member in found}
    else:
        found, known = _registered(model, table, remove_duplicate)
    own = getattr(type(model), method)
    if own is not getattr(nn.Module, method) and _takes_nothing(own):
        found += [(name, member) for name, member in own(model) if id(member) not in known]
    return found


def _registered(model: nn.Module, table: str, remove_duplicate: bool) -> tuple[list[tuple[str, Any]], set[int]]:
    """Return a list of (name, member) for the parameters or buffers of `model` and of its submodules, and the set of the members' ids.

    `table` is the attribute that holds a module's members, such as "_parameters". With `remove_duplicate` a shared member is listed once.
    """
    found, known = list[tuple[str, Any]](), set[int]()
    for path, module in named_modules_in(model, remove_duplicate):
        for name, member in getattr(module, table).items():
            if member is not None and not (remove_duplicate and id(member) in known):
                known.add(id(member))
                found.append((f"{path}.{name}" if path else name, member))
    return found, known


@functools.lru_cache(maxsize=64)
def _takes_nothing(method: Callable[..., Any]) -> bool:
    """True if a method can be called without arguments."""
    given = list(inspect.signature(method).parameters.values())[1:]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(each.default is not inspect.Parameter.empty or each.kind in variable for each in given)
