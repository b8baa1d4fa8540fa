"""Read an fx graph into an op graph: one node for each op, with dtype, shape, device, source line and module path as facts.

The colour of an op-graph node is low if it runs in the low format, high if it runs in fp32, and plain if it carries no dense fp32 value. A
pin is a colour that facts force: the passes may not change it. This file decides the pins.

1. Read facts from the example values that capture left on the nodes.
2. Find the operands that must have the format in which their op runs, from the op's row in the op table.
3. Pin nodes whose colour a fact forces: inputs, parameters, explicit dtypes, autocast regions, higher-order ops, missing kernels.
4. Group nodes that must have one colour: nodes that share memory written in place, and results of one kernel.
5. Name and order the op-graph nodes canonically: depth first from the outputs, independent of the order of the fx nodes.

This file has special code for ops that equal another op with certain arguments (`_kind`: `inner`, `einsum`, `pow`, `mul`), for ops that
pick a value (`getitem`, `getattr`), and for conversions that read another tensor only for its dtype (`to`, `type_as`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import replace

import torch
import torch.fx

from amprewrite.graphs.fx.flow.far_numbers import FarNumbers
from amprewrite.graphs.fx.flow.kernel_pins import pin_summing, pin_uneven, pin_unset, trained_nodes
from amprewrite.graphs.fx.node_facts import (
    ABSOLUTE,
    BIT_VIEWS,
    CONVERSIONS,
    ENTER_AUTOCAST,
    ENTER_INFERENCE,
    EXIT_INFERENCE,
    LEAVES,
    LIKE_SECOND,
    NOT_DENSE,
    READ_BACK,
    RETURNED,
    SET_GRAD,
    SHARED,
    TAKES_SHAPE_ONLY,
    Fact,
    arguments,
    device_of,
    example_value,
    hints,
    is_opaque,
    memory_of,
    named_sizes,
    note_autocast,
    read_fact,
    tensors,
    transformed_nodes,
    value_dtype,
    written,
)
from amprewrite.graphs.fx.read.aliasing import Ties, idle_where_alike, memory
from amprewrite.graphs.fx.read.names import dtype_is_literal, has_own_dtype, module_path, name_all, source_of
from amprewrite.graphs.fx.run.flops import flops
from amprewrite.ir.held_wide import held_wide
from amprewrite.ir.op_graph import Demand, Operand, OpGraph, OpNode
from amprewrite.tables.formats import LOW_NAMES, Format
from amprewrite.tables.ops.op_lists import OpLists, Trait, op_name, ops_with
from amprewrite.tables.vocabulary import Colour, OpKind, Reason
from amprewrite.torch_internals.trees import tree_leaves

_FLOATING = ("fp", "bf", "float", "complex", *NOT_DENSE)
"""Prefixes of the names of dtypes that hold fractions."""


def read_graph(
    module: torch.fx.GraphModule, low: Format, lists: OpLists, entry: str = "", names: tuple[str, ...] = (), training: bool = False,
    grad: bool = True, device: str = "cpu",
) -> tuple[OpGraph, dict[str, torch.fx.Node]]:
    """Return (op graph of `module`, {name of an op-graph node: its fx node}).

    `low` is the low format. `lists` give the kind (allow, deny, ...) of each op. `entry` is the path of the module that was called. `names`
    are the names of its positional parameters. `training` is True if a backward may follow. If so, `grad` says whether gradients are
    enabled at the start of the graph. `device` is the type of the graph's device.
    """
    facts = {node: read_fact(node, position) for position, node in enumerate(module.graph.nodes)}
    note_autocast(facts)
    for node in transformed_nodes(module.graph):
        facts[node].transformed = True
    ties, write_versions = memory(facts, training)
    name_all(facts, entry, names)
    no_grad = without_grad(module.graph, grad) if training else set()
    for node in idle_where_alike(facts, low.name) if lists.rule == "cost" else ():
        facts[node].may_be_idle = True
    learning = trained_nodes(module.graph) - no_grad if training else set()
    far = FarNumbers(low)
    for fact in facts.values():
        far.look_at(fact)
        kind = fact.kind = _kind(fact, lists, low)
        fact.operands = _operands(fact, facts, kind, write_versions, no_grad)
        fact.pinned = _pin(fact, kind, low, ties, far) or (pin_unset(fact, low) if training else None) or pin_uneven(fact, kind, lists)
        fact.may_saturate = far.may_saturate(fact, facts)
    _absorb_explicit_internal(facts, lists)
    order = sorted(facts, key=lambda node: facts[node].rank)
    graph = OpGraph.of(_vertex(facts[node], ties, entry) for node in order)
    return _pinned_summing(graph, facts, lists, learning, device), {facts[node].name: node for node in order}


def _pinned_summing(graph: OpGraph, facts: dict[torch.fx.Node, Fact], lists: OpLists, learning: set[torch.fx.Node], device: str) -> OpGraph:
    """Return `graph` with more ops forced to fp32: in the low format they would add up gradients that torch.autocast adds up in fp32.

    `learning` are the nodes that get gradients. If there are none, no op is forced.
    """
    wide = held_wide(graph, device) if learning else set()
    trained = {node for node in learning if facts[node].name in wide}
    found = {}
    for fact in facts.values() if learning else ():
        pin = pin_summing(fact, lists, trained, learning) if fact.pinned is None or fact.pinned[1] is Reason.UNEVEN else None
        if pin is not None:
            found[fact.name] = replace(graph[fact.name], pinned=pin)
    return graph.exchanged(found)


def _kind(fact: Fact, lists: OpLists, low: Format) -> OpKind | None:
    """Return the kind of an op in one call, by the op's name in `lists`; None if the op is on no list.

    A conversion on no list is CLEAR (it takes the format of its neighbours). With the rule "autocast" any unlisted op is INFER (it runs low
    unless a denied op is upstream). With the rule "cost" (the default planner) the arguments change the kind in four cases, unless the user
    has an override for the op:

    1. A square or cube (`pow`) may run low in a format with fp32's range, because its relative error stays small.
    2. In a format of narrow range a product of a value with itself counts as a square.
    3. `inner` of a vector is a dot product, not a matrix product.
    4. An einsum that sums over no dim of two operands is an elementwise product, not a matrix product.
    """
    if fact.row is None:
        return None
    kind = lists.kind(fact.row.name)
    if kind is None and fact.op in CONVERSIONS:
        return OpKind.CLEAR  # a conversion such as `x.float()`: `_pin` forces fp32 where the model's code asks for it
    if kind is None and lists.rule == "autocast":
        return OpKind.INFER  # torch.autocast runs an unlisted op in the dtype of its inputs
    if lists.rule == "cost" and fact.row.name not in lists.asked:
        if kind is OpKind.ALLOW and fact.op == "inner" and _reads_a_vector(fact.node):
            return lists.kind("dot")
        if kind is OpKind.ALLOW and fact.op == "einsum" and not flops(fact.op, fact.node):
            return lists.kind("mul")
        if kind is OpKind.DENY and not low.narrow and fact.op == "pow" and fact.node.args[1:] and fact.node.args[1] in (2, 3):
            return OpKind.INFER
        if kind is OpKind.INFER and low.narrow and fact.op == "mul" and len(fact.node.args) == 2 and fact.node.args[0] is fact.node.args[1]:
            return lists.kind("square")
    return kind


def _reads_a_vector(node: torch.fx.Node) -> bool:
    """True if an operand is a tensor of at most one dim."""
    values = [example_value(operand) for _, operand in arguments(node)]
    return any(isinstance(value, torch.Tensor) and value.dim() < 2 for value in values)


def turns_grad_on(graph: torch.fx.Graph) -> bool:
    """True if the graph itself enables gradients somewhere, so that a backward may follow even if the caller disabled gradients."""
    return any(
        (op_name(node.target) in SET_GRAD and bool(node.args[0])) or (op_name(node.target) == ENTER_INFERENCE and not node.args[0])
        for node in graph.nodes
    )


def under_autocast(graph: torch.fx.Graph, ops: OpGraph) -> bool:
    """True if the model enables torch.autocast somewhere in a graph, and itself fixes the format of all matmuls and convolutions there.

    The model fixes the format of an op in a torch.autocast region, enabled or not, or in `custom_fwd(cast_inputs=...)`, and of an op that
    returns half precision. False for a graph without matmuls and convolutions.
    """
    heavy = [node for node in ops if node.flops]
    switched_on = any(op_name(node.target) == ENTER_AUTOCAST and bool(node.args[2]) for node in graph.nodes)
    theirs = (Reason.HALF, Reason.INSIDE_AUTOCAST)
    return switched_on and bool(heavy) and all(node.pinned is not None and node.pinned[1] in theirs for node in heavy)


def without_grad(graph: torch.fx.Graph, grad: bool) -> set[torch.fx.Node]:
    """Return the nodes that run without gradients. `grad` tells whether gradients are enabled at the start of the graph."""
    found, enabled = set(), grad
    around: dict[torch.fx.Node, bool] = {}
    for node in graph.nodes:
        op = op_name(node.target)
        if op in SET_GRAD:
            enabled = bool(node.args[0])
        elif op == ENTER_INFERENCE:
            around[node], enabled = enabled, not node.args[0]
        elif op == EXIT_INFERENCE:
            enabled = around[node.all_input_nodes[0]]
        elif not enabled:
            found.add(node)
    return found


# -- step 2 of the module's docstring: operands -----------------------------------------
def _operands(
    fact: Fact,
    facts: dict[torch.fx.Node, Fact],
    kind: OpKind | None,
    write_versions: Callable[[torch.fx.Node, Fact], int],
    no_grad: set[torch.fx.Node],
) -> list[Operand]:
    """Return an `Operand` for each fp32 tensor that an op reads: the format in which the op needs it (`Demand`), and its write version.

    Readers share a cast of a value only if they read the same write version. A write in place makes a new version. Readers under no_grad
    have other versions than readers with gradients, because a cast made under no_grad passes no gradient. If the op is the graph's output,
    the grad mode of the op that made the value counts. An operand to which the op writes must have the format in which the op runs.
    `write_versions(value, reader)` counts the writes to a value before a reader. `no_grad` are the nodes that run without gradients.
    """
    found: dict[torch.fx.Node, Operand] = {}
    for parameter, node in arguments(fact.node):
        feeder = facts[node]
        if node in found:
            found[node] = replace(found[node], twice=True)
        if feeder.dtype != "fp32" or node in found:
            continue
        scalar = isinstance(feeder.value, torch.Tensor) and feeder.value.dim() == 0
        write_version = 2 * write_versions(node, fact) + ((node if fact.role == "output" else fact.node) in no_grad)
        summand = fact.row is not None and parameter in fact.row.summands and "beta" not in fact.node.kwargs
        found[node] = Operand(feeder.name, _demand(fact, parameter, kind, feeder), scalar, write_version, summand)
    alone = sum(operand.demand is Demand.PROMOTE and not operand.scalar for operand in found.values()) < 2
    for node, operand in found.items():
        if operand.demand is Demand.PROMOTE and (node in fact.writes or (alone and not operand.scalar)):
            found[node] = replace(operand, demand=Demand.COLOUR)
    return list(found.values())


def _demand(fact: Fact, parameter: str, kind: OpKind | None, feeder: Fact) -> Demand:
    row = fact.row
    if fact.role == "output" or fact.autocast or fact.transformed or row is None or kind is None:
        return Demand.ANY if fact.role == "op" and fact.op == "getattr" else Demand.HIGH
    if fact.op == "getitem" and not isinstance(feeder.value, torch.Tensor):
        return Demand.COLOUR if fact.dtype == "fp32" else Demand.ANY  # the item may hold integers, such as the indices of max
    if fact.dtype != "fp32":
        reads_bits = fact.op in BIT_VIEWS and any(isinstance(leaf, torch.dtype) for leaf in tree_leaves((fact.node.args, fact.node.kwargs)))
        answers = kind is OpKind.CLEAR and fact.op not in CONVERSIONS and not reads_bits  # `x.view(torch.int32)` reads bits, not values
        if fact.may_be_idle:
            return Demand.ANY  # no reader notices if the conversion returns a low operand itself, not a copy, so allow either format
        return Demand.ANY if answers and not fact.dtype.startswith(_FLOATING) else Demand.HIGH
    second = fact.op in LIKE_SECOND and parameter not in ("self", "input", "") and fact.node.args[0] is not feeder.node
    if second or fact.op in TAKES_SHAPE_ONLY:
        return Demand.ANY
    if row.data and parameter not in row.data:
        device = device_of(feeder.value)
        return Demand.HIGH if device in row.mixed_on else Demand.COLOUR
    return Demand.PROMOTE if row.promotes else Demand.COLOUR


# -- step 3 of the module's docstring: pins ----------------------------------------------
def _pin(fact: Fact, kind: OpKind | None, low: Format, ties: Ties, far: FarNumbers) -> tuple[Colour, Reason, str] | None:
    """Return (colour, reason, detail) if facts decide the colour: high (fp32), or plain (never cast). None if the planner may choose."""
    if fact.role == "op" and fact.dtype in LOW_NAMES:
        return Colour.PLAIN, Reason.HALF, fact.dtype
    if fact.role == "op" and fact.dtype.startswith(NOT_DENSE) and fact.dtype.endswith("fp32"):
        return Colour.PLAIN, Reason.NOT_DENSE, fact.dtype
    if fact.role == "output" or fact.dtype != "fp32":
        return Colour.PLAIN, Reason.NO_FLOAT, ""
    if fact.role != "op":
        return Colour.HIGH, Reason.PARAMETER if fact.role == "parameter" else Reason.BOUNDARY, fact.role
    if fact.autocast:
        return Colour.HIGH, Reason.INSIDE_AUTOCAST, f"enabled={fact.autocast == 'on'}"
    if has_own_dtype(fact.node.meta.get("stack_trace")):
        return Colour.HIGH, Reason.INSIDE_AUTOCAST, "torch.amp.custom_fwd(cast_inputs=...)"
    if fact.transformed:
        return Colour.HIGH, Reason.TRANSFORMED, ""
    if fact.op == "getitem" and is_opaque(fact.node.args[0]):
        return Colour.HIGH, Reason.OPAQUE, op_name(getattr(fact.node.args[0], "target", ""))
    if fact.row is None or kind is None:
        return Colour.HIGH, Reason.UNLISTED, fact.op
    if fact.node in ties.group and ties.group[fact.node] in ties.writes_state:
        return Colour.HIGH, Reason.KEPT if fact.node in ties.kept else Reason.WRITES_STATE, ""
    if "out" in fact.node.kwargs and fact.node.kwargs["out"] is not None:
        return Colour.HIGH, Reason.WRITES_STATE, "out="
    if LEAVES in fact.node.meta and not (fact.node.meta[LEAVES] == READ_BACK and kind is OpKind.DENY):  # a denied op needs no pin for fp32
        reason = {RETURNED: Reason.RETURNED, SHARED: Reason.SHARED, READ_BACK: Reason.READ_BACK}[fact.node.meta[LEAVES]]
        return Colour.HIGH, reason, ""
    device = device_of(fact.value) if fact.writes_unsaid or fact.row.no_kernel else ""
    if fact.writes_unsaid and device not in fact.row.mixed_on:  # a low op would write to a cast copy instead of the model's tensor
        return Colour.HIGH, Reason.WRITES_STATE, ""
    if f"{device}:{low.name}" in fact.row.no_kernel:
        return Colour.HIGH, Reason.NO_KERNEL, f"{fact.op} in {low.name} on {device}"
    return _pin_dtype(fact) or _pin_source(fact) or far.pin(fact)


def _pin_dtype(fact: Fact) -> tuple[Colour, Reason, str] | None:
    """Return (high, reason, detail) if the model's code asks for fp32 by a conversion or a dtype argument; otherwise None.

    If a conversion takes its dtype from another tensor instead, as `x.to(y.dtype)` does, set `fact.relative`. For an op with a dtype
    argument, such as `sum(x, dtype=float32)`, set its operand's demand to ANY: the op may read x in either format.
    """
    node = fact.node
    if fact.op in ABSOLUTE:
        return Colour.HIGH, Reason.EXPLICIT_DTYPE, "float()"
    asks = torch.float32 in tree_leaves((node.args, node.kwargs))
    if fact.op in CONVERSIONS or asks:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if asks and dtype_is_literal(node.stack_trace, target.split(".")[0]):
            _read_anything(fact)
            return Colour.HIGH, Reason.EXPLICIT_DTYPE, "torch.float32"
        fact.relative = fact.op in CONVERSIONS
        if not fact.relative and asks:
            _read_anything(fact)
            return Colour.HIGH, Reason.EXPLICIT_DTYPE, "dtype argument"
    return None


def _read_anything(fact: Fact) -> None:
    """Let an op such as `sum(x, dtype=float32)`, which casts x itself, read x in any format. Conversions and bit views are not changed."""
    if fact.op not in CONVERSIONS and fact.op not in BIT_VIEWS and len(fact.operands) == 1:
        fact.operands = [replace(o, demand=Demand.ANY) for o in fact.operands]


def _pin_source(fact: Fact) -> tuple[Colour, Reason, str] | None:
    """Return (high, reason, detail), which forces fp32, for an op that makes fp32 from other types, such as `x.to(y.dtype)` of integers.

    Return None if the op reads fp32. Also return None for `x.to(y.dtype)` if x is boolean, or if x is low and the op may return x itself:
    the op may then run low, because the low format holds all numbers of x.
    """
    if fact.operands or (fact.may_be_idle and fact.relative):
        return None
    first = fact.node.args[0] if fact.node.args else None
    exact = isinstance(first, torch.fx.Node) and value_dtype(example_value(first)) == "bool"
    if fact.op in CONVERSIONS and fact.relative and exact and torch.float32 in tree_leaves((fact.node.args, fact.node.kwargs)):
        return None
    return Colour.HIGH, Reason.BOUNDARY, "makes fp32 from other types"


def _absorb_explicit_internal(facts: dict[torch.fx.Node, Fact], lists: OpLists) -> None:
    """Let the softmax of `softmax(x.float()).to(x.dtype)` read and return low values: remove the pins that force fp32.

    The kernel of such an op (kind INTERNAL) computes in fp32 also for low operands, so it needs no `.float()`. Its pin is removed if the
    default planner is in use (rule "cost"), and every reader of its fp32 result casts this result to another tensor's dtype, as
    `.to(x.dtype)` does. The pin of a conversion `x.float()` is removed if every reader is such an op or such a cast.
    """

    def internal(fact: Fact) -> bool:
        return fact.row is not None and lists.rule == "cost" and lists.kind(fact.row.name) is OpKind.INTERNAL and fact.dtype == "fp32"

    def all_cast_back(node: torch.fx.Node) -> bool:
        return bool(node.users) and all(_casts_back(facts[user]) for user in node.users)

    for node, fact in facts.items():
        explicit = fact.pinned is not None and fact.pinned[1] is Reason.EXPLICIT_DTYPE
        if explicit and internal(fact) and all_cast_back(node):
            fact.pinned = None
            fact.operands = [replace(o, demand=Demand.COLOUR) for o in fact.operands]
    for node, fact in facts.items():
        explicit = fact.pinned is not None and fact.pinned[1] is Reason.EXPLICIT_DTYPE
        if explicit and fact.op in CONVERSIONS and fact.operands and node.users:
            readers = [facts[user] for user in node.users]
            if all(_casts_back(r) or (internal(r) and r.pinned is None and all_cast_back(r.node)) for r in readers):
                fact.pinned, fact.relative = None, True


def _casts_back(fact: Fact) -> bool:
    return fact.relative and fact.pinned is None


def _vertex(fact: Fact, ties: Ties, entry: str) -> OpNode:
    node = fact.node
    found = tensors(fact.value)
    group = ties.group.get(node)
    tie = group.name if group is not None and ties.size[group] > 1 and fact.dtype == "fp32" else ""
    return OpNode(
        fact.name,
        fact.op if fact.role == "op" else fact.role,
        fact.kind,
        tuple(fact.operands),
        fact.dtype,
        named_sizes(fact.value) if isinstance(fact.value, torch.Tensor) else (),
        sum([math.prod(hints(t)) for t in found]),
        flops(fact.op, fact.node),
        found[0].device.type if found else "",
        module_path(node, entry) if fact.role == "op" else entry,
        source_of(node.stack_trace) if fact.role == "op" else "",
        fact.role,
        fact.pinned,
        tie,
        fact.relative,
        fact.may_saturate,
    )


_STATISTICS = ops_with(Trait.RUNNING_STATISTICS)


def hooked_and_written(graph: torch.fx.Graph, hooked: Set[str]) -> bool:
    """True if the graph writes to an input with a hook (its name is in `hooked`), and autograd records the write.

    A hook that the model set before the write belongs to the old value, but Dynamo would set it after the graph, on the new value. Norms
    write their running statistics without gradients, so writes to these do not count.
    """
    if not hooked:
        return False
    trained, quiet = trained_nodes(graph), without_grad(graph, grad=True)
    memory = {
        storage
        for node in graph.nodes
        if node not in quiet and op_name(node.target) not in _STATISTICS and not trained.isdisjoint(node.all_input_nodes)
        for target in written(node)
        for storage in memory_of(target)
    }
    return any(node.name in hooked and not memory.isdisjoint(memory_of(node)) for node in graph.find_nodes(op="placeholder"))
