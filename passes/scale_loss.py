"""Build loss scaling into a training graph: inside it gradients are scaled, outside nobody ever sees the scale.

1. The graph takes two further inputs, the scale of this forward and its inverse: 0-dim fp32 tensors.
2. Every floating result passes `scale_gradient`: its gradient enters times the scale.
3. Every low copy of a floating input becomes `cast_in`: its gradient leaves in fp32, times the inverse. Small
   weights used close together share one autograd node.
4. Every other use of a floating input reads it through one `unscale_gradient`; small fp32 weights share nodes there too.
5. A hook on a tensor inside sees its gradient unscaled.

Regions compose, since each multiplies and divides by itself; so graph breaks, other models and penalties stay right.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.fx

from amprewrite.errors import PassError
from amprewrite.frontends.fx_facts import GRAD_SWITCHES, NODE, example_value, hint, tensors
from amprewrite.oplists import op_name
from amprewrite.pad_ops import pad_cast
from amprewrite.pass_base import Pass
from amprewrite.passes.insert_casts import CAST
from amprewrite.program import Program
from amprewrite.scale_ops import BATCH, BATCH_ELSEWHERE, cast_batches, cast_in, cast_in_many, scale_gradient, unscale_gradient
from amprewrite.tensor_hooks import hooked, hooked_unscaled

SCALE, INVERSE = "amprewrite_scale", "amprewrite_inverse"


class ScaleLoss(Pass):
    name = "scale-loss"

    def requires(self, program: Program) -> None:
        if program.scale_loss and program.module is None:
            raise PassError("scale-loss edits an fx graph, and this program has none")

    def call(self, program: Program) -> bool:
        if not program.scale_loss:
            return False
        assert program.module is not None
        weights = {program.fx_nodes[node.name] for node in program.graph if node.role == "parameter"}
        return scale_loss(program.module.graph, weights)


def differentiable(value: Any) -> bool:
    """Whether a gradient may cross the border here.

    Capture's `requires_grad` is no guide: it is lost behind data-dependent shapes, and a border that scales on one side only
    is silently wrong. So every floating tensor passes an identity, which looks at the real tensor.
    """
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def scale_loss(graph: torch.fx.Graph, weights: set[torch.fx.Node]) -> bool:
    """Edit `graph`, in which `weights` are the parameters; False where nothing is differentiable (the two inputs come all the same)."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    results = [node for node in output.all_input_nodes if differentiable(example_value(node))]
    sources = [node for node in inputs if differentiable(example_value(node))]
    like = next((t for node in (*results, *sources, *graph.nodes) for t in tensors(example_value(node))), torch.empty(()))
    scale, inverse = _scale_inputs(graph, inputs, like)
    with graph.inserting_before(output):
        for result in results:  # before the inputs: one that is handed on as a result must cross both borders
            entered = graph.call_function(scale_gradient, (result, scale))
            entered.meta = _facts(result)
            output.replace_input_with(result, entered)
    for node in graph.find_nodes(op="call_function", target=hooked):
        node.target, node.args = hooked_unscaled, (*node.args[:2], scale, inverse, *node.args[2:])
    _leave_by_casts(graph, sources, inverse, like.device.type)
    _leave_elsewhere(graph, sources, weights, inverse)
    return bool(results or sources)


def _scale_inputs(graph: torch.fx.Graph, inputs: list[torch.fx.Node], like: torch.Tensor) -> tuple[torch.fx.Node, torch.fx.Node]:
    made = []
    last = inputs[-1] if inputs else None
    for name in (SCALE, INVERSE):
        with graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes))):
            last = graph.placeholder(name)
        last.meta["example_value"] = like.detach().new_empty((), dtype=torch.float32)
        made.append(last)
    return made[0], made[1]


def _facts(node: torch.fx.Node) -> dict[str, Any]:
    kept = ("example_value", "val", "nn_module_stack", "stack_trace", NODE)
    return {key: value for key, value in node.meta.items() if key in kept}


def _leave_by_casts(graph: torch.fx.Graph, sources: list[torch.fx.Node], inverse: torch.fx.Node, device: str) -> None:
    known = set(sources)
    casts = [node for node in graph.nodes if CAST in node.meta and node.target == "to" and node.args[0] in known]
    for cast in [node for node in graph.nodes if node.target is pad_cast and node.args[0] in known]:
        cast.args = (*cast.args, inverse)
    batches = []
    limits = BATCH.get(device, BATCH_ELSEWHERE)
    for weights in by_grad_mode(graph, [cast for cast in casts if cast.meta["weight"]]):
        batches += [[weights[index] for index in batch] for batch in cast_batches([_numel(cast.args[0]) for cast in weights], *limits)]
    for chosen in (*batches, *([cast] for cast in casts if not cast.meta["weight"])):
        dtypes = {cast.args[1] for cast in chosen}
        if len(chosen) == 1 or len(dtypes) > 1:
            for cast in chosen:
                cast.op, cast.target, cast.args = "call_function", cast_in, (*cast.args, inverse)
            continue
        with graph.inserting_before(chosen[0]):
            many = graph.call_function(cast_in_many, (tuple(cast.args[0] for cast in chosen), dtypes.pop(), inverse))
            many.meta = {CAST: chosen[0].meta[CAST], "weight": True}
            copies = [graph.call_function(operator.getitem, (many, place)) for place in range(len(chosen))]
        for copy, cast in zip(copies, chosen, strict=True):
            copy.meta = dict(cast.meta)
            cast.replace_all_uses_with(copy)
            graph.erase_node(cast)


def by_grad_mode(graph: torch.fx.Graph, casts: list[torch.fx.Node]) -> list[list[torch.fx.Node]]:
    """The casts between one switch of the gradient mode and the next: casts under no_grad must take no other along."""
    wanted = set(casts)
    found: list[list[torch.fx.Node]] = [[]]
    for node in graph.nodes:
        if op_name(node.target) in GRAD_SWITCHES:
            found.append([])
        elif node in wanted:
            found[-1].append(node)
    return found


def _leave_elsewhere(graph: torch.fx.Graph, sources: list[torch.fx.Node], weights: set[torch.fx.Node], inverse: torch.fx.Node) -> None:
    crossing = {cast_in, cast_in_many, pad_cast}
    readers = {source: [user for user in source.users if user.target not in crossing] for source in sources}
    read = [source for source in sources if readers[source]]
    shared = [source for source in read if source in weights and example_value(source).dtype == torch.float32]
    with graph.inserting_after(inverse):
        for batch in cast_batches([_numel(source) for source in shared]):
            chosen = [shared[index] for index in batch]
            if len(chosen) == 1:
                continue
            many = graph.call_function(cast_in_many, (tuple(chosen), torch.float32, inverse))
            many.meta = {"weight": True}
            with graph.inserting_after(many):
                for place, source in reversed(list(enumerate(chosen))):
                    _read_through(readers.pop(source), source, graph.call_function(operator.getitem, (many, place)))
        for source in read:
            if source in readers:
                _read_through(readers[source], source, graph.call_function(unscale_gradient, (source, inverse)))


def _read_through(readers: list[torch.fx.Node], source: torch.fx.Node, unscaled: torch.fx.Node) -> None:
    unscaled.meta = _facts(source)
    for reader in readers:
        reader.replace_input_with(source, unscaled)


def _numel(node: Any) -> int:
    return math.prod(hint(size) for size in example_value(node).shape)
