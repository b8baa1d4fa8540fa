"""Read an ONNX graph into an op graph: one op-graph node for each ONNX node. Bodies (the subgraphs of If, Loop and Scan) are inlined.

1. Walk the nodes in order. A body is walked at the position of its node, so that a value may enter or leave it in either format.
2. Each input of a body, and each result of an If, Loop or Scan, has an op-graph node. The nodes of one loop state share a precision
   group, so that the state has one colour (low or high) in all iterations.
3. An operand has the format of the op if the op's schema gives operand and result the same type variable, such as "T". Other fp32 operands
   stay fp32, since ONNX ops do not promote mixed types.
4. Constants cost nothing: a constant that an op reads low is stored low, and never cast.
5. The reader forces an op to fp32 if, for example, it is on no op list, its opset does not allow the low type, or it reads or makes
   quantised values. Constants and ranges in sample runs are only recorded: passes judge them.

This file has special code for bodies (`If`, `Scan`, `Loop`), for ops that set the type of their result (`Cast`, called `to` in op tables,
`Constant`, `ConstantOfShape`, `DequantizeLinear`), and for the FLOPs of products: `matmul`, `addmm`, `einsum`, `conv2d`, and
`conv_transpose2d`, whose FLOPs follow from its input.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePath

import onnx_ir as ir

from amprewrite.graphs.onnx.ops import Signature, bodies, constant_tensor, format_of, op_of, signature
from amprewrite.graphs.onnx.read.body_types import fill_graph_types
from amprewrite.graphs.onnx.read.constants import ConstantFacts, Kinds, is_distance
from amprewrite.graphs.onnx.run.samples import Samples, elements
from amprewrite.ir.evidence.constants import ConstantRead, Loss
from amprewrite.ir.evidence.ranges import ValueRange
from amprewrite.ir.op_graph import Demand, Operand, OpGraph, OpNode, reached
from amprewrite.tables.errors import CaptureError
from amprewrite.tables.formats import FP32, Format
from amprewrite.tables.ops.onnx_names import FLOW, QUANTISED
from amprewrite.tables.ops.op_lists import OpLists, find_op
from amprewrite.tables.ops.products import einsum_flops
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

Pin = tuple[Colour, Reason, str]
TURNS = 64
"""Number of iterations of a loop that prices assume."""


@dataclass(frozen=True)
class Slot:
    """A place where a value is read: input `index` of a node, or output `index` of a graph."""

    owner: ir.Node | ir.Graph
    index: int

    def put(self, value: ir.Value) -> None:
        if isinstance(self.owner, ir.Node):
            self.owner.replace_input_with(self.index, value)
        else:
            self.owner.outputs[self.index] = value


@dataclass
class OnnxReading:
    """The op graph of a model and, for each op-graph node, the ONNX value, the ONNX node, and the places where the value is read."""

    graph: OpGraph = field(default_factory=OpGraph)
    values: dict[str, ir.Value] = field(default_factory=dict)
    """The ONNX value of each op-graph node, by the node's name."""
    nodes: dict[str, ir.Node] = field(default_factory=dict)
    """The ONNX node of each op-graph node, by name. A value that enters or leaves a subgraph has the ONNX node that runs the subgraph."""
    slots: dict[tuple[str, str], list[Slot]] = field(default_factory=dict)
    """Places where values are read, by (op-graph node that reads, op-graph node that is read)."""
    constants: list[ConstantRead] = field(default_factory=list)
    kept: dict[str, Loss] = field(default_factory=dict)
    """Constants that stay fp32 whatever the passes decide: {name: error that a low copy would have}."""
    masks: set[str] = field(default_factory=set)
    """Constants, and ConstantOfShape nodes, that only mask attention scores. In their low copies a number beyond the range becomes 15/32 of
    ±max (`BLOCKED` in constants.py), so that the sum of two masks stays finite."""
    ranges: dict[str, ValueRange] = field(default_factory=dict)
    """Value ranges by op-graph node: results in sample runs, constants that the low format rounds, and fill numbers that do not fit it."""
    walls: Counter[str] = field(default_factory=Counter)
    """Ops that stay fp32 because they are on no op list, have no schema, or have subgraphs: {"domain::op type": number of nodes}."""
    untyped: Counter[str] = field(default_factory=Counter)
    """Values of unknown type, with the number of ops that stay fp32 because they read the value."""


def read_onnx(
    model: ir.Model, low: Format, lists: OpLists, samples: Samples, asked_ops: frozenset[str] = frozenset(), keep_io: bool = True
) -> OnnxReading:
    """Read `model` into an `OnnxReading`: the op graph, the constants that ops read, and the ONNX value and node of each op-graph node.

    `samples` are the results of sample runs. `asked_ops` are the ops that the user's overrides put on an op list. `keep_io` keeps the
    model's inputs and outputs fp32."""
    reader = _Reader(model, Kinds(low, lists, samples, asked_ops), keep_io)
    reader.read_top()
    reader.read_numbers()
    return reader.reading


class _Reader:
    def __init__(self, model: ir.Model, kinds: Kinds, keep_io: bool) -> None:
        self.model, self.kinds, self.low, self.keep_io = model, kinds, kinds.low, keep_io
        self.held = ConstantFacts(model, kinds.low)
        self.opset = model.opset_imports.get("", 1)
        self.reading = OnnxReading()
        self.masked: set[str] = set()
        """Op-graph nodes that read a constant mask. In the low format, the mask's numbers beyond the range become ±max."""
        self.of: dict[ir.Value, str] = {}
        self.counts: Counter[str] = Counter()
        self.turns = 1
        """Assumed number of runs of the current graph in one call of the model, for prices: TURNS in a loop, TURNS ** 2 in a nested one."""

    # -- graphs -----------------------------------------------------------------------
    def read_top(self) -> None:
        graph = self.model.graph
        fill_graph_types(graph, self.opset)
        for value in graph.inputs:
            pinned = (Colour.HIGH, Reason.BOUNDARY, "input") if self.keep_io or not _is_fp32(value) else None
            self.add_value(value, "input", pinned=pinned, kind=OpKind.CLEAR)
        self.read_nodes(graph)
        for index, value in enumerate(graph.outputs):
            if _is_fp32(value):
                name = self.unique(f"output:{value.name}")
                demand = Demand.HIGH if self.keep_io or self.constant(value) else Demand.ANY
                self.read(name, value, Slot(graph, index))
                operands = (Operand(self.maker(value), demand),)
                if demand is Demand.HIGH:
                    self.keep_unsaturated([self.maker(value)], f"{value.name} leaves in fp32 with what lies beyond {self.low.name}'s range")
                self.reading.graph.add(OpNode(name, "output", None, operands, role="output", pinned=_PLAIN))

    def read_numbers(self) -> None:
        seen = self.kinds.samples.ranges
        for name, value in self.reading.values.items():
            if str(value.name) in seen:
                self.reading.ranges[name] = seen[str(value.name)]
        for name, node in self.reading.nodes.items():
            if node.op_type == "ConstantOfShape" and _is_fp32(node.outputs[0]):
                self.reading.masks |= {name} if self.held.readers.masks_scores(node.outputs[0]) else set()
                self.reading.ranges |= self.held.fill_range(name, node)
        for constant in {read.constant for read in self.reading.constants}:
            value = self.reading.values[constant]
            found = self.held.facts(value)
            if found.overflow and self.held.readers.masks_scores(value):
                self.reading.masks.add(constant)
            if found.error:
                self.reading.ranges[constant] = ValueRange(least=-found.largest, greatest=found.largest)

    def read_nodes(self, graph: ir.Graph) -> None:
        for node in graph:
            if node.op_type in FLOW and node.domain == "" and not (node.op_type == "Scan" and self.opset < 9):
                (self.read_if if node.op_type == "If" else self.read_turns)(node)
            elif node.op_type != "Constant" or node.domain:
                self.read_node(node)

    # -- values -------------------------------------------------------------------------
    def unique(self, base: str) -> str:
        self.counts[base] += 1
        name = base if self.counts[base] == 1 else f"{base}_{self.counts[base] - 1}"
        return name if name not in self.reading.graph.nodes else self.unique(base)

    def constant(self, value: ir.Value) -> bool:
        return constant_tensor(value) is not None

    def maker(self, value: ir.Value) -> str:
        """Return the name of the op-graph node that makes `value`. A constant gets its op-graph node here, at its first read."""
        if value not in self.of:
            if not self.constant(value):
                raise CaptureError(f"{value.name} is read, but no node before it makes it; export the model again")
            role = "constant" if value.producer() is not None else "parameter"
            self.add_value(value, role, (Colour.HIGH, Reason.BOUNDARY, "a constant is stored in the format of its readers"))
        return self.of[value]

    def add_value(
        self,
        value: ir.Value,
        role: str,
        pinned: Pin | None = None,
        *,
        op: str = "",
        name: str = "",
        kind: OpKind | None = None,
        operands: tuple[Operand, ...] = (),
        precision_group: str = "",
        may_saturate: bool = False,
    ) -> str:
        """Add an op-graph node for an input, a constant, a value that enters or leaves a subgraph, or one of several results of an op.

        Return the name of the new node: `name`, or if that is "", an unused name made from the name of `value`. `pinned` is the forced
        colour (low or high) with its reason, or None. A value that is not fp32 has the colour plain.
        """
        name = name or self.unique(str(value.name))
        dtype = format_of(value)
        pinned = pinned if dtype == "fp32" else _PLAIN
        shape = _shape(value)
        numel = 0 if role in ("constant", "parameter") else elements(value) * self.turns
        self.reading.graph.add(
            OpNode(
                name, op or role, kind, operands, dtype, shape, numel, role=role, pinned=pinned, precision_group=precision_group,
                may_saturate=may_saturate,
            )
        )  # fmt: skip
        self.reading.values[name] = value
        if dtype == "fp32":
            self.of[value] = name
        return name

    def read(self, reader: str, value: ir.Value, slot: Slot) -> str:
        """Record that the op-graph node `reader` reads `value` at `slot`. Return the name of the op-graph node that makes the value."""
        made = self.maker(value)
        self.reading.slots.setdefault((reader, made), []).append(slot)
        return made

    # -- nodes -----------------------------------------------------------------------------
    def read_node(self, node: ir.Node) -> None:
        sig = signature(node.domain, node.op_type, self.opset)
        op = op_of(node)
        row = find_op(op)
        results = [value for value in node.outputs if value.name]
        floats = [value for value in results if _is_fp32(value)]
        group = sig.output(floats[0].index() or 0) if sig and floats else ""
        name = self.unique(node.name or op)
        inner = bodies(node)
        untyped = [str(value.name) for value in node.inputs if value is not None and value.type is None]
        known = row is not None and sig is not None and self.kinds.lists.kind(row.name) is not None and not inner
        listed = known and not untyped
        kind = self.kinds.of(op, node) if listed else None
        if listed and sig is not None:
            operands = self.operands(name, node, sig, group, bool(floats))
        else:
            operands = self.walled(name, node, inner)
            if operands or floats:
                unknown = untyped if known else [f"{node.domain or 'ai.onnx'}::{node.op_type}"]
                (self.reading.untyped if known else self.reading.walls).update(unknown)
        unread: Pin | None = (Colour.HIGH, Reason.UNTYPED, ", ".join(untyped)) if known and untyped else None
        pinned = (unread or self.pin(node, op, listed, sig, group)) if floats else _PLAIN
        may_saturate = bool(floats) and self.held.may_saturate(node, op, kind, self.saturates(operands))
        if may_saturate and self.held.takes_mask(node, op):
            self.masked.add(name)
        module, source = provenance(node)
        shown = floats[0] if floats else results[0] if results else None
        numel = sum(map(elements, floats)) * self.turns
        dtype = "fp32" if floats else format_of(shown)
        self.reading.graph.add(
            OpNode(
                name, op, kind, operands, dtype, _shape(shown) if shown else (), numel, flops(node),
                "", module, source, "op", pinned, name if len(floats) > 1 else "", op == "to", may_saturate,
            )
        )  # fmt: skip
        self.reading.nodes[name] = node
        if len(floats) == 1:
            self.of[floats[0]], self.reading.values[name] = name, floats[0]
        elif floats and sig is not None:
            fixed = self.held.fixed_groups(node, sig, group) if listed else {}
            for value in floats:
                place = value.index() or 0
                grouped = sig.result_follows(node.op_type, place, group, self.low) and sig.output(place) not in fixed
                self.add_result(name, value, grouped, pinned, may_saturate)
        else:
            for value in floats:
                self.add_result(name, value, True, pinned, may_saturate)

    def add_result(self, node: str, value: ir.Value, grouped: bool, pinned: Pin | None, may_saturate: bool) -> None:
        """Add an op-graph node for `value`, one of several results of the op-graph node `node`.

        If `grouped` is True, `value` has the format of `node`, and `pinned` is its forced colour or None. If it is False, `value` stays
        fp32. `may_saturate` is True if `value` may hold numbers of a mask, such as -1e9, that the low format clamps.
        """
        operand = Operand(node, Demand.COLOUR if grouped else Demand.ANY)
        own: Pin | None = pinned if grouped else (Colour.HIGH, Reason.NO_KERNEL, "this result is always fp32")
        self.add_value(
            value, "op", own, op="getitem", name=self.unique(f"{node}.{value.index()}"), kind=OpKind.CLEAR, operands=(operand,),
            precision_group=node if grouped else "", may_saturate=may_saturate,
        )  # fmt: skip

    def operands(self, name: str, node: ir.Node, sig: Signature, group: str, gives_float: bool) -> tuple[Operand, ...]:
        """Return the fp32 operands of `node`, an op on an op list. Each has a `Demand`: the format in which the op needs the operand.

        `name` is the name of the op-graph node. `group` is the type variable of the op's result, such as "T". `gives_float` is True if the
        op has an fp32 result.
        """
        demands: dict[str, Demand] = {}
        computed = [v for v in node.inputs if v is not None and _is_fp32(v) and not self.constant(v)]
        misread = self.held.misreads(node) if computed and not gives_float else []
        fixed = self.held.fixed_groups(node, sig, group)
        self.reading.kept |= {loss.name: loss for loss in (*misread, *fixed.values()) if loss is not None}
        for index, value in enumerate(node.inputs):
            if value is None or not _is_fp32(value):
                continue
            made = self.read(name, value, Slot(node, index))
            follows = sig.follows(node.op_type, index, group, self.low) and sig.input(index) not in fixed
            if node.op_type == "Cast":
                demand = Demand.COLOUR if gives_float else Demand.ANY
            elif not gives_float:
                # keep the scale of a QuantizeLinear in fp32: compilers fuse this op only with a DequantizeLinear of the same scale
                alone = len(set(computed)) <= 1 and not misread and sig.allows(sig.input(index), self.low) and node.op_type not in QUANTISED
                demand = Demand.ANY if alone else Demand.HIGH
            else:
                demand = Demand.COLOUR if follows else Demand.HIGH
            if self.constant(value) and demand is not Demand.HIGH:
                if gives_float:
                    self.reading.constants.append(self.held.read(made, value, name, node, op_of(node), node.outputs[0], index))
                elif computed:  # store the constant in the format of the value with which the op compares it
                    self.reading.constants.append(ConstantRead(constant=made, reader=name, follows=self.of[computed[0]]))
                demand = Demand.ANY
            if demands.setdefault(made, demand) is not demand:
                demands[made] = Demand.HIGH
        saturating = [made for made in demands if self.reading.graph[made].may_saturate]
        if not gives_float and len(saturating) > (0 if misread else 1):
            self.keep_unsaturated(saturating, f"{name} compares what lies beyond {self.low.name}'s range")
        times = Counter(self.of.get(value) for value in node.inputs if value is not None)
        return tuple(Operand(made, demand, self.is_number(made), twice=times[made] > 1) for made, demand in demands.items())

    def is_number(self, name: str) -> bool:
        """True if the op-graph node `name` is a constant of one element. As an operand it is marked by `Operand.scalar`."""
        held = constant_tensor(self.reading.values[name]) if name in self.reading.values else None
        return held is not None and held.size == 1

    def keep_unsaturated(self, names: Iterable[str], text: str) -> None:
        """Keep the op-graph nodes `names` in fp32 if they hold numbers of a constant mask, such as -1e9, that a low format would clamp.

        An op that reads `names` needs these numbers unchanged. Nodes between the mask and `names` stay fp32, too. If no constant mask
        reaches `names`, nothing changes. `text` is the reason that the plan shows.
        """
        graph = self.reading.graph

        def saturated(values: Iterable[str]) -> Iterator[str]:
            return (name for name in values if graph[name].may_saturate)

        through = set(reached(saturated(names), lambda name: saturated(operand.value for operand in graph[name].operands)))
        for name in through if through & self.masked else ():
            graph.nodes[name] = replace(graph[name], pinned=graph[name].pinned or (Colour.HIGH, Reason.CONSTANT, text))

    def saturates(self, operands: Iterable[Operand]) -> bool:
        """True if one of `operands` may hold numbers of a mask, such as -1e9, that a low copy clamps to ±max of the format."""
        return any(self.reading.graph[operand.value].may_saturate for operand in operands)

    def walled(self, name: str, node: ir.Node, inner: list[ir.Graph]) -> tuple[Operand, ...]:
        """Return the operands of an op that must run in fp32. It is unlisted, lacks a schema, has subgraphs, or reads an unknown type.

        The operands are all fp32 values of the op graph that the op or its subgraphs `inner` read. Each is needed in fp32.
        """
        slots = [Slot(node, index) for index in range(len(node.inputs))]
        for body in inner:
            slots += [Slot(each, index) for each in body.all_nodes() for index in range(len(each.inputs))]
        made: dict[str, None] = {}
        for slot in slots:
            assert isinstance(slot.owner, ir.Node)
            value = slot.owner.inputs[slot.index]
            if value is not None and _is_fp32(value) and (value in self.of or (slot.owner is node and self.constant(value))):
                made[self.read(name, value, slot)] = None
        return tuple(Operand(value, Demand.HIGH) for value in made)

    def pin(self, node: ir.Node, op: str, listed: bool, sig: Signature | None, group: str) -> Pin | None:
        """Return (high, reason, detail) if the op is forced to run in fp32; None if op lists and passes decide.

        `listed` is False if the op is on no list, lacks a schema, has subgraphs, or reads an unknown type. `group` is its type variable.
        """
        if not listed or sig is None:
            return Colour.HIGH, Reason.UNLISTED, op
        if node.op_type in QUANTISED:
            return Colour.HIGH, Reason.EXPLICIT_DTYPE, "quantised"
        if not sig.allows(group, self.low):
            return Colour.HIGH, Reason.NO_KERNEL, f"{node.op_type} of opset {self.opset} takes no {self.low.name}"
        if any(v is not None and (v.producer() or node).op_type == "DequantizeLinear" for v in node.inputs):
            return Colour.HIGH, Reason.EXPLICIT_DTYPE, "quantised: it reads a DequantizeLinear"
        if node.op_type == "Cast":
            return self.kinds.pin_cast(node)
        if "dtype" in node.attributes:
            return Colour.HIGH, Reason.EXPLICIT_DTYPE, "dtype attribute"
        if node.op_type != "ConstantOfShape" and group not in (sig.input(i) for i, v in enumerate(node.inputs) if v is not None):
            return Colour.HIGH, Reason.BOUNDARY, "no operand has the type of its result"
        if op not in self.kinds.asked_ops and is_distance(node):
            return Colour.HIGH, Reason.CANCELS, "the squared distances of torch.cdist"
        return None

    # -- bodies --------------------------------------------------------------------------------
    def read_if(self, node: ir.Node) -> None:
        branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        for branch in branches:
            self.read_nodes(branch)
        name = self.unique(node.name or "if")
        for index, value in enumerate(node.outputs):
            self.leave(name, node, value, [(Slot(branch, index), branch.outputs[index]) for branch in branches])

    def read_turns(self, node: ir.Node) -> None:
        """Add the op-graph nodes of a Loop or Scan and of its body (subgraph). The cost model assumes that the body runs TURNS times."""
        body, name = node.attributes["body"].as_graph(), self.unique(node.name or node.op_type.lower())
        # The first two inputs of a Loop are the trip count and a condition. The first output of its body is a condition.
        taken, given = (2, 1) if node.op_type == "Loop" else (0, 0)
        states = len(node.inputs) - (taken or node.attributes["num_scan_inputs"].as_int())
        for index in range(taken, len(node.inputs)):
            self.enter(name, node, index, body.inputs[index], tied=index - taken < states)
        self.turns *= TURNS
        self.read_nodes(body)
        self.turns //= TURNS
        for index, value in enumerate(node.outputs):
            precision_group = f"{name}.state{index}" if index < states else ""
            self.leave(name, node, value, [(Slot(body, index + given), body.outputs[index + given])], precision_group)

    def enter(self, name: str, node: ir.Node, index: int, inner: ir.Value, tied: bool) -> None:
        """Add an op-graph node for `inner`, a value that a loop or scan passes into its body: a state, or a slice of a sequence.

        `tied` is True for a state: it has one colour (low or high) in all iterations."""
        outer = node.inputs[index]
        if outer is None:
            return
        if not _is_fp32(inner) or not _is_fp32(outer):
            self.add_value(inner, "op", name=self.unique(str(inner.name)), op=node.op_type.lower())
            return
        state = index - 2 if node.op_type == "Loop" else index
        self.turns *= TURNS
        self.cross(node, f"{name}.in{state}", inner, [(Slot(node, index), outer)], f"{name}.state{state}" if tied else "")
        self.turns //= TURNS

    def leave(self, name: str, node: ir.Node, outer: ir.Value, inner: list[tuple[Slot, ir.Value]], precision_group: str = "") -> None:
        """Add an op-graph node for `outer`, a result of an If, Loop or Scan. `inner` lists the subgraph outputs that become `outer`.

        If `outer` is a loop's state, `precision_group` is the name of its precision group (nodes that must have one format), otherwise "".
        """
        if _is_fp32(outer):
            self.cross(node, f"{name}.{outer.index()}", outer, inner, precision_group)

    def cross(self, node: ir.Node, name: str, value: ir.Value, reads: list[tuple[Slot, ir.Value]], precision_group: str) -> None:
        """Add an op-graph node, named after `name`, for `value`, which enters or leaves a body (subgraph) of `node`.

        `reads` holds a pair (place, value read there) for each value that becomes `value`. For a result of an If, these are one output of
        each branch. `precision_group` names a group of nodes that must have one format; "" for none.
        """
        name = self.unique(name)
        demands: dict[str, Demand] = {}
        for slot, read in reads:
            made = self.read(name, read, slot)
            if self.constant(read):
                self.reading.constants.append(self.held.read(made, read, name, node, node.op_type.lower(), value, slot.index))
            demands[made] = Demand.ANY if self.constant(read) else Demand.COLOUR
        operands = tuple(Operand(made, demand) for made, demand in demands.items())
        op = node.op_type.lower()
        masked = any(self.held.saturates(read, node, op) for _, read in reads if self.constant(read))
        if masked:
            self.masked.add(name)
        self.add_value(
            value, "op", self.pin_border(node), op=op, name=name, kind=OpKind.CLEAR, operands=operands,
            precision_group=precision_group, may_saturate=masked or self.saturates(operands),
        )  # fmt: skip
        self.reading.nodes[name] = node

    def pin_border(self, node: ir.Node) -> Pin | None:
        """Return (high, reason, detail) if an If, Loop or Scan must run in fp32, since its opset allows no low type; otherwise None."""
        sig = signature(node.domain, node.op_type, self.opset)
        if sig is None or any(sig.allows(variable, self.low) for variable, _ in sig.takes):
            return None
        return Colour.HIGH, Reason.NO_KERNEL, f"{node.op_type} of opset {self.opset} takes no {self.low.name}"


_PLAIN: Pin = (Colour.PLAIN, Reason.NO_FLOAT, "")


def _is_fp32(value: ir.Value) -> bool:
    return format_of(value) == FP32.name


def _shape(value: ir.Value) -> tuple[int | str, ...]:
    return tuple(dim if isinstance(dim, int) else str(dim.value or "?") for dim in (value.shape or ()))


def provenance(node: ir.Node) -> tuple[str, str]:
    """Return (module path, "file:line" in the source) that torch's exporter recorded on the node, each "" if unknown."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', node.metadata_props.get("pkg.torch.onnx.stack_trace", ""))
    return scopes(node)[0], f"{PurePath(lines[-1][0]).name}:{lines[-1][1]}" if lines else ""


def scopes(node: ir.Node) -> tuple[str, str]:
    """Return (module path, FX name) that torch's exporter recorded on the node, each "" if unknown."""
    try:
        names = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", ""))
        return str(names[-2]), str(names[-1])
    except (ValueError, SyntaxError, IndexError):
        return "", ""


def flops(node: ir.Node) -> int:
    """Return the FLOPs (two for each multiply-add) of a matrix product or convolution; 0 for other ops.

    A dim without a fixed size counts as 64. A result of unknown shape, as in subgraphs, counts as one element."""
    op = op_of(node)
    shapes = [tuple(d if isinstance(d, int) else 64 for d in (v.shape or ())) if v is not None else () for v in node.inputs]
    if op in ("matmul", "addmm"):
        turned = [bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB")]
        sides = zip(shapes, (-1 - turned[0], turned[1] - 2), strict=False)
        return 2 * elements(node.outputs[0]) * next((shape[max(at, -len(shape))] for shape, at in sides if shape), 64)
    if op == "einsum" and "equation" in node.attributes:
        return einsum_flops(node.attributes["equation"].as_string(), shapes)
    if op in ("conv2d", "conv_transpose2d") and len(shapes) > 1 and shapes[1]:
        moved, weight = node.inputs[0] if op == "conv_transpose2d" else node.outputs[0], math.prod(shapes[1][1:])
        return 2 * elements(moved) * weight if moved is not None else 0
    return 0
