"""Without a compiler, cast small weights and unscale their gradients in groups, to save kernel launches and Python overhead.

1. A `cross_together` node makes the low copies of a group of weights in one launch, and their fp32 gradients in another. With a loss scale
   it also unscales these gradients. Weights that the graph reads in fp32 have groups whose node only unscales gradients. On a CPU, where a
   cast is no kernel launch, casts stay where they are, and the node only unscales, in place, the fp32 gradients that come from these casts.
2. The node of a group runs before the first op that reads a weight of the group. In backward each gradient waits for the last one of the
   group, so a group has at most ELEMENTS elements. A larger weight keeps its own node, because a launch is cheap next to its cast.
3. All weights of a group are on one device, since autograd runs a node on one device.
4. No call that switches gradients on or off runs between the node of a group and the first readers of its weights. A weight that the
   graph writes in place joins no group.

    before   low = w.to(bfloat16)                              after   low, other = cross_together(bfloat16, None, w, v)
             other = v.to(bfloat16)

On an H200, kernels took 14.1 ms in a step of BERT, of which single casts took 1.6 ms. In hand-written O2 code, grouped casts took about
0.4 ms.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph, Target
from amprewrite.graphs.fx.node_facts import GRAD_SWITCHES, example_value, outside, transform_openings
from amprewrite.graphs.fx.ops.many_weights import SHARES, cross_together
from amprewrite.graphs.fx.ops.scale_ops import cast_in, unscale_gradient
from amprewrite.ir.pass_base import Pass
from amprewrite.passes.apply.scale_loss import INVERSE
from amprewrite.passes.lower.hoist_weight_casts import weight_casts
from amprewrite.tables.ops.op_lists import op_name

ELEMENTS = 1 << 21
"""Largest number of weight elements in a group: up to 4 MB of bf16 gradients wait for the last one, and 8 MB of fp32 gradients are made at
once. That is less than a bucket of DDP (25 MB), whose reduction waits for the whole group."""
LEAST = 4
"""Least number of weights in a group without a loss scale. The Python code of its node takes as long as two casts and their launches."""
WITHOUT_LAUNCHES = {"cpu"}
"""Types of devices on which a cast launches no kernel."""
_CROSS = ("to", cast_in, unscale_gradient)
Node = torch.fx.Node


class GroupWeights(Pass[Target, EditedGraph]):
    needs = ("eager",)

    def __call__(self, target: Target, edited: EditedGraph) -> None:
        if any(map(_launches, edited.module.graph.find_nodes(op="placeholder"))):
            edited.make_own()
            group_weights(edited.module)


def _launches(node: Node) -> bool:
    """True if the input `node` makes grouping useful: it is the inverse of the loss scale, or on a device where casts launch kernels."""
    value = example_value(node)
    return node.target == INVERSE or (isinstance(value, torch.Tensor) and value.device.type not in WITHOUT_LAUNCHES)


def group_weights(module: torch.fx.GraphModule) -> None:
    """Edit `module` in place: one new `cross_together` node for each group of small weights casts them and unscales their gradients.

    The nodes that did this for single weights are erased, except casts on a CPU. A weight in no group (`_groups`) keeps its nodes.
    """
    graph, openings = module.graph, transform_openings(module.graph)
    inverse = next((node for node in graph.find_nodes(op="placeholder") if node.target == INVERSE), None)
    for dtype, group in _groups(module):
        weights: list[Any] = [nodes[0].args[0] for nodes in group]
        first = min(_reader(nodes, dtype) for nodes in group)
        with graph.inserting_before(outside(openings, weights[0], first)):
            made = graph.call_function(cross_together, (dtype, inverse, *weights))
            items = [graph.call_function(operator.getitem, (made, place)) for place in range(len(group))]
        for weight, nodes, item in zip(weights, group, items, strict=True):
            item.meta = {key: value for key, value in weight.meta.items() if key in ("example_value", "val")}
            for node in nodes:
                if node.target is cast_in and dtype in SHARES:
                    node.op, node.target, node.args = "call_method", "to", (item, node.args[1])
                    continue
                item.meta = dict(node.meta)
                node.replace_all_uses_with(item)
                graph.erase_node(node)
    module.recompile()


def _reader(nodes: list[Node], dtype: torch.dtype | None) -> Node:
    """Return the first node, in graph order, that will read a result of the group's `cross_together` node in place of one weight.

    `nodes` cast the weight or unscale its gradient. They are erased, and their users will read the result. But if the group makes no low
    copies (`dtype` is None or fp32), casts stay and will read the result themselves.
    """
    return min(each for node in nodes for each in ([node] if node.target is cast_in and dtype in SHARES else node.users))


def _groups(module: torch.fx.GraphModule) -> Iterator[tuple[torch.dtype | None, list[list[Node]]]]:
    """Yield (dtype, group) for each group of small fp32 weights. A group lists, for each weight, its casts and `unscale_gradient` nodes.

    `dtype` is the dtype of the low copies that the group's new node makes. Some nodes make no copies and only unscale gradients: `dtype` is
    then fp32 if all listed nodes are casts (on a CPU, where casts stay), otherwise None. Groups too small to pay off are left out.
    """
    every = list(module.graph.nodes)
    stretch = dict(zip(every, itertools.accumulate(op_name(node.target) in GRAD_SWITCHES for node in every), strict=True))
    inputs = [example_value(node) for node in module.graph.find_nodes(op="placeholder")]
    crossings = defaultdict[Any, list[Node]](list)
    for node, (place, *_) in weight_casts(module, True):
        value = inputs[place]
        stays = value.device.type in WITHOUT_LAUNCHES
        if node.target not in _CROSS or not node.users or (node.target == "to" and stays) or stretch[node] != stretch[min(node.users)]:
            continue
        if value.dtype == torch.float32 and value.numel() <= ELEMENTS:
            crossings[place, stays or node.target is unscale_gradient or node.args[1], stretch[node]].append(node)
    rooms, groups = dict[Any, int](), defaultdict[Any, list[list[list[Node]]]](list)
    for (place, how, where), nodes in sorted(crossings.items(), key=lambda each: min(user for node in each[1] for user in node.users)):
        value = inputs[place]
        dtype = how if how is not True else None if any(node.target is unscale_gradient for node in nodes) else torch.float32
        kind = dtype, value.device, where
        if rooms.get(kind, -1) < value.numel():
            groups[kind].append([])
            rooms[kind] = ELEMENTS
        rooms[kind] -= value.numel()
        groups[kind][-1].append(nodes)
    for (dtype, *_), made in groups.items():
        yield from ((dtype, group) for group in made if len(group) >= (LEAST if group[0][0].target == "to" else 2))
