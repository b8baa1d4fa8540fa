"""Hooks on modules. Dynamo puts those of the parts into its graphs, but by default does not guard on them.

Code runs for all modules of a class. Where they may differ in hooks, Dynamo is told to guard on them (`may_differ`). That takes
most of a microsecond a module and call, so a model without hooks goes without, and a HookWatch sees when hooks come.
PyTorch numbers the hooks of modules and of tensors by one counter. Our own on tensors, some in every training forward, are counted
apart: each would have the hooks of all modules looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.modules.module as everywhere
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _OwnHookNumbers:
    """How many numbers our own hooks took. The lock is held from a number's being taken to its being counted."""

    taken = 0
    lock = threading.RLock()


def hook_result(result: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `result.register_hook(hook)` and count the hook as our own, so that no HookWatch reports it."""
    with _OwnHookNumbers.lock:
        result.register_hook(hook)
        _OwnHookNumbers.taken += 1


def hook_node(node: Node, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Set hooks before and after an autograd node and count them as our own, so that no HookWatch reports them."""
    with _OwnHookNumbers.lock:
        node.register_prehook(before)
        node.register_hook(after)
        _OwnHookNumbers.taken += 2


class HookWatch:
    """Tells, in no time if nothing happened, whether the hooks below a root have changed.

    Every registration takes a number from one counter of PyTorch's, so only a new number that is not our own, fewer hooks in the
    places that had any, or another child of the root, is worth a look. The root's own hooks run outside the captured graphs and do
    not count.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._look()

    def changed(self) -> bool:
        """Whether a hook came or went since the last time this was asked."""
        same = RemovableHandle.next_id - _OwnHookNumbers.taken == self._counter and list(self.root._modules.values()) == self._children
        if same and (not self._places or [len(place) for place in self._places] == self._sizes):
            return False
        before = self._mark
        self._look()
        return self._mark != before

    def _look(self) -> None:
        with _OwnHookNumbers.lock:
            self._counter = RemovableHandle.next_id - _OwnHookNumbers.taken
        self._children = list(self.root._modules.values())
        self._places = [place for place in _places(self.root) if place]
        self._sizes = [len(place) for place in self._places]
        self._mark = [key for place in self._places for key in place]


def _places(root: nn.Module) -> Iterator[dict[int, Any]]:
    seen, left = {root}, [*root._modules.values()]
    while left:  # `modules()` takes twice as long, and tensor hooks of the user have this run at every call
        module = left.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        left += module._modules.values()
        yield from (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)


def may_differ(root: nn.Module) -> bool:
    """Whether modules below `root` may differ in hooks: some has one, or there are modules that PyTorch does not list."""
    return any(_places(root)) or any(_unlisted(root))


def _unlisted(root: nn.Module) -> Iterator[bool]:
    """Of each module in an attribute, or in a list, tuple or dict there, whether it is none of the root's."""
    listed = {id(module) for module in root.modules()}
    for module in root.modules():
        for value in vars(module).values():
            inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else (value,)
            yield any(isinstance(each, nn.Module) and id(each) not in listed for each in inside)


@torch.compiler.assume_constant_result  # type: ignore[misc]
def _global_hooks() -> bool:
    """Whether there are hooks on all modules now. A captured graph does not depend on it: both ways give the same graph."""
    return any_global_hook()


def any_global_hook() -> bool:
    """Whether there are hooks on all modules of the process."""
    return bool(everywhere._has_any_global_hook())


def unseen_hooks() -> str:
    """A warning if code outside of PyTorch hooked all modules of the process, "" otherwise; PyTorch's own such hooks observe."""
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
    """Call `module` with its own forward hooks, and without those on all modules of the process.

    Dynamo reads this in place of a part's `__call__`: a hook on all modules would become part of the graph, whichever
    registered it. Hooks that run even if the module raises are left to PyTorch's own call.
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
