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

from amprewrite.runtime.parts import fsdp_groups
from amprewrite.tables.boundary.members import parameters_in
from amprewrite.tables.errors import PolicyError

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_STEP = "Optimizer.profile_hook_step.<locals>.wrapper"
"""The function that PyTorch puts around the `step` of every optimizer class, and that runs hooks."""
_MOST_WRAPPERS = 5
"""Wrappers around an optimizer that are looked through."""


def existing_optimizers() -> list[Optimizer]:
    """All optimizers whose steps can be guarded."""
    return [optimizer for optimizer in every_optimizer() if can_be_guarded(optimizer)]


def every_optimizer() -> list[Optimizer]:
    """All optimizers that hold parameters themselves; a wrapper may hold those of another."""
    classes = {Optimizer}
    ahead = [Optimizer]
    while ahead:
        new = [cls for cls in type.__subclasses__(ahead.pop()) if cls not in classes]
        classes.update(new)
        ahead += new
    objects = gc.get_objects()
    found: Iterator[Optimizer] = itertools.compress(objects, map(classes.__contains__, map(type, objects)))
    return [optimizer for optimizer in found if "param_groups" in optimizer.__dict__]


def can_be_guarded(optimizer: Optimizer) -> bool:
    """Whether PyTorch runs hooks at its steps, and a step may be skipped.

    An optimizer that never called `Optimizer.__init__` has no hooks; if it wraps another (Lookahead), that one has. Steps of a
    differentiable one are part of the graph of a loss, whose gradient would be cut off by a skip.
    """
    held = optimizer.__dict__
    hooked = getattr(type(optimizer).step, "hooked", False) and all(name in held for name in _HOOKS)
    return hooked and "param_groups" in held and not differentiates(optimizer)


def differentiates(optimizer: Optimizer) -> bool:
    """Whether its steps are themselves differentiated, as those of meta-learning are."""
    return any(group.get("differentiable") for group in optimizer.param_groups)


def optimizer_inside(optimizer: Any) -> Optimizer:
    """The torch optimizer that `optimizer` is, or that it wraps; PolicyError if there is none that can be guarded.

    A wrapper may derive from Optimizer without having its hooks, as accelerate's does.
    """
    inner = optimizer
    for _ in range(_MOST_WRAPPERS):
        if isinstance(inner, Optimizer) and can_be_guarded(inner):
            return inner
        held = [each for each in getattr(inner, "__dict__", {}).values() if isinstance(each, Optimizer)]
        inner = getattr(inner, "optimizer", held[0] if len(held) == 1 else None)
    raise PolicyError(f"optimizer={type(optimizer).__name__} {_why_unguarded(optimizer)}")


def _why_unguarded(optimizer: Any) -> str:
    if not isinstance(optimizer, Optimizer):
        return (
            "is no torch.optim.Optimizer, and only those can be guarded; attach the torch optimizer inside it, if there is one; if "
            "there is none, train with a torch optimizer (fastai: OptimWrapper), or rewrite with loss_scale=1024.0 or another number, "
            "which is applied whatever steps"
        )
    if optimizer.__dict__.get("param_groups") and differentiates(optimizer):
        return (
            "has differentiable=True: its steps are part of the graph of a later loss, and none of them is skipped; attach the optimizer "
            "that steps on that loss"
        )
    return (
        "derives from torch.optim.Optimizer and never called Optimizer.__init__, so PyTorch runs no hooks at its steps; call "
        "super().__init__(params, defaults) in it, or attach the optimizer that it wraps"
    )


def parameters_of(root: nn.Module) -> Callable[[], Iterator[Tensor]]:
    """A function that returns the current parameters, and the parameters that FSDP2's optimizers own."""

    def parameters() -> Iterator[Tensor]:
        yield from parameters_in(root)
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


__all__ = [
    "can_be_guarded", "differentiates", "every_optimizer", "existing_optimizers", "in_a_step", "optimizer_inside", "parameters_of",
    "sharded_parameters",
]  # fmt: skip
