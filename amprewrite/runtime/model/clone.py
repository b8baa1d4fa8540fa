"""A clone of a module tree: new module objects of the same classes around the very same parameters and buffers.

Containers, bound methods and hooks are carried over to the clone's modules, and what was one container stays one: a cache that layers
share is shared by their clones. Every other attribute is shared, as `copy.copy` would, those in `__slots__` too. So `clone.eval()` or a
hook on the clone leaves the original alone, while one optimizer step moves both.

What a hook is given, `functools.partial(save, store)`, belongs to whoever made the hook: a container there is copied only if a module
holds it, too, or it holds a module. An object of a class of its own, a closure or a weak reference goes on naming the original's modules.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_MAPPINGS = (dict, OrderedDict, defaultdict)
_GROWING = (*_MAPPINGS, list, set, deque)
_CONTAINERS = (*_GROWING, tuple, frozenset)


def clone_of(module: nn.Module, root_class: type | None = None) -> nn.Module:
    """A clone of `module`; its root gets `root_class` if one is given."""
    cloning = _Cloning(module)
    root = cloning.of(module)
    if root_class is not None:
        root.__class__ = root_class
    return root


class _Cloning:
    """One clone on its way: `made` is what stands for each module and container, by identity."""

    def __init__(self, module: nn.Module) -> None:
        self.made: dict[int, Any] = {}
        self.kept: list[Any] = []  # what an identity in `made` belongs to must live as long
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
        """All modules of the tree, and those that hide in containers of it, each once."""
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
            return made
        if _is_container(value) and (id(value) in self.owned or self._holds(value)):
            return self._copied(value)
        return value

    def _copied(self, value: Any) -> Any:
        self.kept.append(value)
        if type(value) not in _GROWING:
            return self._rebuilt(value)
        if isinstance(value, defaultdict):
            made: Any = defaultdict(value.default_factory)
        else:
            made = deque(maxlen=value.maxlen) if isinstance(value, deque) else type(value)()
        self.made[id(value)] = made  # before its items, one of which may hold it
        for item in value.items() if isinstance(value, dict) else value:
            if isinstance(value, dict):
                made[self._carried(item[0])] = self._carried(item[1])
            elif isinstance(value, set):
                made.add(self._carried(item))
            else:
                made.append(self._carried(item))
        return made

    def _rebuilt(self, value: Any) -> Any:
        """What cannot be filled bit by bit, or is no container by its class: the same object if nothing in it is another one."""
        items = _items(value)
        carried = [self._carried(item) for item in items]
        if all(new is old for new, old in zip(carried, items, strict=True)):
            made = value
        elif isinstance(value, tuple | frozenset):
            made = type(value)._make(carried) if hasattr(value, "_make") else type(value)(carried)  # type: ignore[attr-defined]
        else:
            kind: Any = type(value)
            made = kind.__new__(kind)
            for name, item in zip(_names(value), carried, strict=True):
                object.__setattr__(made, name, item)
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
            self.kept.append(value)
        return self.holding[id(value)]


def _leads_on(value: Any) -> bool:
    """Whether a value is a module, or may hold some. Compiled C++ cannot be taken apart: it is shared."""
    return _is_container(value) or (isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule))


def _is_container(value: Any) -> bool:
    if type(value) in _CONTAINERS or isinstance(value, types.SimpleNamespace):
        return True
    named = isinstance(value, tuple) and hasattr(value, "_make")
    return named or (dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module))


def _names(value: Any) -> list[str]:
    """The attributes of a dataclass or namespace."""
    if isinstance(value, types.SimpleNamespace):
        return list(vars(value))
    names = dict.fromkeys(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
    return list(names | dict.fromkeys(getattr(value, "__dict__", ())))


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if type(value) in _CONTAINERS or isinstance(value, tuple):
        return list(value)
    return [getattr(value, name) for name in _names(value)]


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
