"""Compute the results of recurrent layers on fake tensors from one time step.

A graph calls a layer over T time steps as one op. On fake tensors PyTorch runs each step of `torch.gru`, `rnn_tanh`, `rnn_relu`, and in
some cases `torch.lstm`, as separate ops. That takes several milliseconds a step, whenever the shapes of the results are needed. One step
is enough: it gives the dtype, the device and the final states, and its rows, repeated T times, have the shape of the whole result. Packed
sequences work only in this way: their batch sizes are data, which fake tensors lack, but the shapes depend only on the number of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

LAYERS: tuple[Callable[..., Any], ...] = (torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh)
"""Functions that run a recurrent layer over all time steps of its input."""


def is_packed_call(args: tuple[Any, ...]) -> bool:
    """True if a function in LAYERS is called with these arguments on a packed sequence: args[3] is then the list of weights."""
    return len(args) == 9 and not isinstance(args[3], bool)


def in_one_step(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the fake results of `layer` from one time step; return `layer` itself if it is not in LAYERS.

    Calls whose arguments are not in the form in which `nn.RNNBase` passes them run `layer` itself.
    """
    if layer not in LAYERS:
        return layer

    def padded(x: torch.Tensor, states: Any, *args: Any) -> Any:
        *_, batch_first = args
        time = 1 if batch_first else 0
        rows, *last = layer(x.narrow(time, 0, 1), states, *args)
        # Repeat with the time dim first, then transpose: PyTorch's result with `batch_first` is such a view, so the strides agree.
        rows = rows.transpose(0, time).repeat(x.shape[time], 1, 1).transpose(0, time)
        return rows, *last

    def packed(data: torch.Tensor, _: Any, states: Any, *args: Any) -> Any:
        batch = (states if isinstance(states, torch.Tensor) else states[0]).shape[1]
        rows, *last = layer(data[:1].expand(batch, -1)[None], states, *args, False)
        return rows[0, :1].repeat(data.shape[0], 1), *last

    @functools.wraps(layer)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 9:
            return layer(*args, **kwargs)
        return (packed if is_packed_call(args) else padded)(*args)

    return run
