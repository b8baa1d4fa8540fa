"""Make activation checkpoints free memory in a graph that runs without a compiler.

Dynamo turns `torch.utils.checkpoint` into a higher-order op that only compilers honour. Run eagerly, that op keeps every activation, so the
pass calls `torch.utils.checkpoint` instead. In the captured graph, tensors that the model holds are operands of the op. A checkpoint may
write to such tensors, so the pass hands them over as the model does: as closed-over variables.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx
from torch.utils.checkpoint import checkpoint

from amprewrite.graphs.fx.captured import EditedGraph, Target
from amprewrite.graphs.fx.node_facts import BODIES, bodies, is_held, memory_of
from amprewrite.graphs.fx.run.first_run import checkpoint_with_state
from amprewrite.graphs.fx.uncaptured import enters_regions
from amprewrite.ir.pass_base import Pass


class RestoreCheckpoints(Pass[Target, EditedGraph]):
    needs = ("eager",)

    def __call__(self, target: Target, edited: EditedGraph) -> None:
        restore_checkpoints(edited.module)


def restore_checkpoints(module: torch.fx.GraphModule, held: Sequence[int] = ()) -> None:
    """Call `torch.utils.checkpoint.checkpoint` for each higher-order checkpoint op in the graph and its subgraphs.

    `held` are the positions of inputs that are tensors of the model, such as weights. Capture marks these inputs in the outer graph, but
    not all of them in subgraphs, so only calls for subgraphs give `held`.
    """
    found = [node for node in module.graph.nodes if node.op == "call_function" and getattr(node.target, "__name__", "") in BODIES]
    if not found:
        return
    inputs = module.graph.find_nodes(op="placeholder")
    own = {inputs[place] for place in held} | {node for node in module.graph.nodes if is_held(node)}
    memory = {storage for node in own for storage in memory_of(node)}
    for node in found:
        state = tuple(
            place
            for place, operand in enumerate(node.args[1:])
            if isinstance(operand, torch.fx.Node) and not memory.isdisjoint(memory_of(operand))
        )
        for body in bodies(node):
            restore_checkpoints(body, state)
        enters = {"enters": True} if any(enters_regions(body.graph) for body in bodies(node)) else {}
        node.target = checkpoint_with_state if state or enters else checkpoint
        node.kwargs = {**({"state": state, **enters} if state or enters else {}), "use_reentrant": False, **node.kwargs}
    module.recompile()
