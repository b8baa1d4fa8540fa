"""Build loss scaling into a training graph: gradients are scaled inside it, and unscaled wherever the user can see them.

1. The graph gets two more inputs, the scale of this forward and its inverse: 0-dim fp32 tensors, on an accelerator if the graph uses one.
2. Some nodes of the graph count as outside: their gradients are not scaled. These are inputs, values that the graph returns itself and not
   as a copy (`graphs/fx/read/leaving.py`), and ops whose backward is user code. In-place writes to outside values, hooks on them, and fp32
   ops that only lead from them to results (such as a loss) are outside, too. So is an op with hooks that returns an outside operand itself.
3. Where a value from inside is read outside, a `scale_gradient` is inserted. In the backward it multiplies the gradient by the scale.
4. Where a value from outside is read inside, its cast becomes a `cast_in`, or an `unscale_gradient` is inserted. In the backward both
   multiply the gradient by the inverse, in fp32. One `unscale_gradient` serves all readers of a value, but if the value is written in
   place, readers before and after the write have separate ones.
5. A hook on a tensor inside is called with the unscaled gradient.
6. An activation checkpoint may count as outside. Its body is then scaled as a separate graph, with fp32 inputs and results, and takes the
   scale as an input.

Each graph multiplies and divides by its own scale, so that gradients between graphs are unscaled. Therefore graph breaks, other models and
gradient penalties give right results.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.node_facts import (
    GRAD_SWITCHES,
    LEAVES,
    NODE,
    RETURNED,
    bodies,
    differentiable,
    example_value,
    is_checkpoint,
    is_opaque,
    memory_of,
    tensors,
    transformed_nodes,
    written,
    written_memory,
)
from amprewrite.graphs.fx.ops.pad_ops import linked_copy, pad_cast
from amprewrite.graphs.fx.ops.scale_ops import cast_in, hooked, hooked_unscaled, scale_gradient, unscale_gradient
from amprewrite.graphs.fx.read.aliasing import same_tensor
from amprewrite.graphs.fx.read.bodies import has_own_backward
from amprewrite.graphs.fx.read.leaving import read_results
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes.apply.insert_casts import CAST, leave_with_gradients
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.tables.vocabulary import Colour

Node = torch.fx.Node
SCALE, INVERSE = "amprewrite_scale", "amprewrite_inverse"


class ScaleLoss(Pass[RegionPlan, EditedGraph]):
    needs = ("scales_loss",)

    def __call__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        weights = {edited.nodes[node.name] for node in plan.nodes if node.role == "parameter"}
        high = {edited.nodes[node.name] for node in plan.nodes if node.colour is not Colour.LOW}
        scale_loss(edited.module.graph, weights, high)


def scale_loss(graph: torch.fx.Graph, weights: set[Node], high: set[Node]) -> None:
    """Edit `graph` so that its backward multiplies gradients that enter it by the loss scale, and gradients that leave it by the inverse.

    `weights` are the graph's parameters, `high` the nodes not in the low format. The scale and its inverse become the last two inputs of
    the graph, even if no input or result is differentiable.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in graph.nodes if node.op == "output")
    results = [node for node in output.all_input_nodes if differentiable(example_value(node))]
    sources = [node for node in inputs if differentiable(example_value(node))]
    values = [t for node in (*results, *sources, *graph.nodes) for t in tensors(example_value(node))]
    # Keep the scale on an accelerator if the graph uses one: kernels would have to wait for a scale that is copied from the CPU.
    like = next((t for t in values if t.device.type != "cpu"), values[0] if values else torch.empty((), device="cpu"))
    scale, inverse = _scale_inputs(graph, inputs, like)
    outside = nodes_outside(graph, high)
    for node in graph.nodes:
        if scales_itself(node):
            node.args = (*node.args, scale, inverse)
    _enter(graph, outside, scale)
    for node in graph.find_nodes(op="call_function", target=hooked):
        if node not in outside:
            node.target, node.args = hooked_unscaled, (*node.args[:2], scale, inverse, *node.args[2:])
    crossed = [node for node in graph.nodes if node in outside - {scale, inverse} and differentiable(example_value(node))]
    _leave_by_casts(graph, crossed, inverse)
    readers = {node: [user for user in node.users if user not in outside and _crosses(user)] for node in crossed}
    memory = written_memory(graph)
    still = [node for node in sources if not memory_of(node) & memory]
    _leave_elsewhere(graph, {node: readers[node] for node in still}, weights, inverse)
    _leave_at_readers(graph, {node: readers[node] for node in crossed if node not in set(still)}, outside, inverse)


# -- nodes with unscaled gradients ---------------------------------------------------------------
def nodes_outside(graph: torch.fx.Graph, high: set[Node]) -> set[Node]:
    """Return the nodes whose gradients are not scaled, such as inputs and returned values (rule 2 of this file).

    `high` are the nodes not in the low format.
    """
    found: set[Node] = set()
    returned = set(next(node for node in graph.nodes if node.op == "output").all_input_nodes)
    given_back = _given_back_with_hooks(graph)
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        part = node.target is operator.getitem and first in found and not isinstance(example_value(first), torch.Tensor)  # type: ignore[arg-type]
        hook = (node.target is hooked and first in found) or given_back.get(node) in found
        writes = any(target in found and differentiable(example_value(target)) for target in written(node))
        apart = has_own_backward(node) or _gives_what_it_reads(node, returned) or scales_itself(node)
        if node.op == "placeholder" or LEAVES in node.meta or apart or part or hook or writes:
            found.add(node)
    return found | _ends(graph, found, high)


def _given_back_with_hooks(graph: torch.fx.Graph) -> dict[Node, Node]:
    """Return {op: operand} for each op that returns its operand itself, as `x.contiguous()` may, and whose result has hooks.

    Operand and result are one tensor object, so the hooks are on the operand as well.
    """
    found: dict[Node, Node] = {}
    for hook in graph.find_nodes(op="call_function", target=hooked):
        (inner,) = hook.all_input_nodes[:1]
        while (given := same_tensor(inner)) is not None and given in inner.all_input_nodes:
            found[inner] = given
            inner = given
    return found


def scales_itself(node: Node) -> bool:
    """True if `node` is a checkpoint whose body graph scales its own gradients. Gradients at its inputs and results are unscaled."""
    inputs = [each.target for body in bodies(node) for each in body.graph.find_nodes(op="placeholder")] if is_checkpoint(node) else []
    return SCALE in inputs


def _gives_what_it_reads(node: Node, returned: set[Node]) -> bool:
    """True if `node` is a checkpoint, the graph returns a result of it, and ops inside the checkpoint read values that it returns.

    Nothing can then scale the gradients between such a value and these ops, so the gradients of the whole checkpoint stay unscaled.
    `returned` are the results of the graph.
    """
    leaves = any(user in returned or LEAVES in reader.meta for user in node.users for reader in (user, *user.users))
    return leaves and is_checkpoint(node) and _reads_results(node)


def _reads_results(node: Node) -> bool:
    """True if an op in the body graph of a checkpoint, or of a checkpoint nested in it, reads a value that this body graph returns."""
    for body in bodies(node):
        inner = (each for each in body.graph.nodes if is_checkpoint(each))
        if any(True for _ in read_results(body.graph)) or any(_reads_results(each) for each in inner):
            return True
    return False


def _ends(graph: torch.fx.Graph, outside: set[Node], high: set[Node]) -> set[Node]:
    """Return further fp32 ops whose gradients can stay unscaled, for example a loss of logits that the graph also returns.

    These ops exchange gradients only with each other, with `outside` (the nodes with unscaled gradients) and with the output of the graph.
    `high` are the nodes not in the low format.
    """
    apart = transformed_nodes(graph)
    made = {node for node in outside if node.op != "placeholder"}
    found: set[Node] = set()
    for node in graph.nodes:
        plain = node in high and node not in outside and node not in apart and node.target is not hooked
        if plain and node.op != "output" and not is_opaque(node) and not written(node):
            fed = _fed(node)
            if all(feeder in outside or feeder in found for feeder in fed) and any(f in made or f in found for f in fed):
                found.add(node)
    while True:
        ends = {node for node in found if _ends_outside(node, outside | found)}
        if ends == found:
            return found
        found = ends


def _ends_outside(node: Node, outside: set[Node]) -> bool:
    """True if `node` gets gradients only from `outside` nodes, whose gradients are unscaled, and passes gradients only to such nodes."""
    readers = all(user in outside or user.op == "output" or not _crosses(user) for user in node.users)
    return readers and all(feeder in outside for feeder in _fed(node))


def _fed(node: Node) -> list[Node]:
    """Return the operands of `node` that may get gradients: their values contain floating-point or complex tensors."""
    return [feeder for feeder in node.all_input_nodes if any(differentiable(t) for t in tensors(example_value(feeder)))]


def _crosses(reader: Node) -> bool:
    """True if a scaled gradient may flow back through `reader`. False, for example, for comparisons, and for casts that unscale it."""
    if reader.target in (cast_in, pad_cast, linked_copy):
        return False
    floats = any(differentiable(t) for t in tensors(example_value(reader)))
    return reader.op != "output" and (floats or bool(written(reader)) or is_opaque(reader) or CAST in reader.meta)


# -- scale gradients that enter, unscale gradients that leave -----------------------------------
def _enter(graph: torch.fx.Graph, outside: set[Node], scale: Node) -> None:
    """Insert a `scale_gradient` wherever the output, or a node with unscaled gradients (`outside`), reads a value with scaled gradients."""
    for node in list(graph.nodes):
        if node.op == "placeholder" or not (node in outside or node.op == "output"):
            continue
        for value in node.all_input_nodes:
            if value in outside or value.op == "get_attr" or not differentiable(example_value(value)):
                continue
            if node.meta.get(LEAVES) == RETURNED:
                node.op, node.target, node.args = "call_function", scale_gradient, (value, scale)
                continue
            with graph.inserting_before(leave_with_gradients(value, node)):
                wide = value
                if node.op != "output" and CAST not in value.meta:
                    wide = graph.call_method("to", (value, example_value(value).dtype))
                    wide.meta = _facts(value)
                entered = graph.call_function(scale_gradient, (wide, scale))
                entered.meta = _facts(value)
            node.replace_input_with(value, entered)


def _scale_inputs(graph: torch.fx.Graph, inputs: list[Node], like: torch.Tensor) -> tuple[Node, Node]:
    made = []
    last = inputs[-1] if inputs else None
    for name in (SCALE, INVERSE):
        with graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes))):
            last = graph.placeholder(name)
        last.meta["example_value"] = like.detach().new_empty((), dtype=torch.float32)
        made.append(last)
    return made[0], made[1]


def _facts(node: Node) -> dict[str, Any]:
    kept = ("example_value", "val", "nn_module_stack", "stack_trace", NODE)
    return {key: value for key, value in node.meta.items() if key in kept}


def _leave_by_casts(graph: torch.fx.Graph, sources: list[Node], inverse: Node) -> None:
    """Let the casts that the rewrite inserted for `sources` multiply gradients by `inverse`, the inverse of the loss scale.

    `sources` are values whose gradients must be unscaled, such as weights. `inverse` is an input of the graph.
    """
    known = set(sources)
    for cast in list(graph.nodes):
        if cast.target in (pad_cast, linked_copy) and cast.args[0] in known:
            cast.args = (*cast.args, inverse)
        elif CAST in cast.meta and cast.target == "to" and cast.args[0] in known:
            cast.op, cast.target, cast.args = "call_function", cast_in, (*cast.args, inverse)


def _leave_elsewhere(graph: torch.fx.Graph, readers: dict[Node, list[Node]], weights: set[Node], inverse: Node) -> None:
    """For each input in `readers`, insert one `unscale_gradient` at the start of the graph, and let the nodes `readers[input]` read it.

    One node serves all readers, because no op writes to the memory of these inputs. `weights` are the parameters, `inverse` is the graph's
    input for the inverse of the loss scale.
    """
    with graph.inserting_after(inverse):
        for source in reversed([source for source in readers if readers[source]]):
            unscaled = graph.call_function(unscale_gradient, (source, inverse))
            _read_through(readers[source], source, unscaled)
            unscaled.meta["weight"] = source in weights


def _leave_at_readers(graph: torch.fx.Graph, readers: dict[Node, list[Node]], outside: set[Node], inverse: Node) -> None:
    """Insert an `unscale_gradient` between each value and its readers. After an in-place write or grad mode change, readers get a new one.

    `readers` is {value with unscaled gradients: its readers with scaled gradients}. `outside` are all nodes with unscaled gradients, and
    `inverse` is the graph's input for the inverse of the loss scale.
    """
    moments = dict(_moments(graph, outside))
    for source, users in readers.items():
        made: dict[tuple[int, int], Node] = {}
        for reader in sorted(users):
            place, moment = moments[reader]
            if moment not in made:
                with graph.inserting_before(place):
                    made[moment] = graph.call_function(unscale_gradient, (source, inverse))
            _read_through([reader], source, made[moment])


def _moments(graph: torch.fx.Graph, outside: set[Node]) -> Iterator[tuple[Node, tuple[Node, tuple[int, int]]]]:
    """Yield (node, (place, moment)) for each node: where to insert an `unscale_gradient` for the node, and which nodes may share it.

    It is inserted before `place`: the node itself, or the first node of the torch.func transform around it. `moment` is (number of in-place
    ops in `outside`, number of grad mode changes) before the node. Two readers of a value may share one if their moments are equal.
    """
    apart = transformed_nodes(graph)
    writes = switches = 0
    place = None
    for node in graph.nodes:
        place = (place or node) if node in apart else None
        yield node, (place or node, (writes, switches))
        writes += node in outside and bool(written(node))
        switches += op_name(node.target) in GRAD_SWITCHES


def _read_through(readers: list[Node], source: Node, unscaled: Node) -> None:
    unscaled.meta = _facts(source)
    for reader in readers:
        reader.replace_input_with(source, unscaled)
