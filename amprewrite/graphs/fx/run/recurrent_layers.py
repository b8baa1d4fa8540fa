"""Run recurrent layers in other ways than PyTorch: on fake tensors in one time step, in training in parts of several steps.

A graph calls a layer over T time steps as one op.

1. On fake tensors PyTorch runs each step of `torch.gru`, `rnn_tanh`, `rnn_relu`, and in some cases `torch.lstm`, as separate ops. That
   takes several milliseconds a step, whenever the shapes of the results are needed. One step is enough: it gives the dtype, the device and
   the final states, and its rows, repeated T times, have the shape of the whole result. Packed sequences work only in this way: their
   batch sizes are data, which fake tensors lack, but the shapes depend only on the number of rows.
2. A CPU runs the steps as separate ops on real tensors, too. Each step reads the low copies of the weights, so autograd adds up T gradients
   of each copy in the low format. `in_parts` gives each part of the steps its own copies, and adds up the gradients of the parts in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from amprewrite.graphs.fx.ops.pad_ops import linked_copy

LAYERS: tuple[Callable[..., Any], ...] = (torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh)
"""Functions that run a recurrent layer over all time steps of its input."""
STEPS = 16
"""Number of time steps in a part. Parts of 8 steps are 6 % more exact, and take up to 15 % more time."""


def is_packed_call(args: tuple[Any, ...]) -> bool:
    """True if `args`, the arguments of a function in LAYERS, pass a packed sequence. Then args[3] is the list of weights, not a flag."""
    return len(args) == 9 and not isinstance(args[3], bool)


def in_one_step(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the results of `layer`, one of LAYERS, on fake tensors by running one time step."""

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
        if kwargs or len(args) != 9:  # `nn.RNNBase` passes nine positional arguments: run any other call unchanged
            return layer(*args, **kwargs)
        return (packed if is_packed_call(args) else padded)(*args)

    return run


@functools.cache
def in_parts(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `layer`, one of LAYERS, in parts of STEPS time steps, and adds up the gradients of the parts in fp32.

    It takes the arguments in the form in which `nn.RNNBase` passes them. Its results equal those of `layer` bit by bit, except for a bf16
    LSTM on a packed sequence: if no sequence ends within a part, oneDNN runs the part as one kernel, which rounds less often.
    """

    @functools.wraps(layer, assigned=())  # keep the name of `run`: with the name of `layer`, generated code would call `layer`
    def run(*args: Any) -> tuple[Tensor, ...]:
        if is_packed_call(args):
            rows, sizes, states, weights, biased, layers, dropout, training, both = args
            time = 0
        else:
            rows, states, weights, biased, layers, dropout, training, both, batch_first = args
            sizes, time = None, 1 if batch_first else 0
            rows = rows.transpose(0, time)
        states = [states] if isinstance(states, Tensor) else states
        each = len(weights) // (layers * (1 + both))
        last: list[list[Tensor]] = []
        for depth in range(layers):
            sides = []
            for backwards in range(1 + both):
                place = len(last)
                given = [state[place : place + 1] for state in states], weights[place * each : (place + 1) * each]
                out, state = _run_direction(layer, _turned(rows, sizes) if backwards else rows, sizes, *given, biased, training)
                sides.append(_turned(out, sizes) if backwards else out)
                last.append(state)
            rows = torch.cat(sides, -1)
            if dropout and depth < layers - 1:
                rows = torch.dropout(rows, dropout, training)
        return rows.transpose(0, time), *(torch.cat(each) for each in zip(*last, strict=True))

    run.__name__ = f"{layer.__name__}_in_parts"
    return run


def _run_direction(
    layer: Callable[..., Any], rows: Tensor, sizes: Tensor | None, state: list[Tensor], weights: list[Tensor], biased: bool, training: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return (results, final state) of one layer in one direction, run in parts of STEPS steps. `sizes`: batch sizes if packed, or None."""
    done, wide = [], [weight.float() for weight in weights]
    for part, *size in _parts(rows, sizes):
        low = [linked_copy(each, weight.dtype, (), weight) for each, weight in zip(wide, weights, strict=True)]
        live = [each[:, : size[0][0]] if size else each for each in state]  # in a packed sequence, drop states of sequences that have ended
        options = (biased, 1, 0.0, training, False) if size else (biased, 1, 0.0, training, False, False)
        out, *new = layer(part, *size, live if len(live) > 1 else live[0], low, *options)
        state = [torch.cat([now, before[:, now.shape[1] :]], 1) for now, before in zip(new, state, strict=True)]
        done.append(out)
    return torch.cat(done), state


def _parts(rows: Tensor, sizes: Tensor | None) -> Iterable[tuple[Tensor, ...]]:
    """Return the parts of STEPS time steps of `rows`, each as (part,). For a packed sequence with batch sizes `sizes`: (part, sizes)."""
    if sizes is None:
        return ((part,) for part in rows.split(STEPS))
    parts = sizes.split(STEPS)
    return zip(rows.split([int(part.sum()) for part in parts]), parts, strict=True)


def _turned(rows: Tensor, sizes: Tensor | None) -> Tensor:
    """Return `rows` with each sequence in reverse order. `sizes` are the batch sizes of a packed sequence, or None."""
    if sizes is None:
        return rows.flip(0)
    starts = sizes.cumsum(0) - sizes
    lengths = (sizes[:, None] > torch.arange(int(sizes[0]), device=sizes.device)).sum(0)
    step = torch.repeat_interleave(sizes)
    sequence = torch.arange(len(rows), device=sizes.device) - starts[step]
    return rows[starts[lengths[sequence] - 1 - step] + sequence]
