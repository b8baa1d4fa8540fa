"""A clone of a module tree: new module objects of the same classes around the very same parameters and buffers.

Containers of modules, bound methods and hooks are carried over to the clone's modules; every other attribute is shared, as
`copy.copy` would, those in `__slots__` too. So `clone.eval()` or a hook on the clone leaves the original alone, while one
optimizer step moves both.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_CONTAINERS = (dict, OrderedDict, list, tuple, set)


def clone_of(module: nn.Module, root_class: type | None = None) -> nn.Module:
    """A clone of `module`; its root gets `root_class` if one is given."""
    clones: dict[int, nn.Module] = {}
    _make_all(module, clones)
    for original in list(_reachable(module)):
        _fill(original, clones)
    root = clones[id(module)]
    if root_class is not None:
        root.__class__ = root_class
    return root


def _reachable(module: nn.Module) -> dict[nn.Module, None]:
    """All modules of the tree, and those that hide in plain containers of it, each once."""
    found: dict[int, nn.Module] = {}
    stack = [module]
    while stack:
        current = stack.pop()
        if id(current) in found:
            continue
        found[id(current)] = current
        for value in (*current.__dict__.values(), *(slot.__get__(current) for slot in _filled_slots(current))):
            stack.extend(_modules_in(value))
    return dict.fromkeys(found.values())


def _filled_slots(module: nn.Module) -> Iterator[Any]:
    """The descriptors of attributes that the module's classes keep in `__slots__`, if they hold a value here."""
    for cls in type(module).__mro__:
        for found in vars(cls).values():
            if isinstance(found, types.MemberDescriptorType):
                try:
                    found.__get__(module)
                except AttributeError:
                    continue
                yield found


def _modules_in(value: Any, depth: int = 0) -> list[nn.Module]:
    if isinstance(value, nn.Module):
        return [] if isinstance(value, torch.jit.ScriptModule) else [value]  # compiled C++ cannot be taken apart: shared
    if type(value) in _CONTAINERS and depth < 6:
        inner = value.values() if isinstance(value, dict) else value
        return [module for item in inner for module in _modules_in(item, depth + 1)]
    return []


def _make_all(module: nn.Module, clones: dict[int, nn.Module]) -> None:
    for original in _reachable(module):
        clones[id(original)] = object.__new__(type(original))  # a GraphModule's own __new__ would make a class without forward


def _fill(original: nn.Module, clones: dict[int, nn.Module]) -> None:
    clone = clones[id(original)]
    for key, value in original.__dict__.items():
        if key != "_compiled_call_impl":
            clone.__dict__[key] = _carried(value, clones)
    for slot in _filled_slots(original):
        slot.__set__(clone, _carried(slot.__get__(original), clones))


def _carried(value: Any, clones: dict[int, nn.Module], depth: int = 0) -> Any:
    """`value` with every module of the tree replaced by its clone; containers are copied, anything else is shared."""
    if isinstance(value, nn.Module):
        return clones.get(id(value), value)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        return types.MethodType(value.__func__, clones.get(id(value.__self__), value.__self__))
    if isinstance(value, functools.partial):
        return functools.partial(
            _carried(value.func, clones),
            *[_carried(a, clones) for a in value.args],
            **{k: _carried(v, clones) for k, v in value.keywords.items()},
        )
    if type(value) in _CONTAINERS and depth < 6:
        if isinstance(value, dict):
            return type(value)((key, _carried(item, clones, depth + 1)) for key, item in value.items())
        return type(value)(_carried(item, clones, depth + 1) for item in value)
    return value
