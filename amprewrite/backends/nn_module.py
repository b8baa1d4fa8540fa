"""Emission: an edited fx graph becomes the callable that Dynamo runs in place of the captured one.

With gradients the weight casts stay in the graph, one a weight and forward. Without them they move out: their copies
come from the weight cache, and the graph takes them as further inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext

from amprewrite.backends.checkpointing import restore_checkpoints
from amprewrite.pad_ops import BufferPool, pad_cast
from amprewrite.pad_plan import Layout
from amprewrite.passes.insert_casts import CAST
from amprewrite.weight_cache import WeightCache

CompiledFn = Callable[..., Any]
_POOL = "amprewrite_pool"


def hoist_weight_casts(module: torch.fx.GraphModule) -> list[tuple[int, torch.dtype, Layout]]:
    """Turn casts of parameters into trailing inputs: (index of the parameter among the inputs, dtype, padded layout) for each."""
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    hoisted: list[tuple[int, torch.dtype, Layout]] = []
    last = inputs[-1] if inputs else None
    for node in list(graph.nodes):
        if not (CAST in node.meta and node.meta.get("weight") and (node.target == "to" or node.target is pad_cast)):
            continue
        source = node.args[0]
        if not isinstance(source, torch.fx.Node) or source.op != "placeholder":
            continue
        assert last is not None
        with graph.inserting_after(last):
            last = graph.placeholder(f"{source.name}_{node.meta[CAST]}")
        last.meta = {key: value for key, value in node.meta.items() if key in ("example_value", "val")}
        node.replace_all_uses_with(last)
        hoisted.append((inputs.index(source), node.args[1], node.args[2] if node.target is pad_cast else ()))
        graph.erase_node(node)
    if hoisted:
        module.recompile()
    return hoisted


def lend_buffers(module: torch.fx.GraphModule) -> None:
    """Give the weight casts that pad a pool of zero-filled buffers, so that padding runs no kernel of its own."""
    casts = [node for node in module.graph.nodes if node.target is pad_cast]
    if not casts:
        return
    setattr(module, _POOL, BufferPool())
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        pool = module.graph.create_node("get_attr", _POOL)
    for node in casts:
        node.kwargs = {**node.kwargs, "pool": pool}
    module.recompile()


def emit(
    module: torch.fx.GraphModule, example_inputs: Sequence[Any], backend: CompiledFn | None, cache: WeightCache | None
) -> CompiledFn:
    """The callable for an edited graph: its own generated code, or what `backend` makes of it.

    `example_inputs` are those of the captured graph and of what passes added to it.

    `cache` is given for graphs captured without gradients; its copies replace the weight casts.
    """
    hoisted = hoist_weight_casts(module) if cache is not None else []
    if backend is None:
        restore_checkpoints(module)
        lend_buffers(module)
        run: CompiledFn = module.forward
    else:
        _name_sources(module)
        copies = [pad_cast(example_inputs[index], dtype, layout) for index, dtype, layout in hoisted]
        _fix_sizes(copies)
        run = backend(module, [*example_inputs, *copies])
    if cache is None or not hoisted:
        return run
    get = cache.get

    def with_cached_weights(*inputs: Any) -> Any:
        return run(*inputs, *[get(inputs[index], dtype, layout) for index, dtype, layout in hoisted])

    return with_cached_weights


def _fix_sizes(copies: Sequence[torch.Tensor]) -> None:
    """Tell AOTAutograd that copies of weights have the sizes they have: dynamic ones would need a source to be guarded by."""
    tracing = torch._guards.TracingContext.try_get()
    for place, copy in enumerate(copies if tracing is not None else ()):
        tracing.tensor_to_context[copy] = StatefulSymbolicContext(  # type: ignore[union-attr]
            dynamic_sizes=[DimDynamic.STATIC] * copy.dim(),
            tensor_source=ConstantSource(f"amprewrite_copy_{place}"),
            shape_env_to_source_to_symbol_cache={},
        )


def _name_sources(module: torch.fx.GraphModule) -> None:
    """Tell AOTAutograd, as Dynamo does, where each input comes from; a hoisted copy comes from nowhere."""
    for node in module.graph.find_nodes(op="placeholder"):
        node._dynamo_source = getattr(node.meta.get("grapharg"), "source", None)
