"""Record a module before it is rewritten in place, so that it can be restored exactly.

1. A rewrite changes the class of the root, and in each module only the attributes in TOUCHED. They are recorded before the first change.
2. A `forward` that the user set after the rewrite stays when the module is restored, and so does a later `compile()` of the root.
3. All other attributes, such as parameters, buffers and hooks, are never changed.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from amprewrite.runtime.model.part_calls import FORWARD, PartForward
from amprewrite.runtime.model.replicas import REPLICATE

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
