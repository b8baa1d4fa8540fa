"""Predict which values torch.autocast would hold in fp32, and how exact they are (`Held`): an op upstream may have rounded its data to low.

1. Inputs and weights are fp32, and so is the result of an op that reads no fp32 tensor. But a cast that reads no fp32 tensor returns a
   low value, unless the model's code casts to fp32 (rule 2).
2. Ops on torch.autocast's low list return low values. Ops on its fp32 list, and casts to fp32 in the model's code, return fp32. For ONNX
   files torch.autocast has no lists. There, ops on amprewrite's deny list and ops on none of its lists return fp32.
3. Uniform random numbers count as fp32, even if torch.autocast draws them in the low format, as `rand_like` does for a low tensor. In that
   format a number just below one rounds up to one, and the logarithm of one minus the number, as in exponential sampling, is infinite.
4. Any other op returns the widest dtype of its data. Three kinds of operands do not count as data: side arguments, such as the weights of a
   batch norm; 0-dim tensors next to tensors with dims; and constants of an ONNX file without an offset (see `offsets` in `Problem`), which
   are stored in the format of their readers.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Set

from amprewrite.ir.evidence.counts import ASKS
from amprewrite.ir.op_graph import Demand, Operand, OpGraph, OpNode
from amprewrite.ir.pass_base import Problem
from amprewrite.tables.formats import LOW_NAMES
from amprewrite.tables.ops.list_presets import autocast_kinds
from amprewrite.tables.ops.op_lists import OPS, Trait, ops_with
from amprewrite.tables.vocabulary import Colour, Held, OpKind, Reason

AWAY, SUMS, FACTORS, NORMS = (ops_with(each) for each in (Trait.TAKES_AWAY, Trait.ADDS_UP, Trait.SCALES, Trait.TAKES_MEAN_AWAY))
AVERAGES, UNIFORM, CONVERTS = ops_with(Trait.AVERAGES), ops_with(Trait.UNIFORM), ops_with(Trait.CONVERTS)
LOGS, RANDOM, DRAWS = (ops_with(each) for each in (Trait.LOGARITHM, Trait.RANDOM, Trait.DRAWS))
SHARES = ops_with(Trait.SHARES_OUT, Trait.NEARS_ITS_ENDS)
BOUNDED = frozenset(name for name, row in OPS.items() if row.bounded)
SHAPE_ONLY, LIKE_SECOND = ops_with(Trait.TAKES_SHAPE_ONLY), ops_with(Trait.LIKE_SECOND)
FILE = "meta"
"""The device of a graph that was read from an ONNX file."""
LEVELS = SHARES | ops_with(Trait.BOUNDS) | (ops_with(Trait.LEVELS_BELOW) & ops_with(Trait.LEVELS_ABOVE))
"""Ops that may shrink the error of their operand: over some range of operands their result hardly changes, as in a saturated sigmoid."""


def is_product(node: OpNode) -> bool:
    """True if `node` counts as a product: torch.autocast runs it in the low format, or may run ops of its subgraph in the low format.

    Two kinds of products do not count. Products of whole numbers, such as positions (`OpNode.counted`), stay fp32 in amprewrite, because
    the low format would round these numbers. Products with a vector, such as `mv`, gain nothing from a cast.
    """
    inside = node.pinned is not None and node.pinned[1] in (Reason.OPAQUE, Reason.BODY)
    return not node.counted and (node.kind is OpKind.ALLOW or inside)


def rounds(node: OpNode) -> bool:
    """True if an op counts as rounding its operands: a product that torch.autocast would run low (`is_product`), or a cast to a low format.

    A product that amprewrite keeps in fp32 counts, too, if torch.autocast would run it low.
    """
    return is_product(node) or (node.op in CONVERTS and node.dtype in LOW_NAMES)


def data_of(node: OpNode) -> tuple[Operand, ...]:
    """Return the data operands of an op, such as the input of a norm.

    Side arguments, such as the weights of a norm, are left out, and so are operands of which the op reads only the shape or dtype.
    """
    if node.op in SHAPE_ONLY or (node.op in ASKS and not node.carries_fp32):
        return ()
    if node.op in CONVERTS | LIKE_SECOND and len(node.operands) > 1:
        return tuple(operand for operand in node.operands if operand.demand is not Demand.ANY)
    return node.operands[: len(OPS[node.op].data) or None] if node.op in OPS else node.operands


def widest_of(node: OpNode, wide: Container[str]) -> tuple[str, bool]:
    """Return (name of the operand that gives the result of `node` its dtype, True if this operand is fp32); ("", False) without operands.

    `node` is an op on none of torch.autocast's lists. `wide` holds the names of the values in fp32.
    """
    like = [operand for operand in node.operands if node.op in CONVERTS and operand.demand is Demand.ANY]
    read = like or [operand for operand in data_of(node) if operand.demand is not Demand.ANY] or list(node.operands)
    read = [operand for operand in read if not operand.scalar] or read
    return next(((each.value, True) for each in read if each.value in wide), (read[0].value if read else "", False))


def held_wide(graph: OpGraph, device: str, known: Mapping[str, Held] | None = None, offsets: Set[str] = frozenset()) -> set[str]:
    """Return the names of the values of `graph` that torch.autocast would hold in fp32 on `device`.

    `known` holds the precision (`Held`) of values that are made in other graphs: inputs of a subgraph, and results of subgraphs. `offsets`
    names constants whose numbers differ little around a large mean, for instance 1000.1 and 1000.2. Rounding would erase the differences,
    so an op on no list of torch.autocast returns fp32 if it reads such a constant.
    """
    kinds, known, found = {} if device == FILE else autocast_kinds(device), known or {}, set[str]()
    for node in graph:
        kind = kinds.get(node.op) if kinds else OpKind.DENY if node.kind in (OpKind.DENY, None) else node.kind
        if node.name in known:
            wide = known[node.name] < Held.LOW
        elif node.role != "op" or kind is OpKind.DENY or node.counted or node.op in DRAWS:
            wide = True
        elif kind is OpKind.ALLOW or is_product(node):
            wide = False
        else:
            explicit = node.pinned is not None and node.pinned[:2] == (Colour.HIGH, Reason.EXPLICIT_DTYPE)
            value, widest = widest_of(node, found)
            widest |= any(each.value in offsets for each in data_of(node))
            low = node.op in CONVERTS and not value and node.pinned is None
            wide = explicit or widest or not (value or low)
        if wide:
            found.add(node.name)
    return found


def held(problem: Problem) -> dict[str, Held]:
    """Return {name of a value: its `Held`, the precision that it would have under torch.autocast} for all values of the problem's graph."""
    return _Reading(problem).found


class _Reading:
    def __init__(self, problem: Problem) -> None:
        self.graph, self.offsets, self.found = problem.graph, problem.offsets, dict[str, Held]()
        self.from_inputs, self.in_file = set[str](), problem.device == FILE
        wide = held_wide(problem.graph, problem.device, problem.held, problem.offsets)
        for node in problem.graph:
            if (node.role == "input" and node.carries_fp32) or any(each.value in self.from_inputs for each in node.operands):
                self.from_inputs.add(node.name)
            self.found[node.name] = problem.held.get(node.name, self._held(node) if node.name in wide else Held.LOW)

    def _held(self, node: OpNode) -> Held:
        if node.role != "op":
            return Held.EXACT if node.role == "input" or node.name in self.offsets else Held.PLAIN
        given = [each.value for each in data_of(node) if not each.scalar]
        found = [self.found[each] for each in given]
        exact = [each for each in given if self.found[each] is Held.EXACT]
        if node.may_saturate and not any(each in self.from_inputs or self.graph.seen(each).name in self.offsets for each in exact):
            # `node` makes a mask or adds one. A mask blocks the same positions if its numbers are rounded: the result need not be EXACT.
            return Held.ROUNDED if max(found, default=Held.PLAIN) > Held.PLAIN else Held.PLAIN
        if node.op in DRAWS or (node.op in RANDOM | UNIFORM and not given):
            return Held.PLAIN
        if node.op in NORMS and given and node.numel >= self.graph[given[0]].numel:
            return max(Held.PLAIN, min(found[0], Held.ROUNDED))
        if node.op in FACTORS:
            spans = [each for each in given if self.graph[each].numel >= node.numel]
            found = [self.found[each] for each in spans if self.found[each] > Held.EXACT or each in self.from_inputs] or found
        if not given or node.op in LOGS or (Held.EXACT in found and node.op not in BOUNDED | SHARES):
            return Held.PLAIN if node.op in BOUNDED else Held.EXACT  # a log may have a large offset: log(c * x) = log(c) + log(x)
        bent = node.op in LEVELS | AWAY | AVERAGES | NORMS  # the result's relative error may differ from the low format's, so not ROUNDED
        if node.op in SUMS:  # adding a number or a PLAIN value keeps the absolute error, but changes the relative error
            bent = bent or len(given) < 2 or any(self.found[each] is Held.PLAIN and not self._is_bias(each) for each in given)
        return Held.PLAIN if bent or node.kind in (OpKind.DENY, None) else min(max(found), Held.ROUNDED)

    def _is_bias(self, name: str) -> bool:
        """True if the value `name` counts as a bias: rounding `product + value` has about the same error as rounding the product itself.

        Masks and learnt vectors count as biases. Other learnt values, such as tables of relative positions, and results of norms may be
        larger than the product, so that rounding the sum has a larger error. These count as biases only in ONNX files: there each cast
        costs a kernel, and the plan need not be as exact as a run under torch.autocast.
        """
        seen = self.graph.seen(name)
        vector = sum(side != 1 for side in seen.shape) < 2
        return self.graph[name].may_saturate or (seen.role != "op" and (vector or self.in_file)) or (seen.op in NORMS and self.in_file)
