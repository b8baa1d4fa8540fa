"""Insert the planned pads and slices into the fx graph, and set size arguments to physical (padded) sizes.

1. Ops with sizes among their arguments (view, expand, split, slices, depthwise convolutions) get physical sizes. Attention gets the scale
   of its logical (unpadded) head size. Batch norm in training becomes a function that pads the running statistics.
2. A weight's cast becomes a cast that pads. For every other planned pad or slice, one node is inserted before the first of its users.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.captured import EditedGraph
from amprewrite.graphs.fx.node_facts import LEAVES, Openings, example_value, named_arguments, outside, tensors, transform_openings
from amprewrite.graphs.fx.ops.pad_ops import batch_norm_padded, pad_cast, resize
from amprewrite.ir.op_graph import Call, Shape
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.pad_plan import Layout, PadCopy, extents, physical
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes.apply.insert_casts import CAST
from amprewrite.passes.plan.plan_pads import calls_with_casts, cast_name
from amprewrite.planner.padding.rules.shapes import index_of
from amprewrite.tables.errors import PlanError
from amprewrite.tables.formats import FORMATS, dtype_name
from amprewrite.tables.ops.op_lists import Trait, ops_with

PAD = "amprewrite_pad"
"""Key in a node's meta that marks nodes that this pass inserted, or whose size arguments it set to padded sizes."""
FRESH = ops_with(Trait.FRESH) | {"cast"}
"""Ops that accept any strides and return new memory. A slice that only such ops read may be a view of the padded tensor, without a copy."""


class InsertPads(Pass[RegionPlan, EditedGraph]):
    needs = ("pads.values", "pads.copies")

    def __call__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        _Insertion(plan, edited).run()


class _Insertion:
    """Inserts the pads and slices of one plan into the edited graph, and sets size arguments to padded sizes."""
    def __init__(self, plan: RegionPlan, edited: EditedGraph) -> None:
        self.plan, self.graph = plan.pads, edited.module.graph
        self.calls = calls_with_casts(edited.calls, plan.casts)
        self.nodes = {**edited.nodes, **_cast_nodes(plan, edited)}
        self.have = {padded.value: padded.layout for padded in self.plan.values}
        self.uses = {(copy.value, user): copy.layout for copy in self.plan.copies for user in copy.users}
        for value in (*self.have, *(copy.value for copy in self.plan.copies), *(u for c in self.plan.copies for u in c.users)):
            if value.partition("#")[0] not in self.nodes:
                raise PlanError(f"the plan pads {value}, which the graph does not have; make the plan anew")

    def run(self) -> None:
        for name, call in self.calls.items():
            if call.role == "op" and call.op in AIM:
                AIM[call.op](self, call, self.nodes[name])
        order = {node: place for place, node in enumerate(self.graph.nodes)}
        openings = transform_openings(self.graph)
        for copy in self.plan.copies:
            self.insert(copy, order, openings)

    def layout(self, call: Call, i: int = 0) -> Layout:
        """Return the padded dims of result `i` of a call, with their sizes; () if the result is not padded."""
        return self.have.get(f"{call.name}#{i}" if call.several else call.name, ())

    def use(self, value: str, reader: str) -> Layout:
        """Return the padded dims of `value`, with their sizes, as the node `reader` reads it; () if it reads the unpadded value."""
        return self.uses.get((value, reader), self.have.get(value, ()))

    def insert(self, copy: PadCopy, order: dict[torch.fx.Node, int], openings: Openings) -> None:
        """Insert one planned change of a value's padding (add, remove or replace it). Let the nodes in `copy.users` read the changed value.

        A cast of a weight becomes a cast that also pads. `order` has the position of each node in the graph. `openings` maps each node in a
        torch.func transform to the transforms around it.
        """
        value = self.nodes[copy.value]
        readers = [_reader_of(self.nodes[user], value, user) for user in copy.users]
        plain = []
        for reader in readers:
            if copy.weight and CAST in reader.meta and reader.op == "call_method" and reader.target == "to":
                reader.op, reader.target, reader.args = "call_function", pad_cast, (value, reader.args[1], copy.layout)
            else:
                plain.append(reader)
        if not plain:
            return
        first = min(plain, key=lambda reader: order.get(reader, 0))
        dense = any(self.calls[user].op not in FRESH for user in copy.users)
        with self.graph.inserting_before(outside(openings, value, first)):
            if copy.weight:
                dtype = tensors(example_value(value))[0].dtype
                made = self.graph.call_function(pad_cast, (value, dtype, copy.layout))
                made.meta = {**value.meta, CAST: dtype_name(dtype), "weight": True}
            else:
                made = self.graph.call_function(resize, (value, copy.have, copy.layout, copy.refresh, dense))
                made.meta = dict(value.meta)
        made.meta.pop("grapharg", None)
        made.meta.pop(LEAVES, None)
        made.meta[PAD] = copy.kind
        for reader in plain:
            reader.replace_input_with(value, made)


def _cast_nodes(plan: RegionPlan, edited: EditedGraph) -> dict[str, torch.fx.Node]:
    """Return {name of the cast's result in the pad plan, such as "linear -> bf16": fx node of the cast} for all planned casts."""
    found = {}
    for cast in plan.casts:
        value = edited.nodes[cast.value]
        for feeder in edited.nodes[cast.users[0]].all_input_nodes:
            if feeder.meta.get(CAST) == FORMATS[cast.to].name and value in (_cast_of(feeder) if cast.saturate else feeder.args):
                found[cast_name(cast)] = feeder
    return found


def _cast_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the nodes that the clamp before `node` reads. `node` is the conversion of a saturating cast. Return [] if it reads no node."""
    clamp = node.args[0]
    return clamp.all_input_nodes if isinstance(clamp, torch.fx.Node) else []


def _reader_of(node: torch.fx.Node, value: torch.fx.Node, name: str) -> torch.fx.Node:
    """Return the node that reads `value`: `node`, or if `node` is a cast, the clamp before it. Raises PlanError if neither reads it."""
    if value in node.all_input_nodes:
        return node
    clamp = node.args[0] if node.args else None
    if CAST in node.meta and isinstance(clamp, torch.fx.Node) and value in clamp.all_input_nodes:
        return clamp
    raise PlanError(f"the plan pads {value.name} for {name}, which does not read it; make the plan anew")


# -- adapt the arguments of ops to padded sizes (rule 1 of this file) ---------------------------
def _tell(node: torch.fx.Node, place: int, name: str, value: Any) -> None:
    """Set an argument of `node`: at position `place` if the call gives it by position, otherwise by the keyword `name`."""
    if place < len(node.args):
        node.args = (*node.args[:place], value, *node.args[place + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}
    node.meta[PAD] = "sizes"


def _sizes(run: _Insertion, call: Call, node: torch.fx.Node, first: int, name: str) -> None:
    """Replace the size arguments of an op by the padded sizes.

    The sizes are either all arguments from `first` on, or one tuple at `first` or with keyword `name`. A dim without padding keeps its
    argument, even if that is -1.
    """
    grown = {dim: extents(factors)[1] for dim, factors in run.layout(call)}
    if not grown:
        return
    given: Any = node.args[first] if len(node.args) > first else node.kwargs[name]
    spread = not isinstance(given, tuple | list)
    told = tuple(grown.get(dim, size) for dim, size in enumerate(node.args[first:] if spread else given))
    if spread:
        node.args = (*node.args[:first], *told)
        node.meta[PAD] = "sizes"
    else:
        _tell(node, first, name, told)


def _view(run: _Insertion, call: Call, node: torch.fx.Node) -> None:
    _sizes(run, call, node, 1, "shape" if "shape" in node.kwargs else "size")


def _zeros(run: _Insertion, call: Call, node: torch.fx.Node) -> None:
    """Set the sizes in a call of `zeros` or `new_zeros` to padded sizes. In `new_zeros` a tensor precedes the sizes."""
    after_tensor = bool(node.args) and isinstance(node.args[0], torch.fx.Node) and isinstance(example_value(node.args[0]), torch.Tensor)
    _sizes(run, call, node, int(after_tensor), "size")


def _unflatten(run: _Insertion, call: Call, node: torch.fx.Node) -> None:
    layout = run.layout(call)
    if layout:
        sizes, dim = call.get(2, "sizes", call.kwargs.get("unflattened_size")), call.get(1, "dim")
        rank = len(call.shapes[0]) - len(sizes) + 1
        start = dim % rank
        grown = physical(call.shapes[0], layout)
        told = tuple(grown[start + i] if start + i in dict(layout) else size for i, size in enumerate(sizes))
        _tell(node, 2, "sizes" if "sizes" in node.kwargs or len(node.args) > 2 else "unflattened_size", told)


def _split(run: _Insertion, call: Call, node: torch.fx.Node) -> None:
    """Set the sizes of the pieces in a call of `split` to the padded sizes."""
    dim = call.get(2, "dim", 0) % len(call.shapes[0])
    sizes = [physical(shape, run.layout(call, i))[dim] for i, shape in enumerate(call.shapes)]
    if sizes == [shape[dim] for shape in call.shapes]:
        return
    name = next((n for n in ("split_size_or_sections", "split_size", "split_sizes") if n in node.kwargs), "split_size")
    given = call.get(1, name)
    _tell(node, 1, name, sizes[0] if isinstance(given, int) else sizes)


def _getitem(run: _Insertion, call: Call, node: torch.fx.Node) -> None:
    """If a slice takes one of several equal parts of a dim, let it take the same part of the padded dim."""
    layout = run.layout(call)
    source = call.args[0]
    if not layout or call.item is not None:
        return
    index = index_of(call, run.calls[source.name].shapes[0])
    assert index is not None
    shape: Shape = run.calls[source.name].shapes[0]
    told: list[Any] = []
    after = 0
    for dim, i in index:
        if isinstance(i, slice) and i != slice(None) and after in dict(layout):
            size = shape[dim]
            assert isinstance(size, int)
            start, stop, _ = i.indices(size)
            grown = extents(dict(layout)[after])[1]
            told.append(slice(start // (stop - start) * grown, (start // (stop - start) + 1) * grown))
        else:
            told.append(i)
        after += not isinstance(i, int)
    if len(told) != len([i for i in told if i == slice(None) or i is None]):
        _tell(node, 1, "index", tuple(told))


def _narrow(run: _Insertion, call: Call, node: torch.fx.Node) -> None:
    layout, (dim, start, length) = dict(run.layout(call)), (call.get(i, n) for i, n in ((1, "dim"), (2, "start"), (3, "length")))
    rank = len(call.shapes[0])
    if dim % rank in layout:
        size = run.calls[call.get(0, "input", call.kwargs.get("self")).name].shapes[0][dim % rank]
        grown = extents(layout[dim % rank])[1]
        start = start + size if start < 0 else start
        _tell(node, 2, "start", start // length * grown)
        _tell(node, 3, "length", grown)


def _attention(run: _Insertion, call: Call, node: torch.fx.Node) -> None:
    query = call.get(0, "query")
    head = run.calls[query.name].shapes[0][-1]
    if run.use(query.name, call.name) and call.get(6, "scale") is None:
        assert isinstance(head, int)
        _tell(node, 6, "scale", 1 / math.sqrt(head))


def _depthwise(run: _Insertion, call: Call, node: torch.fx.Node) -> None:
    layout = dict(run.layout(call))
    if 1 in layout and call.get(6, "groups", 1) == call.shapes[0][1]:
        _tell(node, 6, "groups", extents(layout[1])[1])


def _batch_norm(run: _Insertion, call: Call, node: torch.fx.Node) -> None:
    layout = dict(run.layout(call))
    if layout and call.kwargs.get("training", False):
        named = {name: value for name, value in named_arguments(node).items() if value is not None and name != "cudnn_enabled"}
        given = named.pop("input"), ((0, layout[1]),)
        node.op, node.target, node.args, node.kwargs = "call_function", batch_norm_padded, given, named
        node.meta[PAD] = "sizes"


AIM: dict[str, Callable[[_Insertion, Call, torch.fx.Node], None]] = {
    "view": _view,
    "reshape": _view,
    "expand": _view,
    "broadcast_to": _view,
    "zeros": _zeros,
    "unflatten": _unflatten,
    "split": _split,
    "split_with_sizes": _split,
    "getitem": _getitem,
    "narrow": _narrow,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _depthwise),
    "batch_norm": _batch_norm,
}
"""{op: function that adapts its arguments, such as sizes, to padded operands or results}."""
