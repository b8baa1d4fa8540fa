"""State of autograd in this thread: the running backward, hooks on saved tensors, grad mode, forward mode."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

current_backward = torch._C._current_graph_task_id
"""Return the number of the backward that runs in this thread; -1 outside a backward."""
call_after_backward: Callable[[Callable[[], Any]], None] = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
"""Call the given function once, at the end of the backward that runs now. Call this function only inside a backward."""
set_grad_enabled = torch._C._set_grad_enabled
"""Switch grad mode on or off. Graphs that Dynamo captures contain calls of this function."""


def saved_tensors_are_hooked() -> bool:
    """True if hooks set by `torch.autograd.graph.saved_tensors_hooks` are active in this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def in_forward_mode() -> bool:
    """True inside a level of `torch.autograd.forward_ad`, where ops compute tangents."""
    return forward_ad._current_level >= 0


def leave_forward_mode() -> None:
    """Leave the level of forward mode that a graph has entered, if any. `in_forward_mode` does not see such levels. Levels do not nest."""
    with contextlib.suppress(RuntimeError):  # raised if no level is open; torch has no function to ask
        torch._C._exit_dual_level(level=0)
