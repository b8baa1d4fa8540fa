"""Optimizers that exist already, and the parameters by which one is known to train a model.

There is no list of optimizers in PyTorch, so the garbage collector's is read: by the classes of its objects, which runs no code
of theirs. With transformers imported it took 140 ms of processor time, for 376,000 objects on a busy machine.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amprewrite.runtime.model.parts import fsdp_groups
from amprewrite.tables.errors import PolicyError

_HOOKS = "_optimizer_step_pre_hooks"
_STEP = "Optimizer.profile_hook_step.<locals>.wrapper"
"""The function that PyTorch puts around the `step` of every optimizer class, and that runs hooks."""
_MOST_WRAPPERS = 5
"""Wrappers around an optimizer that are looked through."""


def existing_optimizers() -> list[Optimizer]:
    """All optimizers that hooks can be put on; a wrapper around another optimizer has no hooks of its own."""
    classes = {Optimizer}
    ahead = [Optimizer]
    while ahead:
        new = [cls for cls in type.__subclasses__(ahead.pop()) if cls not in classes]
        classes.update(new)
        ahead += new
    objects = gc.get_objects()
    found: Iterator[Optimizer] = itertools.compress(objects, map(classes.__contains__, map(type, objects)))
    return [o for o in found if _HOOKS in o.__dict__ and "param_groups" in o.__dict__]


def optimizer_inside(optimizer: Any) -> Optimizer:
    """The torch optimizer that `optimizer` is, or that it wraps as its attribute `optimizer`; PolicyError if there is none.

    A wrapper may derive from Optimizer without having its hooks, as accelerate's does.
    """
    inner = optimizer
    for _ in range(_MOST_WRAPPERS):
        if isinstance(inner, Optimizer) and hasattr(inner, _HOOKS):
            return inner
        inner = getattr(inner, "optimizer", None)
    raise PolicyError(
        f"optimizer={type(optimizer).__name__} is no torch.optim.Optimizer, and only those can be guarded; attach the torch "
        "optimizer inside it"
    )


def parameters_of(root: nn.Module) -> Callable[[], Iterator[Tensor]]:
    """Gives the parameters as they are when it is called, and those that FSDP2's optimizers own."""

    def parameters() -> Iterator[Tensor]:
        yield from root.parameters()
        yield from sharded_parameters(root)

    return parameters


def sharded_parameters(root: nn.Module) -> Iterator[Tensor]:
    """The parameters that FSDP2's optimizers own; inside a forward the modules hold gathered ones."""
    for module in root.modules():
        ask: Any = getattr(module, "_get_fsdp_state", None)
        state = ask() if ask is not None else None
        for group in fsdp_groups(state):
            for parameter in getattr(group, "fsdp_params", ()):
                yield parameter.sharded_param


def in_a_step() -> bool:
    """Whether some thread is inside an optimizer's `step`, which goes over hooks: none may be removed then."""
    for frame in sys._current_frames().values():
        at = frame
        while at is not None:
            if at.f_code.co_qualname == _STEP:
                return True
            at = at.f_back  # type: ignore[assignment]
    return False


__all__ = ["existing_optimizers", "in_a_step", "optimizer_inside", "parameters_of", "sharded_parameters"]
