"""How a module looked before it was rewritten in place, so that it can be put back exactly.

1. A rewrite changes the class of the root, and of each module the few attributes in TOUCHED. They are noted before the first change.
2. Attributes that others have set since then stay: a forward that is none of ours, and a `compile()` of the root.
3. Everything else, parameters, buffers and hooks among it, is the user's own throughout.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from amprewrite.runtime.model.part_calls import PartForward
from amprewrite.runtime.model.replicas import REPLICATE

SESSION, FORWARD, BEFORE = "_amprewrite_session", "_amprewrite_forward", "_amprewrite_before"
_COMPILED = "_compiled_call_impl"
TOUCHED = (SESSION, FORWARD, BEFORE, REPLICATE, "forward", _COMPILED)
_ABSENT = object()


class Before:
    """The former class and touched attributes of every module of a model."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = [(weakref.ref(each), type(each), _touched(each)) for each in root.modules()]

    def set_aside(self) -> None:
        """Take away what others compiled: the rewrite of the whole compiles it afresh."""
        for ref, _, _ in self._modules:
            module = ref()
            if module is not None:
                module.__dict__.pop(_COMPILED, None)

    def put_back(self, root: nn.Module) -> None:
        """Put every module back. Modules that came into `root` since then lose the attributes of the rewrite."""
        was = {id(module): (cls, values) for ref, cls, values in self._modules if (module := ref()) is not None}
        found = {id(each): each for each in [*root.modules(), *(ref() for ref, _, _ in self._modules)] if each is not None}
        for number, module in found.items():
            cls, values = was.get(number, (type(module), {}))
            _put_back(module, values, is_root=module is root)
            if type(module) is not cls:
                module.__class__ = cls


def _touched(module: nn.Module) -> dict[str, Any]:
    return {name: module.__dict__[name] for name in TOUCHED if name in module.__dict__}


def _put_back(module: nn.Module, values: dict[str, Any], is_root: bool) -> None:
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


__all__ = ["BEFORE", "FORWARD", "SESSION", "Before"]
