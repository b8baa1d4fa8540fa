"""The subclass of a user's class that its rewritten modules get.

1. It bears the name of the original class, for libraries that look classes up by name.
2. Calling it makes a plain module of the original class. So `type(amp)(config)`, `amp.from_pretrained(path)` and
   `load_from_checkpoint` work as they do on the original class.
3. It is pickled as "the rewritten subclass of the original class", because its own name finds the original.
4. Making it runs no code of the user: no `__init_subclass__` and no metaclass that keeps a register of classes.
5. Its first base is the original class, so that Python lets an object of one become an object of the other. It looks methods up in
   the mixin first: Python compares layouts by the chain of first bases, and calls methods by `__mro__`.

A class that a user derives from it is an ordinary class.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import threading
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

_ORIGINAL = "_amprewrite_original"
_LOCK = threading.Lock()


def original_of(cls: type) -> type | None:
    """The class that `cls` was made from; None if `subclass_of` did not make it."""
    found: type | None = cls.__dict__.get(_ORIGINAL)
    return found


def subclass_of(mixin: type, cls: type) -> type:
    """The subclass of `cls` whose methods are those of `mixin` first. There is one as long as anyone holds it; `cls` remembers it.

    `mixin.members_for(cls)` gives further members of it.
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
    """Metaclass of the made subclasses, mixed with that of the original class."""

    def mro(cls) -> list[type]:
        """The mixin's own classes before those of the original class; a class that a user derives has Python's order."""
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
        """The signature of a call of the class. Python would give the signature of the metaclass's own `__call__`."""
        original = original_of(cls)
        if original is not None:
            return inspect.signature(original)
        return inspect.signature(functools.partial(cls.__init__, None))  # type: ignore[misc]


@functools.cache
def _metaclass(meta: type) -> type:
    """The metaclass of subclasses of classes that `meta` makes; pickle asks copyreg about classes with a metaclass."""
    if issubclass(meta, _CallsOriginal):
        return meta
    made = _CallsOriginal if meta is type else type(meta.__name__, (_CallsOriginal, meta), {})
    copyreg.pickle(made, _reduce_class)  # type: ignore[arg-type]
    return made


def _reduce_class(cls: type) -> Any:
    original = original_of(cls)
    if original is None:
        return cls.__qualname__
    return subclass_of, (cls.__bases__[1], original)


__all__ = ["original_of", "subclass_of"]
