"""Colour every node that facts, overrides or lists decide.

1. Facts first: what carries no fp32 is plain; inputs, parameters and explicit dtypes stay high.
2. Overrides of nodes and modules come next, then the lists: allowed ops are low, denied ops are high.
3. High flows down from a denied op through infer, internal and clear ops, to the last infer or internal op it reaches,
   and stops at a cast to a dtype taken from another tensor. (Step 2 of TensorFlow's auto_mixed_precision.cc.) In our own
   lists an op that is denied for its input's sake alone, with a result that fits low, lets its readers be.
4. Nodes tied to one another take one colour; high wins.

What is left unpainted is for the painter or planner of the lists' rule. Nothing here depends on the order of the nodes.
"""

from __future__ import annotations

from collections import deque

from amprewrite.ir.op_graph import Demand, OpGraph, OpNode
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.program import Program
from amprewrite.tables.errors import PassError
from amprewrite.tables.ops.op_lists import find_op
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

SPREADS_DENY = (OpKind.INFER, OpKind.INTERNAL)


class Paint(Pass):
    name = "paint"

    def call(self, program: Program) -> bool:
        before = dict(program.paints)
        if program.given is None:
            paint_facts(program)
            paint_lists(program)
            if program.lists.rule in ("cost", "tf"):
                paint_after_deny(program)
            paint_ties(program)
        else:
            follow_given(program)
        return program.paints != before

    def ensures(self, program: Program) -> None:
        for node in program.graph:
            if not node.carries_fp32 and program.paints[node.name].colour is not Colour.PLAIN:
                raise PassError(f"{node.name} carries no fp32 value and was painted {program.paints[node.name].colour}")


def follow_given(program: Program) -> None:
    """Colours come from a plan that was made, and perhaps edited, before."""
    assert program.given is not None
    for node in program.given.nodes:
        if node.name in program.graph.nodes:
            program.paint(node.name, node.colour, node.reason, node.because_of, node.detail)
    for vertex in program.graph:
        if vertex.name not in program.paints:
            program.paint(vertex.name, Colour.PLAIN, Reason.NO_FLOAT)
    paint_ties(program)


def paint_facts(program: Program) -> None:
    for node in program.graph:
        if node.name in program.refused:
            program.paint(node.name, Colour.HIGH, Reason.REFUSED, detail=program.refused[node.name])
        elif node.pinned is not None:
            colour, reason, detail = node.pinned
            program.paint(node.name, colour, reason, detail=detail)


def paint_lists(program: Program) -> None:
    for node in program.graph:
        if node.role != "op" or not node.carries_fp32 or node.name in program.refused:
            continue
        asked = program.policy.asked_for(node.name, node.module)
        movable = node.name not in program.paints or program.paints[node.name].reason is Reason.CONSTANT
        if asked is not None and (asked.word == "high" or movable):
            program.paint(node.name, Colour(asked.word), Reason.ASKED, detail=asked.key)
        elif node.name in program.paints:
            continue
        elif node.kind is OpKind.ALLOW:
            program.paint(node.name, Colour.LOW, Reason.ON_ALLOWLIST)
        elif node.kind is OpKind.DENY:
            program.paint(node.name, Colour.HIGH, Reason.ON_DENYLIST)


def paint_after_deny(program: Program) -> None:
    """Breadth first from all denied ops at once: the cause of a node is the nearest denied op, the first by order on a tie."""
    reaches = _clear_ops_before_infer(program.graph)
    roots = [node.name for node in program.graph if _denied(program, node) and _spreads(program, node)]
    queue = deque((root, root) for root in roots)
    while queue:
        name, root = queue.popleft()
        for reader in sorted(program.graph.readers(name), key=lambda node: program.graph.rank[node.name]):
            free = reader.name not in program.paints and reader.carries_fp32 and not reader.relative
            if free and reader.name in reaches and _takes_colour(reader, name):
                program.paint(reader.name, Colour.HIGH, Reason.AFTER_DENY, because_of=root)
                queue.append((reader.name, root))


def _denied(program: Program, node: OpNode) -> bool:
    """Whether a denied op runs high, for whatever reason it does."""
    return node.kind is OpKind.DENY and node.name in program.paints and program.paints[node.name].colour is Colour.HIGH


def _spreads(program: Program, node: OpNode) -> bool:
    row = find_op(node.op)
    return program.lists.rule == "tf" or row is None or not row.bounded


def _takes_colour(reader: OpNode, value: str) -> bool:
    return any(o.value == value and o.demand in (Demand.COLOUR, Demand.PROMOTE) for o in reader.operands)


def _clear_ops_before_infer(graph: OpGraph) -> set[str]:
    """Infer and internal ops, and the clear ops from which only clear ops lead to one of those or to a denied op."""
    found = {node.name for node in graph if node.kind in SPREADS_DENY}
    queue = deque(node.name for node in graph if node.kind in (*SPREADS_DENY, OpKind.DENY))
    while queue:
        for feeder in graph.feeders(queue.popleft()):
            if feeder.kind is OpKind.CLEAR and feeder.name not in found:
                found.add(feeder.name)
                queue.append(feeder.name)
    return found


def paint_ties(program: Program) -> None:
    """One colour for every tie: high where one member is high, else low where one is low, else left open."""
    for members in program.graph.ties().values():
        painted = [name for name in members if name in program.paints]
        high = next((name for name in painted if program.paints[name].colour is Colour.HIGH), None)
        low = next((name for name in painted if program.paints[name].colour is Colour.LOW), None)
        cause = high or low
        if cause is None:
            continue
        colour = program.paints[cause].colour
        for name in members:
            if name not in program.paints or program.paints[name].colour is not colour:
                program.paint(name, colour, Reason.TIED, because_of=cause)
