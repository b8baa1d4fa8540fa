"""Without a compiler, compute the cross entropy of many low logits in parts, which saves the memory of fp32 logits and their gradients.

A loss qualifies if it reads an fp32 copy of low logits, directly or through views, with one row for each target, and has no class weights
and no label smoothing. In fp16 a loss stays whole if the graph also returns its logits, because the loss scale is applied between logits
and loss. Results are the same (`graphs/fx/ops/cross_entropy.py`). A compiler fuses the loss itself.

    before   wide = to(logits, float32)                            after   loss = cross_entropy_of_low(logits, labels, -100, "mean")
             loss = cross_entropy(wide, labels)
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Target, copy_graph
from amprewrite.graphs.fx.node_facts import example_value, hint, memory_of, named_arguments, transformed_nodes, written_memory
from amprewrite.graphs.fx.ops import cross_entropy
from amprewrite.ir.pass_base import Pass
from amprewrite.passes.lower.suit_compiler import widens
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with

VIEWS = ops_with(Trait.KEEPS_ORDER)
"""Ops that may be between the fp32 copy of the logits and the loss."""
_PLAIN: dict[str, Any] = {"weight": None, "size_average": None, "reduce": None, "label_smoothing": 0.0}
"""Arguments of a loss that must have these values or be absent."""


class SplitLosses(Pass[Target, EditedGraph]):
    def __call__(self, target: Target, edited: EditedGraph) -> None:
        if not (target.eager and target.training) or not _large(edited.module.graph):
            return
        edited.module, _ = copy_graph(edited.module)  # edit a copy: users can inspect the original with its losses
        for node in _large(edited.module.graph):
            split_loss(edited.module, node)
        edited.module.recompile()


def _large(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Return the calls of cross_entropy with many logits, in one row for each target, outside of torch.func transforms."""
    losses = graph.find_nodes(op="call_function", target=torch.nn.functional.cross_entropy)
    apart = transformed_nodes(graph) if losses else set()
    return [node for node in losses if node not in apart and _qualifies(named_arguments(node))]


def _qualifies(given: dict[str, Any]) -> bool:
    """True if a loss with these arguments has plain options, integer targets, and logits in rows whose fp32 copy is large."""
    if any(given.get(name) not in (plain, None) for name, plain in _PLAIN.items()):
        return False
    logits, target = (example_value(each) if isinstance(each, torch.fx.Node) else None for each in (given["input"], given["target"]))
    if not isinstance(logits, torch.Tensor) or not isinstance(target, torch.Tensor) or logits.dim() != 2 or target.dtype != torch.int64:
        return False
    return math.prod(map(hint, logits.shape)) * 4 >= cross_entropy.FROM_BYTES


def split_loss(module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    """Let a loss read low logits in parts, instead of their fp32 copy.

    The loss stays if there is no such copy, or if the graph writes to the low logits.
    """
    given = named_arguments(node)
    chain = [given["input"]]
    while chain[-1].op.startswith("call") and op_name(chain[-1].target) in VIEWS:
        chain.append(chain[-1].args[0])
    if not widens(chain[-1]) or not written_memory(module.graph).isdisjoint(memory_of(chain[-1].args[0])):
        return
    low = {chain[-1]: chain[-1].args[0]}
    with module.graph.inserting_before(node):
        for view in reversed(chain[:-1]):
            low[view] = module.graph.node_copy(view, lambda each: low.get(each, each))
            low[view].target = "reshape" if view.target == "view" else view.target  # `view` fails on rows that are padded in memory
    own = {node, *chain}
    wide = given["input"] if any(user not in own for each in chain for user in each.users) else None
    chosen = [given["ignore_index"], given["reduction"]]
    kept: list[Any] = [default if value is None else value for value, default in zip(chosen, (-100, "mean"), strict=True)]
    node.target, node.args, node.kwargs = cross_entropy.cross_entropy_of_low, (low[given["input"]], given["target"], *kept, wide), {}
    for each in chain if wide is None else ():
        module.graph.erase_node(each)
