"""Remove masks and repeated heads from attention calls, as planned: kernels without them are faster and keep less memory for backward.

1. Drop a mask: `attn_mask` becomes None, with `is_causal` if the mask was causal.
2. Look up a mask: if a mask depends on sizes alone, compute it once for each set of sizes, and find out then if it can be dropped.
3. Look at a mask: read the elements of a boolean CPU mask in every call, and drop the mask if its elements allow that.
4. Group heads: if keys and values are repeated for several heads, let the call read the original ones, with `enable_gqa`.
5. Make a mask contiguous, because fused kernels need that: copy the mask, or the tensor from which it gets its strides. If the
   graph returns a view of that tensor, the view still shares the memory of the original, not of the copy.

    before   sdpa = scaled_dot_product_attention(q, k, v, causal_mask)
    after    sdpa = scaled_dot_product_attention(q, k, v, None, 0.0, True)

`plan-masks` decides which calls are edited. `graphs/fx/ops/attention_masks.py` examines the masks for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Set
from typing import Any

import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.flow.attention_calls import GROUPED, KEY, VALUE, read_repeated_heads, returned_memory
from amprewrite.graphs.fx.node_facts import example_value, memory_of, set_argument
from amprewrite.graphs.fx.ops.attention_masks import (
    CAUSAL,
    MASK,
    Masks,
    find_mask,
    look_at_mask,
    mask_readers,
    queries_and_keys,
    sources_of,
)
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.tables.errors import PassError
from amprewrite.tables.vocabulary import Edit

DROPPED = (Edit.DROP_CAUSAL_MASK, Edit.DROP_FULL_MASK)


class FoldMasks(Pass[RegionPlan, EditedGraph]):
    needs = ("edits",)

    def __call__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        asked = {edited.nodes[name]: what for name, what in plan.edited(*DROPPED, Edit.LOOK_UP_MASK, Edit.LOOK_AT_MASK).items()}
        for place, (mask, calls) in enumerate(mask_readers(edited.module.graph).items()):
            chosen = {call: asked[call] for call in calls if call in asked}
            if chosen:
                fold_mask(edited.module, mask, chosen, f"amprewrite_masks_{place}")
        for name in plan.edited(Edit.GROUP_HEADS):
            group_heads(edited.nodes[name])
        for name in plan.edited(Edit.CONTIGUOUS_MASK):
            copy_strided(edited.nodes[name], set(edited.nodes.values()))


def copy_strided(value: torch.fx.Node, captured: Set[torch.fx.Node]) -> None:
    """Let the readers of `value` read a contiguous copy instead. `value` is an attention mask, or a tensor of which the mask is a view.

    If the graph returns memory of `value`, views of this memory are still made from `value` itself, so that results share memory as before.
    `captured` holds the nodes of the captured graph. Only these are searched for views, because passes insert none.
    """
    kept = returned_memory(value.graph) & memory_of(value)
    views = {node for node in captured if not kept.isdisjoint(memory_of(node))}
    readers = [node for node in value.graph.nodes if node in value.users and node.op != "output" and node not in views]
    with value.graph.inserting_before(readers[0]):
        copy = value.graph.call_method("contiguous", (value,))
    copy.meta["example_value"] = example_value(value).contiguous()
    for reader in readers:
        reader.replace_input_with(value, copy)


def group_heads(call: torch.fx.Node) -> None:
    """Let an attention call read keys and values before their heads are repeated. Erase the ops that repeat heads.

    Raises PassError if no ops repeat the heads, or if other nodes read the repeated heads, too.
    """
    ways = read_repeated_heads(call.graph).get(call)
    if ways is None:
        raise PassError(f"{call.name} is to read groups of heads, but its heads are not repeated by ops that it alone reads")
    for which, way in zip((KEY, VALUE), ways, strict=True):
        if way.between:
            way.between[-1].replace_input_with(way.lined, way.heads)
        set_argument(call, *which, way.between[0] if way.between else way.heads)
        for node in (way.whole, way.spread, way.lined):
            call.graph.erase_node(node)
    call.update_kwarg(GROUPED, True)


def fold_mask(module: torch.fx.GraphModule, mask: torch.fx.Node, calls: dict[torch.fx.Node, Edit], name: str) -> None:
    """Edit the attention calls in `calls`, {call: edit}, which read `mask`. Erase ops that build the mask if nothing reads it any more.

    `Edit.LOOK_UP_MASK` adds an attribute `name` to `module`: an object that caches for each set of sizes whether attention needs the mask.
    """
    graph = module.graph
    sources = sources_of(mask)
    for call, what in calls.items():
        if what in DROPPED:
            _set(call, None, what is Edit.DROP_CAUSAL_MASK)
    looked_up = [call for call, what in calls.items() if what is Edit.LOOK_UP_MASK]
    if looked_up:
        if sources is None:
            raise PassError(f"{mask.name} is to be looked up by its sizes, and it is made of more than sizes")
        setattr(module, name, Masks(*sources))
        known = graph.create_node("get_attr", name)
        looked_up[0].prepend(known)
        _ask(graph, looked_up, find_mask, known, sources[1])
    _ask(graph, [call for call, what in calls.items() if what is Edit.LOOK_AT_MASK], look_at_mask, mask)
    for node in reversed(sources[0] if sources is not None else ()):
        if not node.users:
            graph.erase_node(node)


def _ask(graph: torch.fx.Graph, calls: list[torch.fx.Node], question: Callable[..., Any], *about: Any) -> None:
    """Insert nodes that find out in each forward whether the attention `calls` need their mask. The calls take the results as arguments.

    Each node calls `question(*about, query, key)`, for example `look_at_mask(mask, query, key)`, and returns (`attn_mask`, `is_causal`).
    `attn_mask` is None if the mask can be dropped. Attention calls with the same numbers of queries and keys share one node.
    """
    asked: dict[str, tuple[torch.fx.Node, torch.fx.Node]] = {}
    for call in calls:
        query, key = queries_and_keys(call)
        lengths = str((example_value(query).shape[-2], example_value(key).shape[-2]))
        if lengths not in asked:
            with graph.inserting_before(call):
                found = graph.call_function(question, (*about, query, key))
                asked[lengths] = graph.call_function(operator.getitem, (found, 0)), graph.call_function(operator.getitem, (found, 1))
        _set(call, *asked[lengths])


def _set(call: torch.fx.Node, mask: torch.fx.Node | None, causal: torch.fx.Node | bool) -> None:
    set_argument(call, *MASK, mask)
    set_argument(call, *CAUSAL, causal)
