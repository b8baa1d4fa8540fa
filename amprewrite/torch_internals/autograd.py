"""State of autograd in this thread: the running backward, hooks on saved tensors, grad mode, forward mode."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

current_backward = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread; -1 outside a backward."""
set_grad_enabled = torch._C._set_grad_enabled
"""Switch grad mode. Dynamo records calls of this function in graphs."""


def saved_tensors_are_hooked() -> bool:
    """Whether hooks of `torch.autograd.graph.saved_tensors_hooks` are active."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def call_after_backward(callback: Callable[[], Any]) -> None:
    """Call `callback` when the backward that runs ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def in_forward_mode() -> bool:
    """Whether `torch.autograd.forward_ad` computes tangents."""
    return forward_ad._current_level >= 0
