"""Compare the price of a plan with the prices of plans that follow the rules of other tools, such as torch.autocast.

1. The other plans are TensorFlow's lists and rules, torch.autocast's lists and rules, our lists with TensorFlow's rules, and all fp32.
2. Each plan is painted on the same graph, gets its casts in the same way, and is priced by the same table for the same device.
3. Add a note to a plan without gradients if its prices include low copies of weights that every call makes.
4. If the plan must agree with other graphs of the model, decide the graph alone, too. If that is cheaper, add a note on the difference.

The plan is the cheapest of all plans that keep to our lists. A plan that our lists forbid may be cheaper, and is shown all the same. If
the user gives a plan, it keeps the prices that were recorded when it was made.

Op names hard-coded in this pass: `to`. If the lists of another tool lack it, it takes the format of its operand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from amprewrite.ir.cost import TICK, Prices
from amprewrite.ir.op_graph import Demand, OpNode
from amprewrite.ir.pass_base import Decisions, Pass, Problem, run_passes
from amprewrite.ir.plans.plan import LEFT, Candidate, RegionPlan
from amprewrite.passes import BY_COST
from amprewrite.passes.paint.paint_after_deny import PaintAfterDeny
from amprewrite.passes.paint.paint_autocast import PaintAutocast
from amprewrite.passes.paint.paint_lists import PaintLists
from amprewrite.passes.paint.paint_tf import PaintTF
from amprewrite.passes.paint.paint_ties import PaintTies
from amprewrite.passes.plan.plan_pads import gains_nothing, plan_pads
from amprewrite.passes.repaint.decline_small_graphs import all_high
from amprewrite.passes.repaint.repaint_as_autocast import RepaintAsAutocast
from amprewrite.passes.repaint.repaint_shares import RepaintShares
from amprewrite.passes.repaint.repaint_small_steps import RepaintSmallSteps
from amprewrite.tables.ops.op_lists import OpLists, op_lists
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

PLANNED = "this plan"
"""Name of the plan itself among the candidates."""
PAINTERS: dict[str, tuple[Pass[Problem, Decisions], ...]] = {
    "tf": (PaintLists(), PaintAfterDeny(past_bounded=True), PaintTies(), PaintTF()),
    "autocast": (PaintLists(), PaintTies(), PaintAutocast()),
}
"""{rule of another tool: the passes that choose the colours of a plan by this rule}."""
SOUND: tuple[Pass[Problem, Decisions], ...] = (RepaintSmallSteps(), RepaintAsAutocast(), RepaintShares())
"""Passes that keep ops in fp32 if rounding would do harm. Of the other plans, only that with our lists and TensorFlow's rules runs them."""
PARITY = "parity with the model's other graphs costs "
"""Beginning of the note on how much more this graph costs because all graphs of the model share one plan."""
LEAST_TOLD = 1e-3
"""Smallest relative difference in price that is worth a note."""


def weighed(plan: RegionPlan) -> RegionPlan:
    """Return `plan` with the additions that only a human reader needs: prices, notes and reasons. The plans of subgraphs get them, too.

    If our own rules made `plan`, it gets its price and the prices of other plans for the same graph. If the device does not gain from
    padding, it gets reasons that say so. Nothing that runs depends on these additions, so they are made only when a plan is read.
    """
    problem, plan = plan.basis, replace(plan, bodies=tuple(map(weighed, plan.bodies)))
    if problem is None or any(note.startswith(LEFT) for note in plan.notes):
        return plan
    if problem.given is not None:
        return replace(plan, candidates=problem.given.candidates, priced_on=problem.given.priced_on)
    colours = {node.name: node.colour for node in plan.nodes}
    if gains_nothing(problem):
        plan = replace(plan, pads=plan_pads(problem, plan.casts, colours))
    if problem.lists.rule != "cost":
        return plan
    prices = Prices(problem.graph, problem.own_costs.time)
    priced = {name: prices.of(each) for name, each in {PLANNED: colours, **painted_otherwise(problem, colours)}.items()}
    return replace(
        plan,
        candidates=tuple(Candidate(name, each.total * TICK, each.copies) for name, each in priced.items()),
        priced_on=problem.costs.place,
        notes=tuple(dict.fromkeys((*plan.notes, *_on_weights(problem, plan), *_on_parity(problem, colours)))),
    )


def _on_weights(problem: Problem, plan: RegionPlan) -> Iterator[str]:
    """Yield a note if each call without gradients makes new low-precision copies of weights."""
    if not (problem.training or problem.costs.cached_weights) and any(cast.weight for cast in plan.casts):
        yield "low copies of weights are priced as made at every call; frozen_weights() and cache_weights='step' keep them"


def _on_parity(problem: Problem, colours: dict[str, Colour]) -> Iterator[str]:
    """Yield a note if a plan for this graph alone would be cheaper than `colours`, the plan that agrees with the model's other graphs."""
    alone = problem.apart
    if problem.policy.parity is None or (problem.costs == alone.costs and not problem.agreed.places):
        return
    free = Decisions()
    run_passes(BY_COST, alone, free, alone.name)
    prices = Prices(alone.graph, alone.costs)
    here, there = prices.of(colours).total * TICK, prices.of(free.colours).total * TICK
    if here > there * (1 + LEAST_TOLD):
        more, alone_takes, takes = 100 * (here / there - 1), 1e6 * there, 1e6 * here
        yield f"{PARITY}{more:.1f} %: a plan of its own would take {alone_takes:.4g} µs, not {takes:.4g} µs"


def painted_otherwise(problem: Problem, colours: dict[str, Colour]) -> dict[str, dict[str, Colour]]:
    """Return {name of the rules: {node: colour}} for plans of this graph by the rules of other tools, such as torch.autocast."""
    low, device = problem.policy.low, problem.device
    found = {
        "tf rules": _painted(problem, op_lists("tf", low, device)),
        "autocast rules": _painted(problem, op_lists("autocast", low, device)),
        "our lists, tf rules": _painted(problem, replace(problem.lists, rule="tf")),
    }
    return {**found, "all fp32": all_high(problem, colours)}


def _painted(problem: Problem, lists: OpLists) -> dict[str, Colour]:
    graph = problem.graph
    if lists.name != problem.lists.name:
        graph = graph.exchanged({node.name: _relisted(node, lists) for node in graph})
    relisted, decisions = replace(problem, graph=graph, lists=lists), Decisions()
    run_passes((*PAINTERS[lists.rule], *(SOUND if lists.name == problem.lists.name else ())), relisted, decisions, problem.name)
    return decisions.colours


def _relisted(node: OpNode, lists: OpLists) -> OpNode:
    """Return `node` with the kind (allow, infer, deny, ...) that the op lists of another tool, `lists`, give its op.

    An op on no list is forced to fp32, with two exceptions: under torch.autocast's rules it takes the format of its operands, and `to`
    takes the format of its operand under all rules.
    """
    if node.role != "op" or not node.carries_fp32 or node.kind is None or node.pinned is not None:
        return node
    kind = lists.kind(node.op)
    if kind is None and (lists.rule == "autocast" or node.op == "to"):
        kind = OpKind.INFER if lists.rule == "autocast" else OpKind.CLEAR
    if kind is node.kind:
        return node
    if kind is not None:
        return replace(node, kind=kind)
    operands = tuple(replace(o, demand=Demand.HIGH) for o in node.operands)
    return replace(node, kind=None, operands=operands, pinned=(Colour.HIGH, Reason.UNLISTED, node.op))
