"""Read the body graphs of higher-order ops: conditions, loops, scans, maps, checkpoints and custom autograd Functions.

A higher-order op calls its body graphs with tensors that it chooses: slices of scanned tensors, loop state, gradients. So a body graph
takes and returns fp32, in whatever format its ops run. Only the body graph of an activation checkpoint may return low results.

The backward of an autograd Function is user code. With a loss scale, the backward gets scaled gradients if its graph shows that it is
linear, so that values that it computes in half precision do not underflow. Any other backward gets unscaled gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
import torch.fx

from amprewrite.graphs.fx.node_facts import bodies, differentiable, example_value, held_value, is_checkpoint, memory_of, tensors, written
from amprewrite.tables.ops.op_lists import Trait, find_op, op_name, ops_with
from amprewrite.tables.vocabulary import Reason
from amprewrite.torch_internals.operators import HigherOrderOperator
from amprewrite.torch_internals.trees import tree_leaves

KEPT = {
    "wrap_with_autocast": "the model's own autocast region decides there",
    "flex_attention": "its graph is part of an attention kernel",
    "flex_attention_backward": "its graph is part of an attention kernel",
}
"""Higher-order ops whose body graphs are not rewritten, each with the reason."""
_NO_GRADIENT = ops_with(Trait.STOPS_GRADIENT) | ops_with(Trait.HAS_STEPS)
"""Ops that pass no gradient, or a gradient of zeros, to their operands."""


def inner_graphs(module: torch.fx.GraphModule) -> Iterator[tuple[torch.fx.Node, str]]:
    """Yield (node, attribute that holds the body graph) for every body graph of `module`. Checkpoints are left out."""
    for node in module.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator) or is_checkpoint(node):
            continue
        for held in _graphs(node):
            if isinstance(getattr(module, str(held.target), None), torch.fx.GraphModule):
                yield node, str(held.target)


def kept_high(node: torch.fx.Node, name: str, scaled: bool) -> Reason | None:
    """Return the reason why all ops of a body graph must stay fp32; None if they may run low. For training in fp16 or with a loss scale.

    `node` runs the body graph, which the attribute `name` holds. UNSCALED: the loss is scaled (`scaled`), but a hook or a nonlinear
    backward of the user gets gradients without the scale, and low ops would flush them to zero. UNSEEN: the body graph is the backward of
    an autograd Function, and no sample run shows the range of its values. The forward of an autograd Function may always run low, because
    no gradients pass through its ops.
    """
    if _of_function(node) and _is_forward(node, name):
        return None
    if scaled and has_own_backward(node):
        return Reason.UNSCALED
    return Reason.UNSEEN if _of_function(node) else None


def _of_function(node: torch.fx.Node) -> bool:
    return "autograd_function" in str(node.target)


def backward_of(node: torch.fx.Node) -> torch.fx.GraphModule | None:
    """Return the backward graph of the autograd Function that `node` calls; None if it calls none."""
    found = bodies(node) if isinstance(node.target, HigherOrderOperator) and _of_function(node) else []
    return found[1] if len(found) == 2 else None


def _is_forward(node: torch.fx.Node, name: str) -> bool:
    """True if the attribute `name` holds the forward of the autograd Function that `node` calls: the first body graph of `node`."""
    return bool(_graphs(node)) and name == str(_graphs(node)[0].target)


def has_own_backward(node: torch.fx.Node) -> bool:
    """True if a hook or a nonlinear backward of the user runs in the backward of `node`, and needs gradients without the loss scale."""
    if not isinstance(node.target, HigherOrderOperator):
        return False
    if "autograd_function" in node.target.name():
        return not _backward_is_linear(node)
    return any(has_own_backward(inner) or "register_hook" in str(inner.target) for body in bodies(node) for inner in body.graph.nodes)


def _backward_is_linear(node: torch.fx.Node) -> bool:
    """True if the backward of an autograd Function is linear in the gradients, which are its first inputs, before the saved values."""
    if len(bodies(node)) != 2 or node.kwargs.get("dirty_idx"):
        return False
    forward, backward = bodies(node)
    found = forward.graph.find_nodes(op="output")[0].args[0]
    if not isinstance(found, tuple | list) or len(found) != 2 or not isinstance(found[1], tuple | list):
        return False
    results = len(found[0]) if isinstance(found[0], tuple | list) else 1
    inputs = backward.graph.find_nodes(op="placeholder")
    return len(inputs) == results + len(found[1]) and _is_linear(backward.graph, set(inputs[:results]))


def _is_linear(graph: torch.fx.Graph, scaled: set[torch.fx.Node]) -> bool:
    """True if multiplying the nodes `scaled` by a factor multiplies all results by that factor. An unknown op counts as nonlinear."""
    zeros: set[torch.fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            return all(leaf is None or leaf in scaled | zeros for leaf in tree_leaves(node.args))
        targets = set(written(node))
        if scaled.isdisjoint(node.all_input_nodes):
            memory = {storage for target in targets for storage in memory_of(target)}
            if any(not memory.isdisjoint(memory_of(zero)) for zero in zeros):  # the op may overwrite zeros, also through a view
                return False
            zeros |= {node} if op_name(node.target) in ops_with(Trait.MAKES_ZEROS) else set()
        elif tensors(example_value(node)) or targets:
            if not targets <= scaled or not _hands_on_factor(node, scaled, zeros):
                return False
            scaled.add(node)
        elif not isinstance(example_value(node), int | torch.SymInt | torch.Size):
            return False  # a number other than a size, such as a float from item(), may depend on the factor
    return False


def _hands_on_factor(node: torch.fx.Node, scaled: set[torch.fx.Node], zeros: set[torch.fx.Node]) -> bool:
    """True if multiplying the nodes `scaled` by a factor multiplies the result of `node` by that factor.

    `zeros` are the nodes whose values are all zero: multiplying them by a factor changes nothing.
    """
    row, leaves = find_op(op_name(node.target)), tree_leaves((node.args, node.kwargs))
    floats = [leaf for leaf in leaves if isinstance(leaf, torch.fx.Node) and any(map(differentiable, tensors(example_value(leaf))))]
    if row is None or not all(map(differentiable, tensors(example_value(node)))) or node.kwargs.get("rounding_mode"):
        return False
    if Trait.LINEAR_IN_ALL in row.traits:
        summands = [*node.args, *(given for name, given in node.kwargs.items() if name != "alpha")]
        if any(not tensors(example_value(each)) if isinstance(each, torch.fx.Node) else each for each in summands):
            return False  # the op adds a number that may differ from zero, so it is not linear
    if row.traits & {Trait.LINEAR_IN_ALL, Trait.JOINS}:
        return all(leaf in scaled or leaf in zeros for leaf in floats)
    if sum(leaf in scaled for leaf in floats) != 1:
        return False
    if Trait.LINEAR_IN_EACH in row.traits:
        return len(floats) <= 2
    return Trait.LINEAR_IN_FIRST in row.traits and bool(node.args) and node.args[0] in scaled


def leads_nowhere(node: torch.fx.Node, name: str, body: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Return the ops of the body graph `body` that have no effect on a result with a gradient, or on the state for a loop's next iteration.

    The ops should stay fp32, because autograd gives them gradients of zeros, and zero times an infinity is NaN. `node` runs `body`, which
    the attribute `name` holds. For an autograd Function, saved values do not count as results of the forward, and its backward has set().
    """
    given = body.graph.find_nodes(op="output")[0].args[0]
    if _of_function(node) and isinstance(given, tuple | list):
        if not _is_forward(node, name):
            return set()
        given = given[0] if isinstance(given[0], tuple | list) else given[:1]
    learning = _learning(node.graph)
    readers = [user for user in node.users if user in learning]
    if not isinstance(given, tuple | list) or any(user.target is not operator.getitem for user in readers):
        return set()
    read = {*range(_carried(node, len(given))), *(user.args[1] for user in readers)}
    reached = {leaf for place, leaf in enumerate(given) if place in read and isinstance(leaf, torch.fx.Node)}
    for inner in reversed(body.graph.nodes):
        if inner in reached or not reached.isdisjoint(written(inner)):
            reached.update((inner, *inner.all_input_nodes))
    return {inner for inner in body.graph.nodes if inner not in reached and inner.op.startswith("call")}


def _learning(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes that a gradient may reach in a backward, from a result of `graph` or from a value that the graph writes."""
    found: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        passes = op_name(node.target) not in _NO_GRADIENT and any(map(differentiable, tensors(example_value(node))))
        if node.op == "output" or written(node) or (passes and not found.isdisjoint(node.users)):
            found.add(node)
    return found


def _carried(node: torch.fx.Node, results: int) -> int:
    """Return how many results of the body of `node`, counted from the first, are loop state that the next iteration may read.

    For a scan, return the number of its state tensors; for a condition, map or checkpoint, 0. For any other op, all `results` may be state.
    """
    name = op_name(node.target)
    if name == "scan" and len(node.args) > 1 and isinstance(node.args[1], tuple | list):
        return len(node.args[1])
    return 0 if name in ("cond", "map_impl", "tag_activation_checkpoint") else results


def operands(node: torch.fx.Node, body: torch.fx.GraphModule) -> list[tuple[torch.fx.Node, torch.fx.Node]]:
    """Return pairs (input of `body`, outer value) for the inputs of the body graph to which `node` passes an outer value unchanged."""
    placeholders = body.graph.find_nodes(op="placeholder")
    held = set(_graphs(node))
    outer = [leaf for leaf in tree_leaves(node.args) if isinstance(leaf, torch.fx.Node) and leaf not in held]
    # match from the end, because `cond` has a predicate before the operands that it passes to its body graphs
    pairs = zip(reversed(placeholders), reversed(outer), strict=False)
    return [(inner, given) for inner, given in pairs if _shape(inner) == _shape(given) is not None]


def _graphs(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the get_attr nodes among the arguments of `node` that hold body graphs, without the nodes that hold weights."""
    leaves = (leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, torch.fx.Node) and leaf.op == "get_attr")
    return [leaf for leaf in leaves if isinstance(held_value(leaf), torch.fx.GraphModule)]


def _shape(node: torch.fx.Node) -> tuple[object, ...] | None:
    value = example_value(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None
