"""Insert the planned casts into the fx graph, and set the dtype arguments of each node to the format that the plan gives it.

1. Each planned cast becomes one copy before the first of its users. All its users read this copy. If only the graph's output reads it, the
   copy is made before the model switches gradients off. If a torch.func transform reads a value from outside, the copy is made outside.
2. If a node is low, its fp32 dtype arguments become bf16 or fp16. Where the plan says so, constants beyond the range become ±max.
3. Ops that take their dtype from another tensor (type_as, to(other), zeros_like) get the dtype as an argument.

Op names hard-coded in this pass: the conversions `to`, `type_as` and `float`, because each gives its dtype in a different way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.node_facts import (
    CONVERSIONS,
    GRAD_SWITCHES,
    LEAVES,
    MEMORY,
    SET_GRAD,
    TAKES_SHAPE_ONLY,
    example_value,
    outside,
    tensors,
    transform_openings,
)
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.tables.errors import PlanError
from amprewrite.tables.formats import FORMATS, FP32, Format, is_far
from amprewrite.tables.formats import saturate as saturate_value
from amprewrite.tables.ops.op_lists import op_name
from amprewrite.tables.vocabulary import Colour, Edit
from amprewrite.torch_internals.trees import tree_leaves

CAST = "amprewrite_cast"
"""Key in a node's meta that marks the casts that this pass inserted."""


class InsertCasts(Pass[RegionPlan, EditedGraph]):
    def __call__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        graph = edited.module.graph
        clamped = plan.edited(Edit.CLAMP_CONSTANTS)
        for planned in plan.nodes:
            if planned.colour is not Colour.PLAIN and planned.role == "op":
                aim_dtype(edited.nodes[planned.name], FORMATS[planned.dtype], planned.name in clamped)
        openings = transform_openings(graph)
        for cast in plan.casts:
            value = edited.nodes[cast.value]
            users = sorted(edited.nodes[name] for name in cast.users)
            place = outside(openings, value, leave_with_gradients(value, users[0]))
            insert_cast(graph, value, FORMATS[cast.to], users, cast.saturate, cast.weight, place)


def insert_cast(
    graph: torch.fx.Graph, value: torch.fx.Node, to: Format, users: list[torch.fx.Node], saturate: bool, weight: bool,
    place: torch.fx.Node,
) -> torch.fx.Node:  # fmt: skip
    """Insert a copy of `value` in format `to` before `place`, let `users` read the copy instead of `value`, and return the copy.

    With `saturate`, finite numbers beyond the range become ±max. `weight` says that `value` is a parameter. Raises PlanError if a
    user does not read `value`.
    """
    with graph.inserting_before(place):
        source = value
        if saturate:
            source = graph.call_function(saturate_value, (value, to.max))
            source.meta = dict(value.meta)
            source.meta.pop(LEAVES, None)
            source.meta.pop(MEMORY, None)
        copy = graph.call_method("to", (source, to.dtype))
    copy.meta = {**value.meta, CAST: to.name, "weight": weight}
    if "nn_module_stack" in place.meta:  # torch.export.unflatten fails if an op of another module stands between the ops of a module
        copy.meta["nn_module_stack"] = place.meta["nn_module_stack"]
    copy.meta.pop("grapharg", None)
    copy.meta.pop(LEAVES, None)
    copy.meta.pop(MEMORY, None)
    for user in users:
        if value not in user.all_input_nodes:
            raise PlanError(f"the plan casts {value.name} for {user.name}, which does not read it; make the plan anew")
        user.replace_input_with(value, copy)
    return copy


def leave_with_gradients(value: torch.fx.Node, user: torch.fx.Node) -> torch.fx.Node:
    """Return the node before which to insert a copy of `value` for `user`, so that the copy records gradients if `value` does.

    This is `user`, except if `user` is the output of the graph and the grad mode changes after `value`. If the first change switches
    gradients off, or enters or ends inference mode, return the node that makes it.
    """
    if user.op != "output":
        return user
    place, node = user, user.prev
    while node is not value and node.op != "root":
        if op_name(node.target) in GRAD_SWITCHES:
            turned_on = op_name(node.target) in SET_GRAD and bool(node.args[0])
            place = user if turned_on else node
        node = node.prev
    return place


def aim_dtype(node: torch.fx.Node, fmt: Format, clamps: bool) -> None:
    """Set the dtype arguments of `node` to `fmt`. If the node takes its dtype from another tensor, it gets a dtype argument instead. With
    `clamps`, constants beyond the range become ±max."""
    op = op_name(node.target)
    if op in CONVERSIONS:
        _aim_conversion(node, op, fmt)
    elif op in TAKES_SHAPE_ONLY and node.kwargs.get("dtype") is None:
        node.kwargs = {**node.kwargs, "dtype": fmt.dtype}
    if fmt is FP32 or not (clamps or torch.float32 in tree_leaves((node.args, node.kwargs))):
        return

    def fit(leaf: Any) -> Any:
        if leaf is torch.float32:
            return fmt.dtype
        return math.copysign(fmt.max, leaf) if clamps and is_far(leaf, fmt) else leaf

    node.args = map_aggregate(node.args, fit)  # type: ignore[assignment]
    node.kwargs = map_aggregate(node.kwargs, fit)  # type: ignore[assignment]


def _aim_conversion(node: torch.fx.Node, op: str, fmt: Format) -> None:
    """Turn a conversion that takes its dtype from its name (`float`) or from a tensor (`type_as`) into `to` with the dtype of `fmt`."""
    others = [a for a in (*node.args[1:], *node.kwargs.values()) if isinstance(a, torch.fx.Node)]
    if op == "float" or (op == "type_as" and others):
        node.op, node.target, node.args, node.kwargs = "call_method", "to", (node.args[0], fmt.dtype), {}
    elif op == "to" and others and tensors(example_value(others[0])):
        device = tensors(example_value(others[0]))[0].device
        node.op, node.target, node.args, node.kwargs = "call_method", "to", (node.args[0], device, fmt.dtype), {}
