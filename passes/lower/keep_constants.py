"""Without a compiler, compute integer and boolean tensors that depend on no input only once, such as positions and parts of masks.

1. A constant is the result of ops without side effects on fixed sizes, on a device that the ops name.
2. Of a chain of such ops, only the values that ops outside the chain read are kept.
3. A value is not kept if the value or a view of it may leave the graph, if a user's function reads it, or if it has more than MOST_BYTES. A
   graph that writes an integer in place keeps none. Floats are not kept: casts move them to new memory, where writes cannot be tracked.

Without this pass every call computes these values, with a kernel launch for each op.

    before   positions = arange(128)          after   taken = take_constants(kept)
             later = positions + 1                    later = taken[0]
             out = embedding(later, w)                out = embedding(later, w)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import FunctionType

import torch
import torch.fx
from torch import Tensor

from amprewrite.graphs.fx.captured import EditedGraph, Target
from amprewrite.graphs.fx.node_facts import example_value, memory_of, tensors, transformed_nodes, written
from amprewrite.graphs.fx.ops.attention_masks import PURE
from amprewrite.graphs.fx.ops.on_device import recording
from amprewrite.ir.op_graph import reached
from amprewrite.ir.pass_base import Pass
from amprewrite.tables.ops.op_lists import Trait, is_inplace, op_name, ops_with
from amprewrite.torch_internals.dispatch import disable_dispatch_modes
from amprewrite.torch_internals.operators import HigherOrderOperator

READS_BITS = ops_with(Trait.READS_BITS)
MOST_BYTES = 1 << 16
"""Largest size, in bytes, of a value that is kept. For a larger value the saved launch is not worth the memory."""
NAME = "amprewrite_constants"
"""Attribute of the graph that holds its kept constants."""


class KeepConstants(Pass[Target, EditedGraph]):
    needs = ("eager",)

    def __call__(self, target: Target, edited: EditedGraph) -> None:
        if results := _results(edited.module):
            copy_of = edited.make_own()
            keep_constants(edited.module, [copy_of(result) for result in results])


def keep_constants(module: torch.fx.GraphModule, results: list[torch.fx.Node]) -> None:
    """Replace the constants `results` of a graph, in place, by one node that computes their values in its first call and keeps them."""
    graph = module.graph
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
    """Return the constants that can be kept and that nodes other than constants read; [] if the graph writes any integers in place."""
    constant = _constants(module.graph)
    found = [node for node in constant if any(user not in constant for user in node.users) and _can_be_kept(node)]
    if found and any(_is_whole(target) for node in module.graph.nodes for target in written(node)):
        return []
    return found


def _constants(graph: torch.fx.Graph) -> dict[torch.fx.Node, None]:
    """Return the nodes that compute integers or booleans from no input, in graph order, as the keys of a dict."""
    apart, found = transformed_nodes(graph), dict[torch.fx.Node, None]()
    for node in graph.nodes:
        pure = node.op in ("call_function", "call_method") and op_name(node.target) in PURE and not is_inplace(node.target)
        if not pure or node in apart or "out" in node.kwargs or not isinstance(example_value(node), torch.Tensor) or not _is_whole(node):
            continue
        sources = node.all_input_nodes
        if all(source in found for source in sources) and (sources or _names_device(node)):
            found[node] = None
    return found


def _is_whole(node: torch.fx.Node) -> bool:
    """True if a node returns integers or booleans only."""
    made = tensors(example_value(node))
    return bool(made) and not any(value.is_floating_point() or value.is_complex() for value in made)


def _names_device(node: torch.fx.Node) -> bool:
    """True if a node names a definite device for its result, such as "cpu" or "cuda:1", so that the current device does not matter."""
    named = node.kwargs.get("device")
    device = torch.device(named) if isinstance(named, str | torch.device) else None
    return device is not None and (device.type == "cpu" or device.index is not None)


def _can_be_kept(node: torch.fx.Node) -> bool:
    """True if a constant has a fixed size of at most MOST_BYTES, and only ops of this graph read it."""
    value = example_value(node)
    fixed = all(type(size) is int for size in value.shape) and value.layout is torch.strided
    return fixed and value.nbytes <= MOST_BYTES and _stays_inside(node)


def _stays_inside(node: torch.fx.Node) -> bool:
    """True if only ops of this graph read a value and its views.

    False if the graph returns the value, if a function of the user or a subgraph takes it, or if an op reads its bits as floats.
    The views were found at capture. They are still right after the rewrite, because no pass changes the dtype of an integer.
    """
    memory = memory_of(node)
    views = reached([node], lambda view: (user for user in view.users if not memory.isdisjoint(memory_of(user))))
    users = (user for view in views for user in view.users)
    return not any(_is_foreign(user) or (op_name(user.target) in READS_BITS and not _is_whole(user)) for user in users)


def _is_foreign(user: torch.fx.Node) -> bool:
    """True if `user` may keep or write its operand unseen: a user's function, a subgraph, or a node whose effect is unknown."""
    unread = isinstance(user.target, FunctionType) and not user.target.__module__.startswith(("torch.nn.", "torch.functional", "torch._"))
    return user.op not in ("call_function", "call_method") or unread or isinstance(user.target, HigherOrderOperator)


_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL)


class Constants:
    """Computes the values of the nodes `results` at the first call, and keeps them. These nodes depend on no input of their graph.

    `nodes` are all nodes that compute these values, in order. While a call is traced or a CUDA graph is recorded, kept values would be
    wrong, so the values are computed again.
    """

    def __init__(self, nodes: Sequence[torch.fx.Node], results: Sequence[torch.fx.Node]) -> None:
        graph = torch.fx.Graph()
        made: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in nodes:
            made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(tuple(made[node] for node in results))
        self._module = torch.fx.GraphModule({}, graph)
        self._kept: tuple[Tensor, ...] | None = None

    def take(self) -> tuple[Tensor, ...]:
        """Return the values, one tensor for each node of `results`. The caller must not write to them."""
        if any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING):
            return self._module()  # type: ignore[no-any-return]
        if self._kept is None or recording(self._kept[0].device):
            with disable_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
                made: tuple[Tensor, ...] = self._module()
            if recording(made[0].device):
                return made  # not kept: a replay of the CUDA graph must compute the values, because this object may be gone by then
            self._kept = made
        return self._kept


def take_constants(constants: Constants) -> tuple[Tensor, ...]:
    """Return `constants.take()`. Rewritten graphs call this function."""
    return constants.take()
