"""Find the pass that decided each node's colour: run the deciding passes again, and record after each pass the colours that changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from amprewrite.ir.decisions import Decisions
from amprewrite.ir.pass_base import run_passes
from amprewrite.ir.plans.plan import ModelPlan, NodePlan, RegionPlan
from amprewrite.ir.problem import Problem
from amprewrite.passes import pipeline
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.errors import PlanError

OPEN = "open"
"""Stands for the colour of a node whose colour no pass has decided yet."""


@dataclass(frozen=True)
class Decided:
    """The colour (low, high or plain) of one op after a pass, and the pass that decided the colour."""

    node: str
    op: str
    colour: str
    """low, high, plain or `OPEN`."""
    by: str
    """Name of the pass; "" for an open node."""
    why: str
    """The reason, the node that caused it and details, in words; "" for an open node."""


@dataclass(frozen=True)
class Progress:
    """The decisions on one region (the plan of one graph) after a pass."""

    region: str
    after: str
    """Name of the pass."""
    nodes: tuple[Decided, ...]
    casts: int
    """Number of casts that are planned so far."""
    edits: int
    """Number of edits of single ops that are planned so far."""


def decided_after(plan: ModelPlan, name: str) -> tuple[Progress, ...]:
    """Return the decisions on each graph of `plan` after the pass called `name`. Graphs decided without this pass are left out.

    Raises PlanError if no graph's pipeline has such a pass. Raises PlanError for a plan from a file, too: it cannot be decided again, since
    it does not hold the problem (graph, policy and evidence).
    """
    found = tuple(_progress(region, name) for region in plan.regions if _has(region, name))
    if not found:
        known = dict.fromkeys(each.name for region in plan.regions for each in pipeline(_problem(region)))
        raise PlanError(f"no pass that decided this plan is called {shown(name)}; in order they are {', '.join(known)}")
    return found


def _problem(region: RegionPlan) -> Problem:
    if not isinstance(region.basis, Problem):
        raise PlanError(f"the plan of {region.name} has no problem to decide again: name the model, not a saved or edited plan")
    return replace(region.basis, pads_off=True)


def _has(region: RegionPlan, name: str) -> bool:
    return any(each.name == name for each in pipeline(_problem(region)))


def _progress(region: RegionPlan, name: str) -> Progress:
    problem, decisions, by = _problem(region), Decisions(), dict[str, str]()
    for each in pipeline(problem):
        before = dict(decisions.paints)
        run_passes((each,), problem, decisions, region.name)
        by |= {node: each.name for node, painted in decisions.paints.items() if before.get(node) != painted}
        if each.name == name:
            break
    nodes = tuple(_decided(planned, decisions, by) for planned in region.nodes if planned.role == "op")
    return Progress(region.name, name, nodes, len(decisions.casts), len(decisions.edits))


def _decided(planned: NodePlan, decisions: Decisions, by: dict[str, str]) -> Decided:
    painted = decisions.paints.get(planned.name)
    if painted is None:
        return Decided(planned.name, planned.op, OPEN, "", "")
    why = ", ".join(part for part in (painted.reason.value, painted.because_of, painted.detail) if part)
    return Decided(planned.name, planned.op, painted.colour.value, by[planned.name], why)


def progress_rows(found: Sequence[Progress]) -> list[tuple[str, ...]]:
    """Return a row (node, colour, pass, why) for each op in `found`, a result of `decided_after`.

    If there are several graphs, node names have the form "region/node".
    """
    several = len(found) > 1
    return [
        (f"{each.region}/{node.node}" if several else node.node, node.colour, node.by, node.why) for each in found for node in each.nodes
    ]
