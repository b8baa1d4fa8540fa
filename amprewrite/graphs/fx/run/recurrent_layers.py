"""Compute the results of recurrent layers on fake tensors from one time step.

A layer over T steps is one op of a graph. On fake tensors PyTorch runs each step of `torch.gru`, `rnn_tanh`, `rnn_relu`, and some of
`torch.lstm`, as ops of their own: several milliseconds a step, at each place that asks for the layer's shapes. But one step has the dtype,
device and states of all, and the result only repeats its rows. Packed sequences become possible in this way, too: their sizes are data,
which fake tensors do not have, but the results depend only on the number of packed rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

LAYERS: tuple[Callable[..., Any], ...] = (torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh)
"""Functions that run a recurrent layer over all time steps of its input."""


def in_one_step(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the results of `layer` on fake tensors that runs one time step. Functions not in LAYERS are returned as given.

    Arguments in another form than those of `nn.RNNBase` go to `layer` itself.
    """
    if layer not in LAYERS:
        return layer

    def padded(x: torch.Tensor, states: Any, *args: Any) -> Any:
        *_, batch_first = args
        time = 1 if batch_first else 0
        rows, *last = layer(x.narrow(time, 0, 1), states, *args)
        rows = rows.transpose(0, time).repeat(x.shape[time], 1, 1).transpose(0, time)  # PyTorch's result, too, is a view of rows by time
        return rows, *last

    def packed(data: torch.Tensor, _: Any, states: Any, *args: Any) -> Any:
        batch = (states if isinstance(states, torch.Tensor) else states[0]).shape[1]
        rows, *last = layer(data[:1].expand(batch, -1)[None], states, *args, False)
        return rows[0, :1].repeat(data.shape[0], 1), *last

    @functools.wraps(layer)
    def run(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 9:
            return layer(*args, **kwargs)
        return (padded if isinstance(args[3], bool) else packed)(*args)  # in the form of packed sequences the weights stand there

    return run
