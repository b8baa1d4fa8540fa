"""Clone a module tree: make new module objects of the same classes that hold the same parameter and buffer objects.

Lists, dicts, sets and tuples that modules hold are copied, and so are bound methods and hooks. The copies refer to the modules of the
clone. Dataclasses, namespaces and namedtuples count as configurations: they are copied only if they hold a module or a copied container. A
container that several modules share is copied once: a cache that layers share is shared by their clones. The clone shares every other
attribute with the original, in `__slots__`, too, as `copy.copy` does. So `clone.eval()` or a hook on the clone does not change the
original, but an optimizer step changes the original, too.

A container among the bound arguments of a hook, as in `functools.partial(save, store)`, belongs to the code that made the hook. It is
copied only if a module holds the container, too, or the container holds a module. Objects of other classes, closures and weak references
still refer to the modules of the original.
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
_PLAIN = {type(None), bool, int, float, str, torch.Tensor, nn.Parameter, torch.device, torch.dtype}
"""Classes of values that are shared and hold no module. Most attributes of a module are such values or empty containers."""


def clone_of(module: nn.Module, root_class: type | None = None) -> nn.Module:
    """Return a clone of `module`. The root of the clone gets the class `root_class`, or the class of `module` if it is None."""
    cloning = _Cloning(module)
    root = cloning.of(module)
    if root_class is not None:
        root.__class__ = root_class
    return root


class _Cloning:
    """The state while one tree is cloned. `made` has the copy of each module and container, by the id of the original."""

    def __init__(self, module: nn.Module) -> None:
        self.made: dict[int, Any] = {}
        self.owned: set[int] = set()
        """Ids of containers that a module of the tree holds, directly or in another container."""
        self.holding: dict[int, bool] = {}
        """Results of `_holds`, by the id of the container."""
        found = self._reachable(module)
        for original in found:  # by object.__new__: a GraphModule's own __new__ would make a class without `forward`
            self.made[id(original)] = object.__new__(type(original))
        for original in found:
            self._fill(original)

    def of(self, module: nn.Module) -> nn.Module:
        """Return the clone of a module of the tree."""
        clone: nn.Module = self.made[id(module)]
        return clone

    def _reachable(self, module: nn.Module) -> list[nn.Module]:
        """Return each module of the tree once, including modules in containers.

        Add to `owned` the ids of the containers that are copied with their module, and not shared with the original.
        """
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
                owned = owned and type(current) in _CONTAINERS  # not a dataclass: it counts as a configuration, and is shared
                items = _items(current)
                if owned:
                    self.owned.add(id(current))
            for item in items:
                if type(item) in _PLAIN:
                    continue
                if type(item) in _CONTAINERS and not item:
                    if owned:
                        self.owned.add(id(item))
                elif _leads_on(item):
                    stack.append((item, owned))
        return list(found.values())

    def _fill(self, original: nn.Module) -> None:
        """Give the clone of `original` all attributes, except a compiled call, which would run the original."""
        clone = self.of(original)
        for key, value in original.__dict__.items():
            if key != "_compiled_call_impl":
                clone.__dict__[key] = value if type(value) in _PLAIN else self._carried(value)
        for slot in _filled_slots(original):
            slot.__set__(clone, self._carried(slot.__get__(original)))

    def _carried(self, value: Any) -> Any:
        """Return `value` with the tree's modules replaced by clones. Containers in `owned` or around modules are copied, others shared."""
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
        """Return a copy of a container. A mutable copy is in `made` before its items are copied, because an item may refer to it."""
        if isinstance(value, tuple | frozenset):
            return self._rebuilt(value)
        kind: Any = type(value)
        simple = kind in (dict, list, set) or (kind is OrderedDict and not vars(value))
        made = kind() if simple else copy.copy(value) if kind in _GROWING else kind.__new__(kind)
        self.made[id(value)] = made
        if isinstance(value, dict):
            made.clear()
            for key, item in value.items():
                made[key if type(key) in _PLAIN else self._carried(key)] = item if type(item) in _PLAIN else self._carried(item)
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
        """Return a copy of a tuple or frozenset with copied items, or `value` itself if no item needs a copy."""
        carried = [self._carried(item) for item in value]
        if all(new is old for new, old in zip(carried, value, strict=True)):
            made = value
        else:
            made = type(value)._make(carried) if hasattr(value, "_make") else type(value)(carried)
        self.made[id(value)] = made
        return made

    def _holds(self, value: Any) -> bool:
        """True if a container holds a module of the tree or a container in `owned`, directly or through other containers."""
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
    """True if a value is a module or may hold modules. A TorchScript module is compiled C++ that cannot be cloned: it is shared."""
    return _is_container(value) or (isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule))


def _is_container(value: Any) -> bool:
    """True if a value is a plain container, namedtuple, dataclass or namespace. Other subclasses of containers are not copied."""
    if type(value) in _CONTAINERS or isinstance(value, types.SimpleNamespace):
        return True
    named = isinstance(value, tuple) and hasattr(value, "_make")
    return named or (dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module | dict | list | set))


def _members(value: Any) -> dict[str, Any]:
    """Return the members of a dataclass or namespace by name. Its own `__getattribute__` is not called: it may raise for some members."""
    if isinstance(value, types.SimpleNamespace):
        return vars(value)
    fields = {field.name for field in dataclasses.fields(value)}
    held = {slot.__name__: slot.__get__(value) for slot in _filled_slots(value) if slot.__name__ in fields}
    with contextlib.suppress(AttributeError):  # objects of a class with __slots__ may have no __dict__
        held |= object.__getattribute__(value, "__dict__")
    return held


def _items(value: Any) -> list[Any]:
    """Return all items of a container, including the keys of a dict."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if type(value) in _CONTAINERS or isinstance(value, tuple):
        return list(value)
    return list(_members(value).values())


def _filled_slots(value: Any) -> Iterator[Any]:
    """Yield the descriptor of each `__slots__` attribute that has a value in this object."""
    for cls in (each for each in type(value).__mro__ if "__slots__" in vars(each)):
        for found in vars(cls).values():
            if isinstance(found, types.MemberDescriptorType):
                try:
                    found.__get__(value)
                except AttributeError:
                    continue
                yield found
