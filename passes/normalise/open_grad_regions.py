"""Inline the `no_grad` sub-graphs of torch.export, so that the passes see every op.

    before   y = wrap_with_set_grad_enabled(False, body, x)
    after    _set_grad_enabled(False); y = relu(x); _set_grad_enabled(True)

The sub-graphs of `torch.compiler.nested_compile_region` are inlined, too: run eagerly, the op that calls them has no backward.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Reading
from amprewrite.graphs.fx.node_facts import FRESH, MEMORY, memory_of
from amprewrite.ir.pass_base import Pass
from amprewrite.torch_internals.dispatch import set_grad_enabled

_GRAD, _COMPILED = torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.invoke_subgraph


class OpenGradRegions(Pass[Reading, EditedGraph]):
    def __call__(self, reading: Reading, edited: EditedGraph) -> None:
        open_compile_regions(edited.module)
        open_grad_regions(edited.module)


def open_grad_regions(module: torch.fx.GraphModule) -> None:
    """Replace each `wrap_with_set_grad_enabled` subgraph by its nodes between two calls that set the grad mode.

    The result has the form in which Dynamo captures such regions. torch.export wraps them again when the edited graph is exported.
    """
    _open_all(module, _GRAD)


def open_compile_regions(module: torch.fx.GraphModule) -> None:
    """Replace each `invoke_subgraph` in a graph and its subgraphs by the nodes of its subgraph, which several calls may share."""
    for each in list(module.modules()):
        if isinstance(each, torch.fx.GraphModule):
            _open_all(each, _COMPILED)


def _open_all(module: torch.fx.GraphModule, target: Any) -> None:
    found = False
    while node := next(iter(module.graph.find_nodes(op="call_function", target=target)), None):
        _open(module, node)
        found = True
    if found:
        module.recompile()


def _open(module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    first, second, *operands = node.args  # a grad region has (mode, body, *operands), a compiled one (body, identifier, *operands)
    enabled, body_node = (first, second) if node.target is _GRAD else (None, first)
    assert isinstance(body_node, torch.fx.Node)
    body = module.get_submodule(str(body_node.target))
    assert isinstance(body, torch.fx.GraphModule)
    graph, inner = module.graph, dict[torch.fx.Node, Any](zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    results: Any = body.graph.output_node().args[0]
    memory = _memory([*inner.items(), *((results[user.args[1]], user) for user in node.users)])
    with graph.inserting_before(node):
        if enabled is not None:
            graph.call_function(set_grad_enabled, (enabled,))
        for each in body.graph.nodes:
            if each.op == "get_attr":
                inner[each] = _moved_attribute(module, body, each)
            elif each.op not in ("placeholder", "output"):
                copy = inner[each] = graph.node_copy(each, inner.__getitem__)
                copy.meta[MEMORY] = set().union(*(memory[storage] for storage in memory_of(each)))
                if enabled is None:
                    copy.meta["nn_module_stack"] = _modules(each, node)
        if enabled is not None:
            graph.call_function(set_grad_enabled, (not enabled,))
    for user in list(node.users):  # each user is a getitem of one result, because the subgraph returns a tuple
        result = results[user.args[1]]  # `result` may be None or a number, which is no node
        user.replace_all_uses_with(inner.get(result, result))
        graph.erase_node(user)
    graph.erase_node(node)
    if not body_node.users:
        graph.erase_node(body_node)


def _modules(node: torch.fx.Node, call: torch.fx.Node) -> dict[str, Any]:
    """Return the `nn_module_stack` of a copy of `node` for `call`, which runs its subgraph. The stack of `node` fits only one call."""
    around, inner = call.meta.get("nn_module_stack") or {}, list((node.meta.get("nn_module_stack") or {}).items())
    outer = [module for _, module in inner[: len(around)]]
    if not around or [kind for _, kind in outer] != [kind for _, kind in around.values()]:
        return around or dict(inner)  # paths in subgraphs of torch.export do not start at the root: do not change them
    (there, _), (here, _) = outer[-1], list(around.values())[-1]
    return {**around, **{key: (path.replace(there, here, 1), kind) for key, (path, kind) in inner[len(around) :]}}


def _memory(pairs: list[tuple[Any, Any]]) -> dict[int, set[int]]:
    """Return {id of a storage in a subgraph: ids of storages in the outer graph}, for one call of the subgraph.

    `pairs` are (value in the subgraph, same value in the outer graph). Other storages get new ids when they are looked up: all calls
    of a subgraph have the same example values, but share no memory.
    """
    found: dict[int, set[int]] = defaultdict(lambda: {next(FRESH)})
    for inner, outer in pairs:
        if isinstance(inner, torch.fx.Node) and isinstance(outer, torch.fx.Node):
            for storage in memory_of(inner):
                found[storage] = found.get(storage, set()) | memory_of(outer)
    return found


def _moved_attribute(module: torch.fx.GraphModule, body: torch.fx.GraphModule, node: torch.fx.Node) -> torch.fx.Node:
    """Store the constant or subgraph that `node` reads from `body` in the outer `module`. Return a new node that reads it there."""
    held: Any = body
    for part in str(node.target).split("."):
        held = getattr(held, part)
    name = str(node.target).replace(".", "_")
    while hasattr(module, name):
        name += "_"
    setattr(module, name, held)
    copy = module.graph.get_attr(name)
    copy.meta = dict(node.meta)
    return copy
