"""Let the backward of a user's autograd Function record gradients if its caller differentiates the backward, as in eager mode.

Dynamo captures such a backward with gradients disabled, so that second derivatives silently lack the terms of saved tensors.

    before   _set_grad_enabled(False); mul = g * 3; pow = x ** 2; mul_1 = mul * pow; _set_grad_enabled(True)
    after    mul = g * 3; pow = x ** 2; mul_1 = mul * pow

1. Erase the calls that set the grad mode, which Dynamo put around the graph of the backward.
2. Ops that the author runs without gradients, under `no_grad` or `once_differentiable`, still run without. The graph does not show which
   ops these are, so the pass reads the source code (`graphs/fx/read/names.py`).
3. Ops that the author runs with gradients, under `enable_grad`, still run with gradients. If the author's code sets the grad mode of every
   op in this way, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Reading
from amprewrite.graphs.fx.node_facts import SET_GRAD, bodies
from amprewrite.graphs.fx.read.bodies import backward_of
from amprewrite.graphs.fx.read.names import runs_without_grad
from amprewrite.ir.pass_base import Pass
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.torch_internals.dispatch import set_grad_enabled


class FreeBackwards(Pass[Reading, EditedGraph]):
    needs = ("higher_order",)

    def __call__(self, reading: Reading, edited: EditedGraph) -> None:
        for call, body in list(_backwards(edited.module)):
            _free(body, call)


def _backwards(module: torch.fx.GraphModule) -> Iterator[tuple[torch.fx.Node, torch.fx.GraphModule]]:
    """Yield the calls of autograd Functions in a graph and its subgraphs, each with the graph of its backward."""
    for node in module.graph.nodes:
        backward = backward_of(node)
        if backward is not None:
            yield node, backward
        for body in bodies(node):
            yield from _backwards(body)


def _free(body: torch.fx.GraphModule, call: torch.fx.Node) -> None:
    """Remove the grad mode switches that Dynamo put around `body`, the backward graph of the autograd Function that `call` runs.

    An op whose grad mode the author's code sets keeps that mode. Do nothing if `body` has no such switches, or if the code sets the
    grad mode of every op.
    """
    ops = [node for node in body.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    switches = [node for node in ops if op_name(node.target) in SET_GRAD]
    if not switches or switches[0] is not ops[0] or switches[-1] is not ops[-1] or switches[0].args[0] or not switches[-1].args[0]:
        return
    modes = dict(_modes(ops, call))
    if all(mode is not None for mode in modes.values()):
        return
    for node in switches:
        body.graph.erase_node(node)
    _switch(body.graph, modes)
    body.recompile()


def _modes(ops: list[torch.fx.Node], call: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, bool | None]]:
    """Yield each op with its grad mode: True or False if the author's code fixes the mode, None if the mode is the caller's."""
    enabled = False
    for node in ops:
        if op_name(node.target) in SET_GRAD:
            enabled = bool(node.args[0])
        else:
            yield node, True if enabled else False if runs_without_grad(node.stack_trace, call.stack_trace) else None


def _switch(graph: torch.fx.Graph, modes: dict[torch.fx.Node, bool | None]) -> None:
    """Insert calls that give each op its grad mode, and at the end restore the mode in which the graph was entered.

    `modes` is {op: True, False, or None for the mode in which the graph was entered}.
    """
    ops = list(modes)
    if set(modes.values()) == {None}:
        return
    with graph.inserting_before(ops[0]):
        callers = graph.call_function(torch.is_grad_enabled)
    before = None
    for node, mode in modes.items():
        if mode is not before:
            with graph.inserting_before(node):
                graph.call_function(set_grad_enabled, (callers if mode is None else mode,))
        before = mode
    if before is not None:
        with graph.inserting_after(ops[-1]):
            graph.call_function(set_grad_enabled, (callers,))
