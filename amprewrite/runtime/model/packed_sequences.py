"""Run recurrent modules on packed sequences: capture the layer alone, not the code of the module around it.

The number of sequences is data of a packed sequence. PyTorch's module reads it to make and check states, and no capture can follow. So the
module runs as written, until it calls the layer. That call enters a captured graph, whose inputs are the packed rows, the batch sizes and
the states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from amprewrite.graphs.fx.run.recurrent_layers import LAYERS, is_packed_call
from amprewrite.runtime.compiler.plain_words import DISABLE_REASON
from amprewrite.runtime.session import Session, enter


def is_packed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the input of a call of a recurrent module is a packed sequence."""
    return isinstance(args[0] if args else kwargs.get("input"), PackedSequence)


class _Layers(TorchFunctionMode):
    """Mode in which each call of a recurrent layer on a packed sequence calls `run(layer, rows, batch sizes, states)` instead."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in LAYERS and is_packed_call(args):
            return self.run(func, *args[:3])
        return func(*args, **(kwargs or {}))


@torch.compiler.disable(reason=DISABLE_REASON)  # type: ignore[misc]
def call_packed(
    session: Session, path: str, module: nn.RNNBase, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `function` on a packed sequence, and return its result. The layer that it calls runs as a captured graph, all other code as
    written.

    `function` is the forward of the recurrent `module` at `path`, with or without its hooks. `args` and `kwargs` are its arguments.
    """

    def layer_alone(layer: Callable[..., Any], rows: torch.Tensor, batch_sizes: torch.Tensor, states: Any) -> Any:
        weights = [getattr(module, name) for name in module._flat_weights_names]
        sizes = module.bias, module.num_layers, module.dropout, module.training, module.bidirectional
        return layer(rows, batch_sizes, states, weights, *sizes)

    key = f"{path} packed"
    if key not in session.entries:
        session.add_entry(path, layer_alone, key=key)
    with _Layers(lambda *given: enter(session, key, given, {})):
        return function(*args, **kwargs)
