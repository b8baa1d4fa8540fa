"""Watch for changes of hooks on modules. Dynamo captures the hooks of submodules in its graphs, but by default adds no guards on them.

1. Code that Dynamo captured for one module runs for all modules of the same class. Dynamo is set to guard on hooks only if these modules
   may differ in hooks (`may_differ`), because such guards cost almost a microsecond for each module in each call. A model without hooks
   has no guards on hooks. A HookWatch finds out when hooks are added to it.
2. One counter of PyTorch numbers the hooks of modules and of tensors. A HookWatch searches all modules for new hooks if this counter has
   risen. This package itself sets hooks on tensors in every training forward. A HookWatch does not count them, so they cause no search.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module as everywhere
from torch import nn
from torch.utils.hooks import RemovableHandle

from amprewrite.tables.boundary.members import modules_in

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _OwnHookNumbers:
    """Counts the hooks that this package sets on tensors (`taken`). HookWatch subtracts this count from PyTorch's counter of all hooks."""

    taken = 0
    lock = threading.RLock()


def hook_result(result: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Register `hook` on the tensor `result`, and count it as this package's own, so that no HookWatch mistakes it for a module hook."""
    with _OwnHookNumbers.lock:
        result.register_hook(hook)
        _OwnHookNumbers.taken += 1


class HookWatch:
    """Finds out whether hooks on modules below `root` have changed. The check is cheap if no hook was registered.

    Every registration increments one counter of PyTorch. So the modules are searched only in three cases: code outside of this package
    registered a hook, a module lost a hook, or a direct child of the root was added, removed or replaced. Hooks on the root itself are
    ignored, because they run outside of the captured graphs.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._look()

    def changed(self) -> bool:
        """True if hooks on modules below the root changed since the previous call of this method, or since this object was made."""
        same = RemovableHandle.next_id - _OwnHookNumbers.taken == self._counter and self.root._modules == self._children
        if same and (not self._places or [len(place) for place in self._places] == self._sizes):
            return False
        before = self._mark
        self._look()
        return self._mark != before

    def _look(self) -> None:
        with _OwnHookNumbers.lock:
            self._counter = RemovableHandle.next_id - _OwnHookNumbers.taken
        self._children = dict(self.root._modules)
        self._places = [place for place in _places(self.root) if place]
        self._sizes = [len(place) for place in self._places]
        self._mark = [key for place in self._places for key in place]


def _places(root: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts in which all modules below `root` keep their hooks, such as `_forward_hooks`. Most of them are empty."""
    found: list[dict[int, Any]] = []
    seen, left = {root}, [*root._modules.values()]
    while left:  # `modules()` would take twice as long, and this search runs at each call of the model if the user sets tensor hooks
        module = left.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        left += module._modules.values()
        found += (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return found


def may_differ(root: nn.Module) -> bool:
    """True if modules of one class may differ in hooks: a module below `root` has hooks, or an attribute holds an unregistered module."""
    return any(_places(root)) or _holds_unlisted(root)


def _holds_unlisted(root: nn.Module) -> bool:
    """True if an attribute of `root` or of a submodule is, or contains, a module that is not registered as a submodule.

    Lists, tuples, sets and dicts are searched one level deep.
    """
    modules = modules_in(root)
    listed = set(map(id, modules))
    for module in modules:
        for value in vars(module).values():
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else (value,)
            for each in inside:
                if isinstance(each, nn.Module) and id(each) not in listed:
                    return True
    return False


@torch.compiler.assume_constant_result  # type: ignore[misc]
def _global_hooks() -> bool:
    """True if the process has global module hooks. Dynamo treats the result as a constant, and does not guard on it. This is safe,
    because Dynamo captures the same graph for True and False (see `call_with_own_hooks`)."""
    return bool(any_global_hook())


any_global_hook: Callable[[], Any] = everywhere._has_any_global_hook
"""Return a true value if the process has global module hooks, which run for all modules."""


def unseen_hooks() -> str:
    """Return a warning if code outside of PyTorch registered a global module hook, otherwise "".

    PyTorch's own global hooks only observe, so they need no warning.
    """
    if not any_global_hook():
        return ""
    tables = (getattr(everywhere, f"_global{kind}") for kind in _KINDS)
    foreign = any(not (getattr(hook, "__module__", None) or "").startswith("torch.") for table in tables for hook in table.values())
    return _UNSEEN if foreign else ""


_UNSEEN = (
    "hooks on all modules of the process (torch.nn.modules.module.register_module_forward_hook and the like) see a rewritten model as one "
    "call: they do not run for the modules inside it, and what they would change there stays as it is. Register them on the modules "
    "themselves"
)


def call_with_own_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `module` with its own forward hooks but without global module hooks, and return its result.

    Dynamo captures this function instead of `__call__` for each submodule in a captured graph, so that global hooks do not become part of
    the graph. The function calls PyTorch's own `_call_impl` if the process has no global hooks, or if the module has hooks that run even
    after an exception in its forward (`always_call`). With such module hooks the global hooks run, too.
    """
    if module._forward_hooks_always_called or not _global_hooks():
        return module._call_impl(*args, **kwargs)
    for number, hook in module._forward_pre_hooks.items():
        if number in module._forward_pre_hooks_with_kwargs:
            changed = hook(module, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        else:
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    result = module.forward(*args, **kwargs)
    for number, hook in module._forward_hooks.items():
        given = (args, kwargs) if number in module._forward_hooks_with_kwargs else (args,)
        changed = hook(module, *given, result)
        if changed is not None:
            result = changed
    return result
