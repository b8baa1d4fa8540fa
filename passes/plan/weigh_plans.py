"""Price the plan beside those that painting rules would have made, with one table of prices.

1. TensorFlow's lists and rules, torch.autocast's, our lists painted by TensorFlow's rules, and everything fp32.
2. Each is painted on the same graph, its casts planned the same way, and priced on the same device.
3. Say in the plan if its prices have low copies of weights made at every call.

None can be cheaper than the plan and keep our lists: the plan is the cheapest of all that do. One that our lists forbid
may be; it is shown all the same. A given plan keeps what was weighed when it was made.
"""

from __future__ import annotations

from dataclasses import replace

from amprewrite.ir.cost import TICK, Prices
from amprewrite.ir.op_graph import Demand, OpGraph, OpNode
from amprewrite.ir.pass_base import Pass
from amprewrite.ir.plans.plan import Candidate
from amprewrite.ir.program import Program
from amprewrite.passes.paint.paint import Paint
from amprewrite.passes.paint.paint_local import PaintLocal
from amprewrite.passes.paint.paint_tf import PaintTF
from amprewrite.passes.repaint.repaint_small import all_high
from amprewrite.tables.ops.op_lists import OpLists, op_lists
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

PLANNED = "this plan"


class WeighPlans(Pass):
    name = "weigh-plans"

    def call(self, program: Program) -> bool:
        before = program.candidates
        if program.given is not None:
            program.candidates = program.given.candidates
            return program.candidates != before
        if program.lists.rule != "cost":
            return False
        prices = Prices(program.graph, program.costs.time)
        found = []
        for name, colours in {PLANNED: program.colours, **painted_otherwise(program)}.items():
            priced = prices.of(colours)
            found.append(Candidate(name, priced.total * TICK, priced.copies))
        program.candidates = tuple(found)
        _tell_of_weights(program)
        return program.candidates != before


def _tell_of_weights(program: Program) -> None:
    """Say so where a call without gradients makes copies of weights anew."""
    if program.training or program.costs.cached_weights:
        return
    if any(cast.weight for cast in program.casts):
        program.note("low copies of weights are priced as made at every call; frozen_weights() and cache_weights='step' keep them")


def painted_otherwise(program: Program) -> dict[str, dict[str, Colour]]:
    """Colours that each set of painting rules gives to the program's nodes, by the name of the rules."""
    low, device = program.policy.low, program.device
    found = {
        "tf rules": _painted(program, op_lists("tf", low, device)),
        "autocast rules": _painted(program, op_lists("autocast", low, device)),
        "our lists, tf rules": _painted(program, replace(program.lists, rule="tf")),
    }
    return {**found, "all fp32": all_high(program)}


def _painted(program: Program, lists: OpLists) -> dict[str, Colour]:
    nodes = {node.name: _relisted(node, lists) for node in program.graph} if lists.name != program.lists.name else program.graph.nodes
    graph = OpGraph(nodes, program.graph.digraph, program.graph.rank)
    scratch = Program(graph, program.policy, lists, training=program.training, device=program.device, refused=program.refused)
    for each in (Paint(), PaintTF(), PaintLocal()):
        each(scratch)
    return scratch.colours


def _relisted(node: OpNode, lists: OpLists) -> OpNode:
    """The node as other lists see it: an op on none of them is a high wall, and under torch.autocast follows its operands."""
    if node.role != "op" or not node.carries_fp32 or node.kind is None or node.pinned is not None:
        return node
    kind = lists.kind(node.op)
    if kind is None and (lists.rule == "local" or node.op == "to"):
        kind = OpKind.INFER if lists.rule == "local" else OpKind.CLEAR
    if kind is node.kind:
        return node
    if kind is not None:
        return replace(node, kind=kind)
    operands = tuple(replace(o, demand=Demand.HIGH) for o in node.operands)
    return replace(node, kind=None, operands=operands, pinned=(Colour.HIGH, Reason.UNLISTED, node.op))
