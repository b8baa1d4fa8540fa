"""Keep what is ours from Dynamo and from autograd's hooks, which must not take it for the model's.

A model that takes gradients itself runs a backward while Dynamo still captures what is called: the functions and hooks that autograd
then calls would become graphs of their own, planned and rewritten as if the model had them. An activation checkpoint counts what is
saved for backward while it runs: what a trial run of ours saves must not be among it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch.autograd.graph import saved_tensors_hooks

P = ParamSpec("P")
R = TypeVar("R")


def uncaptured(function: Callable[P, R]) -> Callable[P, R]:
    """`function` itself, which runs as it is written, and all that it calls. A call costs nothing more."""
    assert isinstance(function, types.FunctionType)
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    return function


def unhooked() -> contextlib.AbstractContextManager[Any]:
    """A context in which what is saved for backward reaches no hook around it."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return saved_tensors_hooks(_itself, _itself) if around else contextlib.nullcontext()


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


__all__ = ["uncaptured", "unhooked"]
