"""Record a module before it is rewritten in place, to restore it exactly. Make the class of a rewritten module. Clone a module tree.

1. A rewrite changes the class of the root, and in each module only the attributes in TOUCHED. They are recorded before the first change.
2. Restoring keeps a `forward` that the user set after the rewrite, and the effect of a later `compile()` of the root. It also keeps the
   class of a submodule that was parametrized after the rewrite.
3. All other attributes, such as parameters, buffers and hooks, are never changed.

The class of a rewritten module is a subclass of the module's original class with methods of a mixin:

1. The subclass has the name of the original class, for libraries that look up classes by name.
2. Calling the subclass makes a plain module of the original class. So `type(amp)(config)`, `amp.from_pretrained(path)` and
   `load_from_checkpoint` work as on the original class.
3. pickle stores the subclass as "the rewritten subclass of the original class", because the name of both leads to the original class.
4. Creating the subclass runs no code of the user: no `__init_subclass__`, and no metaclass that keeps a register of classes.
5. The first base of the subclass is the original class. So Python lets `__class__` of an object change between the two: it compares the
   memory layouts along the chain of first bases. Nevertheless methods are looked up in the mixin first, by a custom `mro()`.

A class that a user derives from the subclass is an ordinary class.

A clone of a module tree has new module objects of the same classes that hold the same parameter and buffer objects. Lists, dicts, sets and
tuples that modules hold are copied, and so are bound methods and hooks. The copies refer to the modules of the clone. Dataclasses,
namespaces and namedtuples count as configurations: they are copied only if they hold a module, or a container that is copied anyway because
a module holds it. A container that several modules share is copied once: if layers share a cache, their clones share one copy of it. The
clone shares all other attributes with the original, including attributes in `__slots__`, as `copy.copy` does. So `clone.eval()` or a hook
on the clone does not change the original, but an optimizer step on the clone changes the original, too.

A container among the bound arguments of a hook, as in `functools.partial(save, store)`, belongs to the code that made the hook. It is
copied only if a module holds the container, too, or the container holds a module. Objects of other classes, closures and weak references
still refer to the modules of the original.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import dataclasses
import functools
import inspect
import threading
import types
import weakref
from abc import ABCMeta
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from amprewrite.runtime.model.part_calls import FORWARD, REPLICATE, PartForward

SESSION, BEFORE = "_amprewrite_session", "_amprewrite_before"
_COMPILED = "_compiled_call_impl"
TOUCHED = (SESSION, FORWARD, BEFORE, REPLICATE, "forward", _COMPILED)
"""Names of the instance attributes that a rewrite sets."""
_ABSENT = object()


class Before:
    """The state of a model before it is rewritten in place: for each module, its class and the attributes that a rewrite sets."""

    def __init__(self, root: nn.Module) -> None:
        held = ((each, {name: vars(each)[name] for name in TOUCHED if name in vars(each)}) for each in root.modules())
        self._modules = [(weakref.ref(each), type(each), values) for each, values in held]

    def set_aside(self) -> None:
        """Undo `module.compile()` on the recorded modules, because the rewrite compiles the model itself."""
        for ref, _, _ in self._modules:
            module = ref()
            if module is not None:
                module.__dict__.pop(_COMPILED, None)

    def put_back(self, root: nn.Module) -> None:
        """Restore every recorded module. Modules that were added to `root` after the rewrite lose the attributes of the rewrite."""
        was = {id(module): (cls, values) for ref, cls, values in self._modules if (module := ref()) is not None}
        found = {id(each): each for each in [*root.modules(), *(ref() for ref, _, _ in self._modules)] if each is not None}
        for number, module in found.items():
            cls, values = was.get(number, (type(module), {}))
            _put_back(module, values, is_root=module is root)
            if original_of(type(module)) is not None or original_of(cls) is type(module):  # unless a class was set later (by `weight_norm`)
                module.__class__ = cls


def _put_back(module: nn.Module, values: dict[str, Any], is_root: bool) -> None:
    """Set each attribute that a rewrite sets (TOUCHED) back to its value in `values`, or delete it if `values` lacks it.

    A `forward` that the user set after the rewrite stays. On the root (`is_root`), the effect of a later `compile()` stays, too.
    """
    now = module.__dict__.get("forward", _ABSENT)
    others = {"forward"} if now is not _ABSENT and not isinstance(now, PartForward) else set()
    if is_root and module.__dict__.get(_COMPILED) is not None:
        others.add(_COMPILED)
    for name in TOUCHED:
        if name in others:
            continue
        if name in values:
            module.__dict__[name] = values[name]
        else:
            module.__dict__.pop(name, None)


_ORIGINAL = "_amprewrite_original"
_LOCK = threading.Lock()


def original_of(cls: type) -> type | None:
    """Return the original class from which `subclass_of` made `cls`; None if `subclass_of` did not make `cls`."""
    found: type | None = cls.__dict__.get(_ORIGINAL)
    return found


def subclass_of(mixin: type, cls: type) -> type:
    """Return the subclass of `cls` in which the methods of `mixin` precede the methods of `cls`.

    Repeated calls return the same class, as long as something refers to it. `mixin.members_for(cls)` returns further members of the class.
    """
    with _LOCK:
        made: type
        for made in type.__subclasses__(cls):
            if original_of(made) is cls and issubclass(made, mixin):
                return made
        members: Callable[[type], dict[str, Any]] = mixin.members_for  # type: ignore[attr-defined]
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, _ORIGINAL: cls}
        meta = _metaclass(type(cls))
        base = next(known for known in meta.__mro__ if known in (ABCMeta, type))
        made = base.__new__(meta, cls.__name__, (cls, mixin), {**names, **members(cls)})
        return made


class _CallsOriginal(type):
    """Metaclass of the subclasses that `subclass_of` makes: a call of such a class makes an object of the original class instead."""

    def mro(cls) -> list[type]:
        """Return the method resolution order: classes of the mixin, then classes of the original class. Return Python's order if a user
        derived this class."""
        original = original_of(cls)
        if original is None:
            return super().mro()
        ahead = [known for known in cls.__bases__[1].__mro__ if known not in original.__mro__]
        return [cls, *ahead, *original.__mro__]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        original = original_of(cls)
        return super().__call__(*args, **kwargs) if original is None else original(*args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature of a call of the class, for `inspect.signature`, which would otherwise show the metaclass's `__call__`."""
        original = original_of(cls)
        if original is not None:
            return inspect.signature(original)
        return inspect.signature(functools.partial(cls.__init__, None))  # type: ignore[misc]


@functools.cache
def _metaclass(meta: type) -> type:
    """Return the metaclass for rewritten classes whose original class has the metaclass `meta`. `_reduce_class` pickles these classes."""
    if issubclass(meta, _CallsOriginal):
        return meta
    made = _CallsOriginal if meta is type else type(meta.__name__, (_CallsOriginal, meta), {})
    copyreg.pickle(made, _reduce_class)  # type: ignore[arg-type]
    return made


def _reduce_class(cls: type) -> Any:
    """Return how pickle stores the class `cls`: as a call of `subclass_of`, or by name if a user derived `cls` from a rewritten class."""
    original = original_of(cls)
    if original is None:
        return cls.__qualname__
    return subclass_of, (cls.__bases__[1], original)


_GROWING = (dict, OrderedDict, defaultdict, list, set, deque)
_CONTAINERS = (*_GROWING, tuple, frozenset)
_PLAIN = {type(None), bool, int, float, str, torch.Tensor, nn.Parameter, torch.device, torch.dtype}
"""Classes of values that a clone shares because they hold no module. Most attributes of modules are such values or empty containers."""


def clone_of(module: nn.Module) -> nn.Module:
    """Return a clone of a module tree: new modules with the same parameters."""
    return _Cloning(module).of(module)


class _Cloning:
    """Clones one module tree. `made` maps the id of each original module and container to its copy."""

    def __init__(self, module: nn.Module) -> None:
        self.made: dict[int, Any] = {}
        self.owned: set[int] = set()
        """Ids of containers that a module of the tree holds, directly or in another container."""
        self.holding: dict[int, bool] = {}
        """Results of `_holds`, by the id of the container."""
        found = self._reachable(module)
        for original in found:  # object.__new__, because GraphModule.__new__ would make a class without `forward`
            self.made[id(original)] = object.__new__(type(original))
        for original in found:
            self._fill(original)

    def of(self, module: nn.Module) -> nn.Module:
        """Return the clone of a module of the tree."""
        clone: nn.Module = self.made[id(module)]
        return clone

    def _reachable(self, module: nn.Module) -> list[nn.Module]:
        """Return each module of the tree once, including modules in containers. Add to `owned` the ids of containers that modules hold,
        directly or in another container: the clone gets copies of these containers."""
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
                owned = owned and type(current) in _CONTAINERS  # False for a dataclass, which a clone may share with its original
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
        """Give the clone all attributes of `original`, except the compiled call that `original.compile()` set: it would run `original`."""
        clone = self.of(original)
        for key, value in original.__dict__.items():
            if key != "_compiled_call_impl":
                clone.__dict__[key] = value if type(value) in _PLAIN else self._carried(value)
        for slot in _filled_slots(original):
            slot.__set__(clone, self._carried(slot.__get__(original)))

    def _carried(self, value: Any) -> Any:
        """Return `value` with modules replaced by their clones. Containers that a module owns (`owned`) or that hold modules are copied."""
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
        """Return a copy of a container. A mutable copy is put in `made` before its items are copied: an item may refer to the container."""
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
        made = value
        if any(new is not old for new, old in zip(carried, value, strict=True)):
            made = type(value)._make(carried) if hasattr(value, "_make") else type(value)(carried)
        self.made[id(value)] = made
        return made

    def _holds(self, value: Any) -> bool:
        """True if the container `value` holds, at any depth, a module of the model or a container that such a module owns."""
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
    """True if `value` is a container or a module to clone. A TorchScript module is shared instead: compiled C++ cannot be cloned."""
    return _is_container(value) or (isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule))


def _is_container(value: Any) -> bool:
    """True if a clone may copy a value: a plain container, namedtuple, dataclass or namespace, but no other subclass of a container."""
    if type(value) in _CONTAINERS or isinstance(value, types.SimpleNamespace):
        return True
    named = isinstance(value, tuple) and hasattr(value, "_make")
    return named or (dataclasses.is_dataclass(value) and not isinstance(value, type | nn.Module | dict | list | set))


def _members(value: Any) -> dict[str, Any]:
    """Return {name: member} of a dataclass or namespace, without a call of its `__getattribute__`, which may raise for some members."""
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
    """Yield the descriptor of each attribute in `__slots__` that is set on `value`."""
    for cls in (each for each in type(value).__mro__ if "__slots__" in vars(each)):
        for found in vars(cls).values():
            if isinstance(found, types.MemberDescriptorType):
                try:
                    found.__get__(value)
                except AttributeError:
                    continue
                yield found
