"""Record a module before it is rewritten in place, to restore it exactly, and make the class that a rewritten module has.

1. A rewrite changes the class of the root, and in each module only the attributes in TOUCHED. They are recorded before the first change.
2. A `forward` that the user set after the rewrite stays when the module is restored, and so does a later `compile()` of the root.
3. All other attributes, such as parameters, buffers and hooks, are never changed.

The class of a rewritten module is a subclass of the module's original class with methods of a mixin:

1. The subclass has the name of the original class, for libraries that look up classes by name.
2. Calling the subclass makes a plain module of the original class. So `type(amp)(config)`, `amp.from_pretrained(path)` and
   `load_from_checkpoint` work as on the original class.
3. pickle stores the subclass as "the rewritten subclass of the original class", because its name would lead to the original class.
4. Creating the subclass runs no code of the user: no `__init_subclass__`, and no metaclass that keeps a register of classes.
5. The first base of the subclass is the original class. So `__class__` of an object may change from one to the other: Python allows this
   if the memory layouts match, and compares them by the chain of first bases. A custom `mro()` still looks up methods in the mixin first.

A class that a user derives from the subclass is an ordinary class.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import threading
import weakref
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

from torch import nn

from amprewrite.runtime.model.part_calls import FORWARD, REPLICATE, PartForward

SESSION, BEFORE = "_amprewrite_session", "_amprewrite_before"
_COMPILED = "_compiled_call_impl"
TOUCHED = (SESSION, FORWARD, BEFORE, REPLICATE, "forward", _COMPILED)
"""Names of the instance attributes that a rewrite sets."""
_ABSENT = object()


class Before:
    """The former state of a model that is rewritten in place: the class and the attributes in TOUCHED of each module."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = [(weakref.ref(each), type(each), _touched(each)) for each in root.modules()]

    def set_aside(self) -> None:
        """Remove what `module.compile()` set on the modules, because the rewrite compiles the model itself."""
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
            if type(module) is not cls:
                module.__class__ = cls


def _touched(module: nn.Module) -> dict[str, Any]:
    """Return the attributes in TOUCHED that the module has, with their values."""
    return {name: module.__dict__[name] for name in TOUCHED if name in module.__dict__}


def _put_back(module: nn.Module, values: dict[str, Any], is_root: bool) -> None:
    """Set each attribute in TOUCHED to its value in `values`, or delete it if it has none there.

    A `forward` that the user set after the rewrite stays, and on the root (`is_root`) the effect of a later `compile()`.
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
        """Return the method resolution order: the classes of the mixin, then the classes of the original class.

        A class that a user derives gets Python's order.
        """
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
    """Return the metaclass for subclasses of classes with the metaclass `meta`, and register with copyreg how its classes are pickled."""
    if issubclass(meta, _CallsOriginal):
        return meta
    made = _CallsOriginal if meta is type else type(meta.__name__, (_CallsOriginal, meta), {})
    copyreg.pickle(made, _reduce_class)  # type: ignore[arg-type]
    return made


def _reduce_class(cls: type) -> Any:
    """Return how to pickle a class: as a call of `subclass_of`, or by its name if a user derived the class."""
    original = original_of(cls)
    if original is None:
        return cls.__qualname__
    return subclass_of, (cls.__bases__[1], original)
