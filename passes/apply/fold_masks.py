"""Attention whose mask says nothing, or is plainly causal, goes without: such kernels are faster, and keep less.

1. Sizes that the graph fixes: the mask is computed now, and `attn_mask` becomes None, with `is_causal` where that is what it said.
2. Sizes that change from call to call, in a graph that runs without a compiler: it is looked at once for each set of sizes.
3. Such a graph on a CPU, where looking at values waits for nobody: any boolean mask is looked at, once a call.

Models skip such masks themselves when nobody captures them. What is exported stays as it was written.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import example_value, is_checkpoint, transformed_nodes
from amprewrite.graphs.fx.ops.attention_masks import Kind, Masks, find_mask, look_at_mask, sources_of, writes_to
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.program import Program
from amprewrite.tables.ops.op_lists import op_name

ATTENTION = "scaled_dot_product_attention"
MASK, CAUSAL = (3, "attn_mask"), (5, "is_causal")
"""Places and names of the arguments (torch.nn.functional.scaled_dot_product_attention)."""


class FoldMasks(Pass):
    name = "fold-masks"

    def call(self, program: Program) -> bool:
        if not program.fold_masks:
            return False
        assert program.module is not None
        found = fold_masks(program.module, program.fold_masks == "any")
        for what, count in sorted(found.items()):
            program.note(f"{count} attention calls {what}")
        return bool(found)


IS_CAUSAL = "take no mask: theirs is made of sizes alone, and is causal"
IS_ALL = "take no mask: theirs is made of sizes alone, and allows all positions"
IS_LOOKED_UP = "take no mask at sizes where theirs, made of sizes alone, is causal or allows all positions"
IS_LOOKED_AT = "take no mask where theirs, looked at in every forward, is causal or allows all positions"


def fold_masks(module: torch.fx.GraphModule, lazily: bool = False) -> Counter[str]:
    """Edit the graph of `module`; number of calls edited, by what was done. `lazily`: what only a call can tell, too."""
    graph, edited = module.graph, Counter[str]()
    for place, (mask, calls) in enumerate(_readers(graph).items()):
        sources = sources_of(mask)
        if sources is None:
            if lazily and _may_look(mask):
                edited[IS_LOOKED_AT] += _ask(graph, calls, look_at_mask, mask)
            continue
        nodes, sizes = sources
        masks = Masks(nodes, sizes)
        if not sizes:
            edited.update(_fold(call, masks) for call in calls)
        elif lazily:
            name = f"amprewrite_masks_{place}"
            setattr(module, name, masks)
            known = graph.create_node("get_attr", name)
            calls[0].prepend(known)
            edited[IS_LOOKED_UP] += _ask(graph, calls, find_mask, known, sizes)
        for node in reversed(nodes):
            if not node.users:
                graph.erase_node(node)
    for node in graph.nodes:
        if is_checkpoint(node):
            edited.update(_in_body(module, node, lazily))
    del edited[""]
    return edited


def _readers(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """The attention calls that read each mask; under vmap and its like nobody can look at one."""
    found: defaultdict[torch.fx.Node, list[torch.fx.Node]] = defaultdict(list)
    transformed = transformed_nodes(graph)
    for node in graph.nodes:
        if op_name(node.target) == ATTENTION and not _argument(node, CAUSAL) and node not in transformed:
            mask = _argument(node, MASK)
            if isinstance(mask, torch.fx.Node):
                found[mask].append(node)
    return found


def _in_body(module: torch.fx.GraphModule, node: torch.fx.Node, lazily: bool) -> Counter[str]:
    """The same in the body of an activation checkpoint, whose masks come from outside."""
    body: torch.fx.GraphModule = getattr(module, node.args[0].target)  # type: ignore[union-attr, arg-type]
    inputs = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[1:], strict=False))
    edited = Counter[str]()
    for mask, calls in _readers(body.graph).items():
        if _is_written(mask):
            continue
        outer = inputs.get(mask)
        sources = sources_of(outer) if isinstance(outer, torch.fx.Node) else None
        if sources is not None and not sources[1]:
            masks = Masks(*sources)
            edited.update(_fold(call, masks) for call in calls)
        elif lazily and _may_look(mask):
            edited[IS_LOOKED_AT] += _ask(body.graph, calls, look_at_mask, mask)
    body.recompile()
    return edited


def _may_look(mask: torch.fx.Node) -> bool:
    value = example_value(mask)
    plain = isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.device.type == "cpu"
    return plain and not _is_written(mask)


def _is_written(mask: torch.fx.Node) -> bool:
    return any(writes_to(node, {mask}) for node in mask.graph.nodes)


def _fold(call: torch.fx.Node, masks: Masks) -> str:
    """Drop a mask whose sizes are fixed, if that may be; what was done."""
    lengths = tuple(example_value(x).shape[-2] for x in _queries_and_keys(call))
    kind = masks.kind((), lengths) if all(type(length) is int for length in lengths) else Kind.OTHER  # type: ignore[arg-type]
    if kind is Kind.OTHER:
        return ""
    _set(call, None, kind is Kind.CAUSAL)
    return IS_CAUSAL if kind is Kind.CAUSAL else IS_ALL


def _ask(graph: torch.fx.Graph, calls: list[torch.fx.Node], question: Callable[..., Any], *about: Any) -> int:
    """Let `calls` take what `question(*about, query, key)` answers, asked once for all that have the same lengths; their number."""
    asked: dict[str, tuple[torch.fx.Node, torch.fx.Node]] = {}
    for call in calls:
        query, key = _queries_and_keys(call)
        lengths = str((example_value(query).shape[-2], example_value(key).shape[-2]))
        if lengths not in asked:
            with graph.inserting_before(call):
                found = graph.call_function(question, (*about, query, key))
                asked[lengths] = graph.call_function(operator.getitem, (found, 0)), graph.call_function(operator.getitem, (found, 1))
        _set(call, *asked[lengths])
    return len(calls)


def _queries_and_keys(call: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node]:
    query, key = _argument(call, (0, "query")), _argument(call, (1, "key"))
    return query, key


def _argument(call: torch.fx.Node, which: tuple[int, str]) -> Any:
    at, name = which
    return call.args[at] if len(call.args) > at else call.kwargs.get(name)


def _set(call: torch.fx.Node, mask: torch.fx.Node | None, causal: torch.fx.Node | bool) -> None:
    for (at, name), value in ((MASK, mask), (CAUSAL, causal)):
        if len(call.args) > at:
            call.update_arg(at, value)
        else:
            call.update_kwarg(name, value)
