"""Find the torch optimizers of the process. Also find the sharded parameters of FSDP2: optimizers own these, not the gathered parameters.

PyTorch keeps no list of optimizers, so the objects that the garbage collector tracks are searched. Only their classes are read, which runs
no code of the objects. With transformers imported this took 140 ms of processor time, for 376,000 objects on a busy machine.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from amprewrite.ir.op_graph import reached
from amprewrite.runtime.options import fsdp_groups
from amprewrite.tables.errors import PolicyError

T = TypeVar("T")
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_MOST_WRAPPERS = 5
"""Largest number of nested wrappers that are opened in search of an optimizer."""


def existing_optimizers() -> list[Optimizer]:
    """Return all optimizers of the process whose steps can be skipped by hooks (`can_be_guarded`)."""
    return [optimizer for optimizer in every_optimizer() if can_be_guarded(optimizer)]


def every_optimizer() -> list[Optimizer]:
    """Return all optimizers of the process that have `param_groups`, including wrappers that share the groups of another optimizer."""
    return [optimizer for optimizer in instances_of(Optimizer) if "param_groups" in optimizer.__dict__]


def instances_of(base: type[T]) -> Iterator[T]:
    """Yield all objects of the process whose class is `base` or derives from it."""
    start: type = base
    classes = set(reached([start], type.__subclasses__))
    objects = gc.get_objects()
    return itertools.compress(objects, map(classes.__contains__, map(type, objects)))


def can_be_guarded(optimizer: Optimizer) -> bool:
    """True if hooks can skip the steps of `optimizer`: PyTorch runs hooks at its steps, and a skipped step is harmless.

    An optimizer that never called `Optimizer.__init__` has no hooks. If it is a wrapper (Lookahead), the optimizer inside has them. The
    steps of a differentiable optimizer are part of the autograd graph of a loss, and a skipped step would cut off the gradient.
    """
    held = optimizer.__dict__
    hooked = getattr(type(optimizer).step, "hooked", False) and all(name in held for name in _HOOKS)
    return hooked and "param_groups" in held and not differentiates(optimizer)


def differentiates(optimizer: Optimizer) -> bool:
    """True if a parameter group has `differentiable=True`: steps are part of an autograd graph, as in meta-learning."""
    return any(group.get("differentiable") for group in optimizer.param_groups)


def optimizer_inside(optimizer: Any) -> Optimizer:
    """Return `optimizer` if hooks can skip its steps, otherwise the torch optimizer that it wraps. Raises PolicyError if there is none.

    A wrapper may derive from torch.optim.Optimizer and still have no hooks, such as accelerate's wrapper.
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


def sharded_parameters(root: nn.Module) -> Iterator[Tensor]:
    """Yield the sharded parameters of FSDP2, which optimizers own. During a forward the modules hold gathered parameters instead."""
    for module in root.modules():
        for group in fsdp_groups(module):
            for parameter in getattr(group, "fsdp_params", ()):
                yield parameter.sharded_param
