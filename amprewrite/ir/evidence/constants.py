"""Find the ops of an ONNX file that must run in fp32, because they read constants that a low format cannot represent.

1. An op runs in fp32 if a constant that it reads is lost in the low format: too large, or with an error larger than one rounding.
2. It also runs in fp32 if an element of the constant becomes zero and reaches an op with a pole at zero, such as a division. The element
   may be an epsilon that protects the op from zeros, and samples may contain no such zeros.
3. A constant may be rounded if its error is negligible: a bias in a far larger sum, a factor whose products are only added to far larger
   values, or an epsilon far below the smallest result seen.
4. If an op runs in fp32 because of a constant, so do ops that multiply, divide or merely pass on its result.
5. A constant that is passed into the body of a branch or loop, or out of it, stays fp32 for all its readers there, because values inside
   the body have no measured ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from amprewrite.ir.evidence.range_rules import HEADROOM, bias_drowns, drowned, hands_on_small
from amprewrite.ir.evidence.ranges import ValueRange
from amprewrite.ir.op_graph import Demand, OpGraph, OpNode
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import OpKind

BORDERS = {"if", "loop", "scan"}
"""Ops with bodies (subgraphs). In an op graph, a node with one of these ops stands for a value that enters or leaves a body."""
INVERSE, USES_SMALL, TAKES_EPSILON = ops_with(Trait.INVERSE), ops_with(Trait.MAGNIFIES_SMALL), ops_with(Trait.TAKES_EPSILON)


@dataclass(frozen=True)
class Loss:
    """The error of one constant if it is stored in the low format."""

    name: str
    """Name of the constant."""
    why: str
    """The error in words."""
    kept: bool = False
    """Whether the error is a reason to keep readers in fp32. In the report of a rewrite: whether a reader did stay fp32."""
    saturated: bool = False
    """Whether the constant is a mask or a bound, and some of its values are clamped to the low format's range."""
    beyond: int = 0
    """Number of elements beyond the range."""
    flushed: int = 0
    """Number of elements that become zero."""
    error: float = 0.0
    """Largest absolute error of the elements within the range."""

    def __str__(self) -> str:
        done = "stays fp32 where it is read" if self.kept else "stored low"
        return f"{self.name}: {self.why}; {done}"


@dataclass(frozen=True, kw_only=True)
class ConstantRead:
    """One read of a constant of an ONNX file by an op that may read a low copy of the constant instead."""

    constant: str
    reader: str
    follows: str
    """Name of the op whose format the constant must have: the reader or, for a comparison, the op that makes the reader's other operand."""
    loss: Loss | None = None
    """The error of the constant in the low format; None if it is no larger than one rounding."""
    summand: bool = False
    """Whether the reader only adds the constant to a product of its other operands."""
    pole: str = ""
    """Text that names an op that returns inf at zero (a pole), and that elements of the constant may reach; "" if there is none."""


def lost_constants(graph: OpGraph, reads: Iterable[ConstantRead], seen: Mapping[str, ValueRange], low: Format) -> dict[str, str]:
    """Return {name of an op: reason} for the ops that must run in fp32 because `low` would damage a constant on which they depend.

    `reads` lists all reads of constants in the ONNX file. `seen` holds the known ranges of the results of nodes on samples, by node name.
    """
    own = dict[str, str]()
    for read in reads:
        text = _lost(graph, read, seen.get(read.reader), seen, low)
        if text:
            own.setdefault(read.reader, text)
    crossed, small, found = dict[str, str](), set[str](), dict[str, str]()
    for node in graph:
        if node.op in BORDERS and node.name in own:
            crossed[node.name] = own[node.name]
        given = [operand.value for operand in node.operands]
        inside = next((crossed[o.value] for o in node.operands if o.demand is Demand.COLOUR and o.value in crossed), "")
        if inside and (node.op in BORDERS or node.kind is OpKind.CLEAR):
            crossed.setdefault(node.name, inside)
        if node.pinned is not None or not node.carries_fp32:
            continue
        text = own.get(node.name) or inside or _scales(node, given, small, low)
        if text:
            found[node.name] = text
            if _passes_small(node.op) or not any(name in small and name not in crossed for name in given):
                small.add(node.name)
    return found


def _lost(graph: OpGraph, read: ConstantRead, result: ValueRange | None, seen: Mapping[str, ValueRange], low: Format) -> str:
    """Return the reason why the op `read.reader` must not read the constant `read.constant` in the format `low`; "" if it may.

    `result` is the range of the op's result on samples; None if it is unknown.
    """
    loss, node = read.loss, graph[read.reader]
    if loss is None:
        return ""
    if loss.flushed and read.pole:
        return f"{loss.name}: {loss.flushed} of its values vanish in {low.name}, and {read.pole} has a pole at zero"
    return f"{loss.name}: {loss.why}" if loss.kept and not _harmless(graph, node, read, loss, result, seen, low) else ""


def _harmless(
    graph: OpGraph, node: OpNode, read: ConstantRead, loss: Loss, result: ValueRange | None, seen: Mapping[str, ValueRange], low: Format
) -> bool:
    """True if the error `loss` of a constant is negligible in the result of `node`, which reads the constant.

    `seen` holds the known ranges of values on samples, by name. `result` is the range of the result of `node`; None if it is unknown.
    """
    if loss.beyond:
        return False
    if read.summand and bias_drowns(result, low):
        return True
    if not loss.flushed and drowned(graph, node, seen, low):
        return True
    return node.op in TAKES_EPSILON and result is not None and not result.zeros and loss.error * HEADROOM <= result.smallest * low.eps


def _scales(node: OpNode, given: Iterable[str], small: set[str], low: Format) -> str:
    """Return the reason why `node` must run in fp32 because of an operand in `small`; "" if it may run low.

    `given` names the operands of `node`. `small` names results of ops that must run in fp32 because of a constant. An op that magnifies
    such a result (as a division does), or passes it on to later ops (as a view does), must run in fp32, too.
    """
    hangs = next((name for name in given if name in small), "")
    if hangs and (node.op in USES_SMALL or _passes_small(node.op)):
        return f"{hangs} hangs on a value that {low.name} would flush"
    return ""


def _passes_small(op: str) -> bool:
    return op in INVERSE or op in BORDERS or hands_on_small(op)
