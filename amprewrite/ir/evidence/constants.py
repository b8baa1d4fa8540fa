"""The constants of a file that a low format would lose, who reads them, and which ops must run high for them.

1. An op runs high if a low copy of a constant that it reads is another number: too large, or with fewer bits than a rounding leaves.
2. So it does if an element that becomes zero comes to a pole: it is there for the values that no sample shows, such as a row of zeros.
3. A constant may be rounded whose error drowns: a bias in a far larger sum, a factor whose products are only added to such, an epsilon far
   below the smallest result seen.
4. An op that divides by the result of such an op, or scales it further, runs high as well.
5. A constant that goes into or out of the body of a branch or loop is kept for all that reads it there: a body shows no ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from amprewrite.ir.evidence.range_rules import HEADROOM, bias_drowns, drowned, hands_on_small
from amprewrite.ir.evidence.ranges import ValueRange
from amprewrite.ir.op_graph import Demand, OpGraph, OpNode
from amprewrite.tables.formats import Format
from amprewrite.tables.ops.onnx_names import FLOW
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import OpKind

BORDERS = {op_type.lower() for op_type in FLOW}
"""The ops of vertices at the border of a body."""
INVERSE, USES_SMALL, TAKES_EPSILON = ops_with(Trait.INVERSE), ops_with(Trait.MAGNIFIES_SMALL), ops_with(Trait.TAKES_EPSILON)


@dataclass(frozen=True)
class Loss:
    """The harm that rounding does to one constant."""

    name: str
    why: str
    kept: bool = False
    """Whether a low copy is another number, so that ops that read it stay fp32. In a report: whether one does."""
    saturated: bool = False
    """Whether it is a mask or a bound of which values become the end of the range."""
    beyond: int = 0
    """Elements beyond the range."""
    flushed: int = 0
    """Elements that become zero."""
    error: float = 0.0
    """Largest absolute error of an element within the range."""

    def __str__(self) -> str:
        done = "stays fp32 where it is read" if self.kept else "stored low"
        return f"{self.name}: {self.why}; {done}"


@dataclass(frozen=True, kw_only=True)
class ConstantRead:
    """An op that reads a constant of a file in its own format. Such a constant costs nothing to store low."""

    constant: str
    reader: str
    follows: str
    """The op in whose format the constant must arrive: the reader, or the op that it feeds."""
    loss: Loss | None = None
    """The harm of a low copy there; None if it rounds as well as any other."""
    summand: bool = False
    """The op only adds it to a product of its other operands."""
    pole: str = ""
    """The op with a pole at zero that an element of it may come to."""


def lost_constants(graph: OpGraph, reads: Iterable[ConstantRead], seen: Mapping[str, ValueRange], low: Format) -> dict[str, str]:
    """The ops that must run high for the sake of constants, each with the reason. `seen`: ranges of values on samples, by vertex."""
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
    """The reason why an op must not read a constant low; "" if it may."""
    loss, node = read.loss, graph[read.reader]
    if loss is None:
        return ""
    if loss.flushed and read.pole:
        return f"{loss.name}: {loss.flushed} of its values vanish in {low.name}, and {read.pole} has a pole at zero"
    return f"{loss.name}: {loss.why}" if loss.kept and not _harmless(graph, node, read, loss, result, seen, low) else ""


def _harmless(
    graph: OpGraph, node: OpNode, read: ConstantRead, loss: Loss, result: ValueRange | None, seen: Mapping[str, ValueRange], low: Format
) -> bool:
    """Whether the error of a constant drowns."""
    if loss.beyond:
        return False
    if read.summand and bias_drowns(result, low):
        return True
    if not loss.flushed and drowned(graph, node, seen, low):
        return True
    return node.op in TAKES_EPSILON and result is not None and not result.zeros and loss.error * HEADROOM <= result.smallest * low.eps


def _scales(node: OpNode, given: Iterable[str], small: set[str], low: Format) -> str:
    """The reason why an op must run high that divides by, or scales, the result of one that was kept high for a constant."""
    hangs = next((name for name in given if name in small), "")
    if hangs and (node.op in USES_SMALL or _passes_small(node.op)):
        return f"{hangs} hangs on a value that {low.name} would flush"
    return ""


def _passes_small(op: str) -> bool:
    return op in INVERSE or op in BORDERS or hands_on_small(op)


__all__ = ["BORDERS", "ConstantRead", "Loss", "lost_constants"]
