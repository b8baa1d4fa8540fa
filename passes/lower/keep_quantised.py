"""Keep the fp8 copies of weights for as long as the bf16 or fp16 copies from which they are made.

    before   w8 = quantise(w, "w", ...)            w is an input: the bf16 or fp16 copy of a weight
    after    w8 = from_kept(w, data, scale)        data and scale are further inputs

The copy w is kept between calls, either within a block such as `with amp.frozen_weights():`, or because `amp.freeze()` stored the weight in
this format. The fp8 copy is kept with it, so later calls quantise no weight. Only graphs without gradients are edited. They need no
transposed fp8 copy, because only the GEMMs that compute gradients read one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from amprewrite.graphs.fx.captured import EditedGraph, QuantisedInput, Target
from amprewrite.graphs.fx.ops.on_device import recording
from amprewrite.graphs.fx.ops.quantised_products import Scaled, from_kept, quantise
from amprewrite.graphs.fx.uncaptured import unselected
from amprewrite.graphs.fx.weights.weight_cache import streams_of
from amprewrite.ir.pass_base import Pass


class KeepQuantised(Pass[Target, EditedGraph]):
    def __call__(self, target: Target, edited: EditedGraph) -> None:
        if not target.training:
            keep_quantised(edited, len(edited.hoisted) + len(edited.stored))


def keep_quantised(edited: EditedGraph, copies: int) -> None:
    """Let a graph take fp8 copies of weights as new inputs, instead of making them from bf16 or fp16 copies in each call.

    The last `copies` inputs of the graph are bf16 or fp16 copies of weights. Each `quantise` of such an input becomes a `from_kept`, which
    reads two new inputs at the end: the data and the scale of the fp8 copy. `edited.quantised` gets (position of the bf16 or fp16 input,
    further arguments of `quantise`) for each of these nodes.
    """
    graph, inputs = edited.module.graph, edited.module.graph.find_nodes(op="placeholder")
    places = {node: place for place, node in enumerate(inputs) if place >= len(inputs) - copies}
    for node in graph.find_nodes(op="call_function", target=quantise):
        if node.args[0] in places:
            last, parts = graph.find_nodes(op="placeholder")[-1], []
            for part in ("data", "scale"):
                with graph.inserting_after(last):
                    last = graph.placeholder(f"{node.name}_{part}")
                parts.append(last)
            edited.quantised.append((places[node.args[0]], node.args[1:]))
            node.target, node.args = from_kept, (node.args[0], *parts)
    edited.module.recompile()


def quantise_input(value: Tensor, how: tuple[Any, ...]) -> Scaled:
    """Return the fp8 copy of `value`, a bf16 or fp16 copy of a weight. `how` are the further arguments of `quantise`."""
    with torch.no_grad(), unselected():
        made = quantise(value, *how).straight
    assert made is not None
    return made


def with_quantised_weights(run: Callable[..., Any], quantised: Sequence[QuantisedInput]) -> Callable[..., Any]:
    """Return a callable that calls `run` with its inputs, followed by the data and the scale of each fp8 copy of a weight.

    Each fp8 copy is made from an input that holds a weight in bf16 or fp16, and is kept between calls until this input changes.
    `quantised` lists the fp8 copies: (position of this input, arguments of `quantise` after the first, from `role` on).
    """
    kept = WeakIdKeyDictionary()

    def copy(value: Tensor, how: tuple[Any, ...], streams: dict[int, int]) -> Scaled:
        # Keep no copy of an inference tensor, because it has no version counter that shows writes. Keep no copy while a CUDA graph is
        # recorded, because each replay must make the copy from the current values of the weight.
        if value.is_inference() or recording(value.device):
            return quantise_input(value, how)
        state = (value._version, value.data_ptr(), streams.get(value.get_device()), how)
        found: tuple[Any, Scaled] | None = kept.get(value)
        if found is None or found[0] != state:
            with torch.inference_mode(False):
                found = state, quantise_input(value, how)
            kept[value] = found
        return found[1]

    def call(*inputs: Any) -> Any:
        streams = streams_of([inputs[place] for place, _ in quantised])
        return run(*inputs, *(part for place, how in quantised for part in copy(inputs[place], how, streams)))

    return call
