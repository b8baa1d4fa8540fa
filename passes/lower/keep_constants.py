"""Without a compiler, values that no input changes are computed once and kept: positions, lengths, parts of masks.

1. A constant is what ops that only compute make of sizes that are fixed, on a device that they name.
2. Of each run of such ops the last values are kept, those that other ops read.
3. A value stays if the graph writes its memory, if it leaves the graph, if a function of the user's gets it, or above MOST_BYTES.

Uncaptured code computes them at every call; each is a launch.

    before   positions = arange(128)          after   taken = take_constants(kept)
             later = positions + 1                    later = taken[0]
             out = embedding(later, w)                out = embedding(later, w)
"""

from __future__ import annotations

import operator
from types import FunctionType

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Target, copy_graph
from amprewrite.graphs.fx.node_facts import example_value, memory_of, transformed_nodes
from amprewrite.graphs.fx.ops.attention_masks import PURE
from amprewrite.graphs.fx.run.constants import Constants, take_constants
from amprewrite.ir.pass_base import Pass
from amprewrite.passes.lower.hoist_weight_casts import written_storages
from amprewrite.tables.ops.op_lists import is_inplace, op_name

MOST_BYTES = 1 << 16
"""Of one value: more memory is not worth a launch."""
NAME = "amprewrite_constants"


class KeepConstants(Pass[Target, EditedGraph]):
    name = "keep-constants"

    def call(self, target: Target, edited: EditedGraph) -> bool:
        if not target.eager or not _results(edited.module):
            return False
        edited.module, _ = copy_graph(edited.module)  # the graph that users look into keeps what its code says
        keep_constants(edited.module)
        return True


def keep_constants(module: torch.fx.GraphModule) -> None:
    """Take the constants of a graph from one that computes them once."""
    graph, results = module.graph, _results(module)
    needed = set(results)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    nodes = [node for node in graph.nodes if node in needed]
    setattr(module, NAME, Constants(nodes, results))
    with graph.inserting_before(nodes[0]):
        known = graph.create_node("get_attr", NAME)
        taken = graph.call_function(take_constants, (known,))
        for place, result in enumerate(results):
            value = graph.call_function(operator.getitem, (taken, place))
            value.meta = dict(result.meta)
            result.replace_all_uses_with(value)
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)
    module.recompile()


def _results(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The constants that something else reads and that can be kept, in order."""
    constant = _constants(module.graph)
    output = next(node for node in module.graph.nodes if node.op == "output")
    stays = written_storages(module).union(*(memory_of(node) for node in output.all_input_nodes))
    return [node for node in constant if any(user not in constant for user in node.users) and _can_be_kept(node, stays)]


def _constants(graph: torch.fx.Graph) -> dict[torch.fx.Node, None]:
    """Nodes that depend on no input, in order."""
    apart, found = transformed_nodes(graph), dict[torch.fx.Node, None]()
    for node in graph.nodes:
        pure = node.op in ("call_function", "call_method") and op_name(node.target) in PURE and not is_inplace(node.target)
        if not pure or node in apart or "out" in node.kwargs or not isinstance(example_value(node), torch.Tensor):
            continue
        sources = node.all_input_nodes
        if all(source in found for source in sources) and (sources or _names_device(node)):
            found[node] = None
    return found


def _names_device(node: torch.fx.Node) -> bool:
    """Whether a node without operands says where its result lies, whatever the current device is."""
    named = node.kwargs.get("device")
    device = torch.device(named) if isinstance(named, str | torch.device) else None
    return device is not None and (device.type == "cpu" or device.index is not None)


def _can_be_kept(node: torch.fx.Node, stays: set[int]) -> bool:
    value = example_value(node)
    fixed = all(type(size) is int for size in value.shape) and not value.requires_grad and value.layout is torch.strided
    return fixed and value.nbytes <= MOST_BYTES and stays.isdisjoint(memory_of(node)) and not any(map(_is_foreign, node.users))


def _is_foreign(user: torch.fx.Node) -> bool:
    """Whether a function of the user's, or a graph inside this one, gets what `user` reads."""
    unread = isinstance(user.target, FunctionType) and user.target.__module__.partition(".")[0] not in ("torch", "amprewrite")
    return user.op == "output" or unread or isinstance(user.target, torch._ops.HigherOrderOperator)


__all__ = ["KeepConstants", "keep_constants"]
