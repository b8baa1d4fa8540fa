"""Functions of ours that autograd calls: Dynamo must not take them for the model's code.

A model that takes gradients itself runs a backward while Dynamo still captures what is called: the functions and hooks that autograd
then calls would become graphs of their own, planned and rewritten as if the model had them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo.types import FrameAction, FrameExecStrategy

P = ParamSpec("P")
R = TypeVar("R")


def uncaptured(function: Callable[P, R]) -> Callable[P, R]:
    """`function` itself, which runs as it is written, and all that it calls. A call costs nothing more."""
    assert isinstance(function, types.FunctionType)
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    return function


__all__ = ["uncaptured"]
