"""Turn an edited fx graph into the callable that Dynamo runs in place of the captured graph.

With a weight cache, the callable can read low copies of weights that are kept between calls (see `hoist_weight_casts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext

from amprewrite.graphs.fx.captured import EditedGraph, Target, copy_graph
from amprewrite.graphs.fx.node_facts import GRAD_SWITCHES, differentiates
from amprewrite.graphs.fx.ops.pad_ops import pad_cast
from amprewrite.graphs.fx.run.first_run import Refusals, has_custom_op, runs_op_by_op
from amprewrite.graphs.fx.weights.frozen_weight import FrozenWeight
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.ir.pass_base import run_passes
from amprewrite.passes import LOWER
from amprewrite.passes.lower.hoist_weight_casts import Copy, copies_read, read_low_alone, with_cached_weights, with_kept_weights
from amprewrite.passes.lower.keep_quantised import quantise_input, with_quantised_weights
from amprewrite.passes.lower.read_frozen_weights import example_inputs_of, stored_copy, with_frozen_weights
from amprewrite.passes.lower.restore_checkpoints import restore_checkpoints
from amprewrite.passes.lower.suit_compiler import with_widened_results
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.torch_internals.dispatch import tracing_context
from amprewrite.torch_internals.graph_modules import force_recompile

CompiledFn = Callable[..., Any]


@dataclass(frozen=True)
class Emitted:
    """The callable that Dynamo runs in place of a captured graph, and the formats in which it reads each captured input."""

    run: CompiledFn
    copies: Mapping[int, frozenset[Copy | None]]
    """For each input, the low-precision copies (dtype, layout) that the graph reads, and None if the graph also reads the input itself."""
    low_alone: frozenset[int]
    """Positions of the inputs that the graph reads only by casts to the low format, or not at all."""
    refused: Refusals
    """Errors of the ops that refused low-precision operands, by the name of the op. The first run fills it."""


def emit(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    backend: CompiledFn | None,
    cache: WeightCache | None,
    low: Format | None = None,
    training: bool = False,
    own: bool = False,
) -> Emitted:
    """Return the callable of an edited graph: its own generated code if `backend` is None, otherwise the code that `backend` makes of it.

    `example_inputs` are the inputs of the captured graph, and inputs added by passes. `cache` holds low-precision copies of weights,
    which the callable reads instead of casting weights; None if each weight is cast where it is read. `low` is the format of the casts;
    None if the graph has no casts. `training` says that the graph was captured with gradients, `own` that no other code uses `module`, so
    that it may be edited in place.
    """
    copies, low_alone = copies_read(module, training), frozenset[int]() if low is None else read_low_alone(module, low)
    refused: Refusals = {}
    run = _lower(EditedGraph(module, {}, own=own), example_inputs, backend, cache, training, refused)
    return Emitted(run, copies, low_alone, refused)


def _lower(
    edited: EditedGraph,
    example_inputs: Sequence[Any],
    backend: CompiledFn | None,
    cache: WeightCache | None,
    training: bool,
    refused: Refusals,
) -> CompiledFn:
    """Run the lowering passes on `edited`, in place. Returns a callable that takes the captured inputs. The arguments are as for `emit`."""
    frozen = {place: each for place, each in enumerate(example_inputs) if isinstance(each, FrozenWeight)}
    switches = backend is None and not training  # if True, each call chooses between casts and kept copies (see with_kept_weights)
    target = Target(backend is None, training, None if switches else cache, frozen)
    run_passes(LOWER, target, edited, "an edited graph")
    module, hoisted = edited.module, edited.hoisted
    force_recompile(module)  # generate the code now: until then `forward` is only a wrapper, and a backend may store this wrapper

    def careful(module: torch.fx.GraphModule) -> CompiledFn:
        return runs_op_by_op(module, module.forward, refused)

    if backend is None:
        run: CompiledFn = with_kept_weights(module, cache, careful) if switches and cache is not None else careful(module)
    else:
        copies = [pad_cast(example_inputs[index].detach(), dtype, layout) for index, dtype, layout in hoisted]
        copies += [stored_copy(frozen[index], dtype, layout, training) for index, dtype, layout in edited.stored]
        first = len(example_inputs)
        copies += [part for place, how in edited.quantised for part in quantise_input(copies[place - first], how)]
        _fix_sizes(copies)
        run = backend(module, [*example_inputs_of(example_inputs, frozen, edited), *copies])
        if has_custom_op(module):
            eager, _ = copy_graph(module)
            restore_checkpoints(eager)
            run = runs_op_by_op(eager, run, refused)
        run = with_widened_results(run, edited.widened) if edited.widened else run
    run = with_quantised_weights(run, edited.quantised) if edited.quantised else run
    if frozen:
        run = with_frozen_weights(run, edited, frozen, backend is not None, quiet=not _takes_gradients(module, example_inputs))
    return run if cache is None else with_cached_weights(run, hoisted, cache)


def _takes_gradients(module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """True if a call of the graph may record gradients: an input requires them, or the graph itself asks for them."""
    if any(isinstance(each, torch.Tensor) and each.requires_grad for each in example_inputs):
        return True
    own = any(op_name(node.target) in ("requires_grad_", *GRAD_SWITCHES) for node in module.graph.nodes)
    return own or differentiates(module.graph)


def _fix_sizes(copies: Sequence[torch.Tensor]) -> None:
    """Mark the sizes of copies of weights as static for AOTAutograd, which can guard dynamic sizes only of tensors of the model."""
    tracing = tracing_context()
    for place, copy in enumerate(copies if tracing is not None else ()):
        tracing.tensor_to_context[copy] = StatefulSymbolicContext(  # type: ignore[union-attr]
            dynamic_sizes=[DimDynamic.STATIC] * copy.dim(),
            tensor_source=ConstantSource(f"amprewrite_copy_{place}"),
            shape_env_to_source_to_symbol_cache={},
        )
