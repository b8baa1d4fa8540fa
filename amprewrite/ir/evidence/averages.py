"""Means and sums of many values that torch.autocast holds in fp32: they are more exact than what they are made of.

`y = linear(x).float()`, `y.square().mean(-1) - y.mean(-1) ** 2`. A product has rounded every y, and a mean of many evens that out. Rounded
again, a mean loses more than its own error, and a difference of two may leave nothing else.

1. An average adds up `MANY` elements or more for each of its own, or those of windows.
2. What ops make of averages alone, and of what no product made, is one as well, but for norms, steps and shares.
3. The parts of an average are what ops make one by one, on the way to it, of a value that torch.autocast holds in fp32: squares, products
   with a gain, pads. Sums are none: they belong to a residual stream.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from amprewrite.ir.evidence.running_sums import is_product
from amprewrite.ir.op_graph import OpGraph, OpNode
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import OpKind

MANY = 8
"""Elements whose mean has a third of the error of each."""
AVERAGES, SLIDES, SUMS = ops_with(Trait.AVERAGES), ops_with(Trait.SLIDES), ops_with(Trait.ADDS_UP)
LEVEL = ops_with(Trait.TAKES_MEAN_AWAY, Trait.HAS_STEPS, Trait.SHARES_OUT)


@dataclass
class Averages:
    """The averages of a graph, by name, and their parts."""

    names: set[str] = field(default_factory=set)
    parts: set[str] = field(default_factory=set)


def averages(graph: OpGraph, wide: Set[str], exact: Set[str]) -> Averages:
    """Find the averages of a graph among what torch.autocast holds `wide`; `exact` values came of no product."""
    found = Averages()
    for node in graph:
        if node.role != "op" or node.name not in wide or node.name in exact or is_product(node):
            continue
        given = [operand.value for operand in node.operands]
        if node.op in AVERAGES and given and (node.op in SLIDES or graph[given[0]].numel >= MANY * max(node.numel, 1)):
            found.names.add(node.name)
            _add_parts(graph, given, wide, found.parts)
        elif node.op not in LEVEL and not found.names.isdisjoint(given) and all(each in found.names or each in exact for each in given):
            found.names.add(node.name)
    return found


def _add_parts(graph: OpGraph, values: list[str], wide: Set[str], parts: set[str]) -> None:
    waiting = list(values)
    while waiting:
        node = graph[waiting.pop()]
        if node.name not in parts and node.name in wide and _is_part(node):
            parts.add(node.name)
            waiting += [operand.value for operand in node.operands]


def _is_part(node: OpNode) -> bool:
    by_elements = node.kind in (OpKind.CLEAR, OpKind.INFER, OpKind.INTERNAL)
    return node.role == "op" and by_elements and not is_product(node) and node.op not in LEVEL | SUMS | AVERAGES


__all__ = ["Averages", "averages"]
