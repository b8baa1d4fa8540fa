"""A clone of a module tree: new module objects of the same classes around the very same parameters and buffers.

Containers, bound methods and hooks are carried over to the clone's modules, and what was one container stays one: a cache that layers
share is shared by their clones. Every other attribute is shared, as `copy.copy` would, those in `__slots__` too. So `clone.eval()` or a
hook on the clone leaves the original alone, while one optimizer step moves both.

What a hook is given, `functools.partial(save, store)`, belongs to whoever made the hook: a container there is copied only if a module
holds it, too, or it holds a module. An object of a class of its own, a closure or a weak reference goes on naming the original's modules.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_GROWING = (dict, OrderedDict, defaultdict, list, set, deque)
_CONTAINERS = (*_GROWING, tuple, frozenset)


def clone_of(module: nn.Module, root_class: type | None = None) -> nn.Module:
    """A clone of `module`; its root gets `root_class` if one is given."""
    cloning = _Cloning(module)
    root = cloning.of(module)
    if root_class is not None:
        root.__class__ = root_class
    return root


class _Cloning:
    """One clone on its way: `made` is what stands for each module and container, by identity. The original keeps those alive."""

    def __init__(self, module: nn.Module) -> None:
        self.made: dict[int, Any] = {}
        self.owned: set[int] = set()
        """Containers that a module of the tree holds, itself or in another container."""
        self.holding: dict[int, bool] = {}
        """Whether a module, or a container of `owned`, is reached from a value."""
        found = self._reachable(module)
        for original in found:  # a GraphModule's own __new__ would make a class without forward
            self.made[id(original)] = object.__new__(type(original))
        for original in found:
            self._fill(original)

    def of(self, module: nn.Module) -> nn.Module:
        clone: nn.Module = self.made[id(module)]
        return clone

    def _reachable(self, module: nn.Module) -> list[nn.Module]:
        """All modules of the tree, including modules in plain containers in it, each once."""
        found: dict[int, nn.Module] = {}
        stack: list[tuple[Any, bool]] = [(module, True)]
        seen: set[tuple[int, bool]] = set()
        while stack:
            current, owned = stack.pop()
            if (id(current), owned) in seen:
                continue
            seen.add((id(current), owned))
            if isinstance(current, nn.Module):
                found[id(current)] = current
                items = [*current.__dict__.values(), *(slot.__get__(current) for slot in _filled_slots(current))]
                owned = True
            else:
                owned = owned and type(current) in _CONTAINERS  # a configuration stays one for both, with what it holds
                items = _items(current)
                if owned:
                    self.owned.add(id(current))
            stack.extend((item, owned) for item in items if _leads_on(item))
        return list(found.values())

    def _fill(self, original: nn.Module) -> None:
        clone = self.of(original)
        for key, value in original.__dict__.items():
            if key != "_compiled_call_impl":
                clone.__dict__[key] = self._carried(value)
        for slot in _filled_slots(original):
            slot.__set__(clone, self._carried(slot.__get__(original)))

    def _carried(self, value: Any) -> Any:
        """`value` with every module of the tree replaced by its clone; containers are copied, anything else is shared."""
        if id(value) in self.made:
            return self.made[id(value)]
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self._carried(value.__self__))
        if isinstance(value, functools.partial):
            made = functools.partial(
                self._carried(value.func),
                *[self._carried(a) for a in value.args],
                **{k: self._carried(v) for k, v in value.keywords.items()},
            )
            made.__dict__.update(value.__dict__)
            self.made[id(value)] = made
            return made
        if _is_container(value) and (id(value) in self.owned or self._holds(value)):
            return self._copied(value)
        return value

    def _copied(self, value: Any) -> Any:
        """A copy of a container, which is known before its items are copied where one of them may hold it."""
        if isinstance(value, tuple | frozenset):
            return self._rebuilt(value)
        kind: Any = type(value)
        made = copy.copy(value) if kind in _GROWING else kind.__new__(kind)
        self.made[id(value)] = made
        if isinstance(value, dict):
            made.clear()
            made.update((self._carried(key), self._carried(item)) for key, item in value.items())
        elif isinstance(value, set):
            made.clear()
            made.update(self._carried(item) for item in value)
        elif kind in _GROWING:
            made.clear()
            made.extend(self._carried(item) for item in value)
        else:
            for name, item in _members(value).items():
                object.__setattr__(made, name, self._carried(item))
        return made

    def _rebuilt(self, value: Any) -> Any:
        """A tuple or frozen set around what its items became: the same one if these are."""
        carried = [self._carried(item) for item in value]
        if all(new is old for new, old in zip(carried, value, strict=True)):
            made = value
        else:
            made = type(value)._make(carried) if hasattr(value, "_make") else type(value)(carried)
        self.made[id(value)] = made
        return made

    def _holds(self, value: Any) -> bool:
        """Whether a module of the tree, or a container that one holds, is reached from a container through others."""
        if id(value) not in self.holding:
            stack, seen, found = [value], set[int](), False
            while stack and not found:
                current = stack.pop()
                found = id(current) in self.owned or (isinstance(current, nn.Module) and id(current) in self.made)
                if id(current) not in seen and _is_container(current):
                    seen.add(id(current))
                    stack.extend(_items(current))
            self.holding[id(value)] = found
        return self.holding[id(value)]


def _leads_on(value: Any) -> bool:
    """Whether a value is a module, or may hold some. Compiled C++ cannot be taken apart: it is shared."""
    return _is_container(value) or (isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule))


def _is_container(value: Any) -> bool:
    """Whether a value is a plain container, or a record of fields. A subclass of a container may do more, and is shared."""
    if type(value) in _CONTAINERS or isinstance(value, types.SimpleNamespace):
        return True
    named = isinstance(value, tuple) and hasattr(value, "_make")
    return named or (dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module | dict | list | set))


def _members(value: Any) -> dict[str, Any]:
    """The members of a dataclass or namespace, by name. Its own code that reads attributes is not asked: it may refuse some."""
    if isinstance(value, types.SimpleNamespace):
        return vars(value)
    fields = {field.name for field in dataclasses.fields(value)}
    held = {slot.__name__: slot.__get__(value) for slot in _filled_slots(value) if slot.__name__ in fields}
    with contextlib.suppress(AttributeError):  # a class may have slots alone
        held |= object.__getattribute__(value, "__dict__")
    return held


def _items(value: Any) -> list[Any]:
    """All that a container holds, keys as well."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if type(value) in _CONTAINERS or isinstance(value, tuple):
        return list(value)
    return list(_members(value).values())


def _filled_slots(value: Any) -> Iterator[Any]:
    """The descriptors of attributes that the value's classes keep in `__slots__`, if they hold something here."""
    for cls in type(value).__mro__:
        for found in vars(cls).values():
            if isinstance(found, types.MemberDescriptorType):
                try:
                    found.__get__(value)
                except AttributeError:
                    continue
                yield found
