"""Attention whose mask is made of sizes alone, and says nothing or is plainly causal, goes without: such kernels are faster.

1. Sizes that the graph fixes: the mask is computed now, and `attn_mask` becomes None, with `is_causal` where that is what it said.
2. Sizes that change from call to call, in a graph that runs without a compiler: it is looked at once for each set of sizes.

Models skip such masks themselves when nobody captures them. What is exported stays as it was written.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from amprewrite.constant_masks import Kind, Masks, find_mask, sources_of
from amprewrite.frontends.fx_facts import example_value, is_checkpoint, transformed_nodes
from amprewrite.oplists import op_name
from amprewrite.pass_base import Pass
from amprewrite.program import Program

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


def fold_masks(module: torch.fx.GraphModule, lazily: bool = False) -> Counter[str]:
    """Edit the graph of `module`; number of calls edited, by what was done. `lazily`: where sizes are not fixed, too."""
    graph, edited = module.graph, Counter[str]()
    for place, (mask, calls) in enumerate(_readers(graph).items()):
        sources = sources_of(mask)
        if sources is None:
            continue
        masks = Masks(*sources)
        if not sources[1]:
            edited.update(_fold(call, masks) for call in calls)
        elif lazily:
            setattr(module, f"amprewrite_masks_{place}", masks)
            _look_up(graph, calls, f"amprewrite_masks_{place}", sources[1])
            edited[IS_LOOKED_UP] += len(calls)
        for node in reversed(sources[0]):
            if not node.users:
                graph.erase_node(node)
    edited.update(call for node in graph.nodes if is_checkpoint(node) for call in _in_body(module, node))
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


def _in_body(module: torch.fx.GraphModule, node: torch.fx.Node) -> Iterator[str]:
    """The same in the body of an activation checkpoint, whose masks come from outside."""
    body: torch.fx.GraphModule = getattr(module, node.args[0].target)  # type: ignore[union-attr, arg-type]
    inputs = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[1:], strict=False))
    for inner, calls in _readers(body.graph).items():
        mask = inputs.get(inner)
        sources = sources_of(mask) if isinstance(mask, torch.fx.Node) else None
        if sources is not None and not sources[1]:
            masks = Masks(*sources)
            yield from (_fold(call, masks) for call in calls)
    body.recompile()


def _fold(call: torch.fx.Node, masks: Masks) -> str:
    """Drop a mask whose sizes are fixed, if that may be; what was done."""
    lengths = tuple(example_value(x).shape[-2] for x in _queries_and_keys(call))
    kind = masks.kind((), lengths) if all(type(length) is int for length in lengths) else Kind.OTHER  # type: ignore[arg-type]
    if kind is Kind.OTHER:
        return ""
    _set(call, None, kind is Kind.CAUSAL)
    return IS_CAUSAL if kind is Kind.CAUSAL else IS_ALL


def _look_up(graph: torch.fx.Graph, calls: list[torch.fx.Node], name: str, sizes: tuple[torch.fx.Node, ...]) -> None:
    """Let `calls` ask the masks, once for all that have the same lengths."""
    asked: dict[str, tuple[torch.fx.Node, torch.fx.Node]] = {}
    for call in calls:
        query, key = _queries_and_keys(call)
        lengths = str((example_value(query).shape[-2], example_value(key).shape[-2]))
        if lengths not in asked:
            with graph.inserting_before(call):
                found = graph.call_function(find_mask, (graph.create_node("get_attr", name), query, key, *sizes))
                asked[lengths] = graph.call_function(operator.getitem, (found, 0)), graph.call_function(operator.getitem, (found, 1))
        _set(call, *asked[lengths])


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
