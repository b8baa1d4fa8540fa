"""Choose low (bf16 or fp16) or high (fp32) for the nodes that no earlier pass decided, so that ops and casts together cost least.

1. Price every op and every copy (`amprewrite.ir.cost`) for the device at hand or the device that the user named, or by measured times.
2. Find the cheapest colours of these nodes (`amprewrite.planner.assignment`). The search is exact; of several cheapest plans it takes the
   plan with the fewest low ops.
3. Record for each node a neighbour of the same colour as the cause of its colour.
"""

from __future__ import annotations

from collections.abc import Iterator

from amprewrite.ir.cost import TICK
from amprewrite.ir.op_graph import OpNode
from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.planner.assignment import Contradiction, cheapest
from amprewrite.tables.errors import PolicyError
from amprewrite.tables.vocabulary import Colour, OpKind, Reason


class RepaintByCost(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        open_nodes = [node for node in problem.graph if node.name not in decisions.paints]
        if not open_nodes:
            return
        try:
            found = cheapest(problem.graph, decisions.colours, open_nodes, problem.costs)
        except Contradiction as error:
            raise PolicyError(f"{problem.name}: {error}") from error
        if found.gap:
            decisions.note(f"a plan up to {found.gap * TICK * 1e6:.3g} µs cheaper may exist: the search stopped at its limit")
        for node in open_nodes:
            decisions.paint(node.name, Colour.LOW if node.name in found.low else Colour.HIGH, Reason.NOT_REACHED)
        for node in open_nodes:
            _give_reason(problem, decisions, node)


def _give_reason(problem: Problem, decisions: Decisions, node: OpNode) -> None:
    """Record the reason for a node's colour (low or high) and, as its cause, a neighbour of the same colour."""
    colour = decisions.paints[node.name].colour
    ally, beside_low = "", False
    for name in _near(problem, node):
        beside = decisions.paints[name].colour
        beside_low = beside_low or beside is Colour.LOW
        if beside is colour and not ally:
            ally = name
        if ally and beside_low:
            break
    if colour is Colour.LOW:
        reason = Reason.ON_INTERNALLIST if node.kind is OpKind.INTERNAL and ally else Reason.CHEAPER_LOW
    else:
        reason = Reason.CHEAPER_HIGH if beside_low else Reason.NOT_REACHED
    decisions.paint(node.name, colour, reason, because_of=ally)


def _near(problem: Problem, node: OpNode) -> Iterator[str]:
    """Yield the names of the operands of a node, then of its readers."""
    for operand in node.operands:
        yield operand.value
    yield from problem.graph.digraph.successors(node.name)
