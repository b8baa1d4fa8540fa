"""Make a graph ready for AOTAutograd, which traces its forward and backward for a compiler.

1. Each input gets the source (the place of the value in the model) that Dynamo recorded. Inputs for low copies of weights have none.
2. In training, if a result is a bf16 or fp16 value cast to fp32, the graph returns the value, and the cast is made after the graph.
   AOTAutograd keeps results for backward, and makes zeros in their dtype if they get no gradient. So logits that are returned with a loss
   take four bytes an element instead of eight.
3. A cast to fp32 is marked for recomputation, so that AOTAutograd may save the low value for backward instead of the copy, which is twice
   as large.
4. In training with a loss scale, a value is copied if the graph returns it together with a view of it. Otherwise AOTAutograd would lose
   the gradients of these results (`part_views`). An op that returns its operand is removed (`read_operands`).
5. In training, results of ops that read an input that the graph writes are marked to be saved for backward (`keep_reads`).

    before   return loss, to(logits, float32)          after   return loss, logits
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch.utils.checkpoint import CheckpointPolicy

from amprewrite.graphs.fx.captured import EditedGraph, Target, Widened
from amprewrite.graphs.fx.node_facts import (
    GRAD_SWITCHES,
    bodies,
    example_value,
    is_checkpoint,
    memory_of,
    written,
    written_memory,
    written_unsaid,
)
from amprewrite.graphs.fx.ops.scale_ops import hooked, hooked_unscaled, scale_gradient
from amprewrite.graphs.fx.read.aliasing import runs_as_python, same_tensor
from amprewrite.ir.pass_base import Pass
from amprewrite.tables.formats import LOW_DTYPES
from amprewrite.tables.ops.op_lists import op_name

CompiledFn = Callable[..., Any]


class SuitCompiler(Pass[Target, EditedGraph]):
    needs = ("compiled",)

    def __call__(self, target: Target, edited: EditedGraph) -> None:
        if target.training:
            edited.make_own()
            read_operands(edited.module.graph)
            edited.widened = return_low(edited.module.graph)
            part_views(edited.module.graph)
            for node in filter(widens, edited.module.graph.nodes):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            keep_reads(edited.module.graph)
            edited.module.recompile()
        give_sources(edited.module.graph)


def keep_reads(graph: torch.fx.Graph) -> None:
    """Mark each op that reads memory of an input that the graph writes, so that AOTAutograd saves the op's result for backward.

    Otherwise the backward may compute the result again from values written later (https://github.com/pytorch/pytorch/pull/197039). Views,
    checkpoints, and ops with hidden writes, as to running statistics, are not marked. In a marked op's subgraph, readers of inputs are.
    """
    memory = written_memory(graph) & set[int]().union(*map(memory_of, graph.find_nodes(op="placeholder")))
    for node in graph.nodes:
        reads = any(memory & memory_of(each) for each in node.all_input_nodes)
        is_view = memory & memory_of(node) and not written(node)
        if reads and not is_view and node.op != "output" and not is_checkpoint(node) and not written_unsaid(node):
            inner = (each for body in bodies(node) for each in body.graph.nodes if each.op.startswith("call"))
            for each in (node, *(one for one in inner if any(given.op == "placeholder" for given in one.all_input_nodes))):
                each.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def same_tensors(node: torch.fx.Node | None) -> Iterator[torch.fx.Node]:
    """Yield `node`, and the operands that its ops return as the same tensor object (`same_tensor`)."""
    while node is not None:
        yield node
        node = same_tensor(node)


def read_operands(graph: torch.fx.Graph) -> None:
    """Remove each op that returns its operand, such as dropout with p=0. AOTAutograd would make a new tensor, which hooks tell apart."""
    for node in graph.nodes:
        if runs_as_python(node) and (operand := same_tensor(node)) is not None:
            node.replace_all_uses_with(operand)
            graph.erase_node(node)


def give_sources(graph: torch.fx.Graph) -> None:
    """Store the source that Dynamo recorded for each input in `_dynamo_source` of its node, where AOTAutograd looks for it."""
    for node in graph.find_nodes(op="placeholder"):
        node._dynamo_source = getattr(node.meta.get("grapharg"), "source", None)


def return_low(graph: torch.fx.Graph) -> list[Widened]:
    """Let the graph return low-precision values in place of their casts to fp32, which are then made after the graph.

    A cast stays in the graph if a later cast would give other values or gradients: if the graph writes to the memory of the cast or of its
    operand, sets a hook on that memory, turns gradients on or off, or returns another result in that memory.

    Returns, for each low result: its position, its fp32 dtype, and the position of the input that scales its gradient (None if none does).
    """
    (output,) = graph.find_nodes(op="output")
    inputs = graph.find_nodes(op="placeholder")
    memory, switched = written_memory(graph), any(op_name(node.target) in GRAD_SWITCHES for node in graph.nodes)
    hooks = (node.args[0] for node in graph.nodes if node.target in (hooked, hooked_unscaled))
    memory |= {storage for given in hooks for each in same_tensors(given) for storage in memory_of(each)}
    results, found = list(output.args[0]), list[Widened]()
    tensors = [result for result in results if isinstance(result, torch.fx.Node)]
    held = Counter(storage for each in tensors for storage in set[int]().union(*map(memory_of, same_tensors(each))))
    for place, result in enumerate(results):
        entered = isinstance(result, torch.fx.Node) and result.target is scale_gradient
        cast = result.args[0] if entered else result
        if not isinstance(cast, torch.fx.Node) or not widens(cast) or switched:
            continue  # if `switched`, the cast may run under no_grad; autograd would record a cast that is made after the graph
        if any(held[storage] > 1 for storage in memory_of(result)):
            continue  # another result shares the memory of the cast, but would not if the cast were made after the graph
        # Keep the cast if the graph writes or hooks its operand or result: a moved cast would read later values, or lose the write or hook.
        if all(memory.isdisjoint(memory_of(each)) for each in (cast, *cast.all_input_nodes)):
            results[place] = cast.args[0]
            found.append((place, example_value(cast).dtype, inputs.index(result.args[1]) if entered else None))
    before, output.args = output.args[0], (tuple(results),)
    for node in (before[place] for place, *_ in found):
        while not node.users and node not in results:
            source = node.args[0]
            graph.erase_node(node)
            if node.target is not scale_gradient:
                break
            node = source
    return found


def part_views(graph: torch.fx.Graph) -> None:
    """Insert a copy (`clone`) after each `scale_gradient` in `graph` whose result shares memory with several results of the graph.

    AOTAutograd computes such results anew: it starts at the value that owns their memory, and repeats all views. Without a copy, one of
    these views is the `detach` inside `scale_gradient`, so the results lose their gradients. With a copy, the views start at the copy.
    """
    (output,) = graph.find_nodes(op="output")
    results = [memory_of(each) for each in output.args[0] if isinstance(each, torch.fx.Node)]
    for node in graph.find_nodes(op="call_function", target=scale_gradient):
        if sum(not memory.isdisjoint(memory_of(node)) for memory in results) > 1:
            with graph.inserting_after(node):
                copy = graph.call_method("clone", (node,))
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy, delete_user_cb=functools.partial(operator.is_not, copy))


def widens(node: torch.fx.Node) -> bool:
    """True if a node converts bf16 or fp16 values to fp32."""
    source = node.args[0] if node.args and node.target in ("to", "float") else None
    values = [example_value(each) for each in (source, node) if isinstance(each, torch.fx.Node)]
    before, after = (getattr(value, "dtype", None) for value in values) if len(values) == 2 else (None, None)
    return before in LOW_DTYPES and after == torch.float32


def with_widened_results(run: CompiledFn, widened: list[Widened]) -> CompiledFn:
    """Return a callable that runs `run` and casts the results in `widened` to fp32. It scales their gradients if `widened` says so."""

    def call(*inputs: Any) -> Any:
        results = list(run(*inputs))
        for place, dtype, scale in widened:
            wide = results[place].to(dtype)
            results[place] = wide if scale is None else scale_gradient(wide, inputs[scale])
        return tuple(results)

    return call
