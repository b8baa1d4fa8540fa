"""Find the region (plan of one graph) of a saved plan that fits a captured graph, and remove duplicate regions from a model's plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from amprewrite.ir.pass_base import Problem
from amprewrite.ir.plans.plan import Cast, ModelPlan, RegionPlan
from amprewrite.ir.policies.policy import Policy
from amprewrite.tables.errors import PlanError
from amprewrite.tables.vocabulary import Colour


def may_quantise(policy: Policy, given: ModelPlan | None) -> bool:
    """True if matrix products may read fp8 copies of their operands. The user's plan `given` decides this; if it is None, `policy` does."""
    return policy.products is not None if given is None else any(region.quantised for region in given.regions)


def match_region(plan: ModelPlan, problem: Problem) -> RegionPlan:
    """Return the region (the plan of one graph) of `plan` that has the same nodes as the graph of `problem`.

    Raises PlanError if the plan is for another low format, if no region fits, or if the region gives a node an impossible colour (format).
    If no region fits, the message names the first mismatch with the region whose number of nodes is closest to the graph's.
    """
    if plan.low != problem.policy.low.name:
        raise PlanError(f"the plan is for low = {plan.low}, this rewrite's is {problem.policy.low.name}; pass dtype={plan.low!r}")
    found = {region: _first_mismatch(region, problem) for region in plan.regions}
    fitting = [region for region, mismatch in found.items() if not mismatch]
    if fitting:
        # Several regions may fit, such as those of training and of inference, or of two branches with the same ops. The mode decides first,
        # then the module that is called, then the name.
        def alike(region: RegionPlan) -> tuple[bool, bool, bool]:
            named = region.name.rpartition(".")[2] == problem.name
            return region.training == problem.training, region.entry == problem.entry, named

        region = max(fitting, key=alike)
        _check_colours(region, problem)
        return region
    if not found:
        raise PlanError("the plan has no regions; make one with amprewrite.plan(model, args)")
    closest = min(found, key=lambda region: abs(len(region.nodes) - len(problem.graph.nodes)))
    raise PlanError(f"the plan is for another model, mode or kind of input: {found[closest]}; make it anew with amprewrite.plan")


def _first_mismatch(region: RegionPlan, problem: Problem) -> str:
    # Leave out ops without a dtype: their value is a size (SymInt), and a graph captured with fixed sizes has no such nodes. Leave out the
    # nodes of inputs and weights, too: torch.export lists them in another order than Dynamo, and lists unread ones. They are compared as
    # operands of ops. Sort the inputs and weights that an op reads after its first operand: for a batch norm the two orders differ.
    here = [node for node in problem.graph if node.role == "output" or (node.role == "op" and node.dtype)]
    there = [planned for planned in region.nodes if planned.role == "output" or (planned.role == "op" and planned.dtype)]
    ops = {planned.name for planned in there}
    for planned, node in zip(there, here, strict=False):
        if planned.name != node.name:
            return f"it has a node {planned.name} where the model has {node.name}"
        if planned.op != node.op:
            return f"{planned.name} is {planned.op} in the plan and {node.op} in the model"
        names = planned.inputs, tuple(operand.value for operand in node.operands)
        read, reads = ((some[:1], sorted(some[1:], key=lambda name: "" if name in ops else name)) for some in names)
        if read != reads:
            return f"{planned.name} reads {', '.join(planned.inputs)} in the plan and other values in the model"
    if len(there) != len(here):
        return f"it has {len(there)} nodes where the model has {len(here)}"
    return ""


def _check_colours(region: RegionPlan, problem: Problem) -> None:
    for planned in region.nodes:
        if planned.name not in problem.graph.nodes:
            continue
        node = problem.graph[planned.name]
        if (planned.colour is Colour.PLAIN) != (not node.carries_fp32):
            raise PlanError(f"{planned.name} is {planned.colour.value} in the plan, but it carries {node.dtype or 'no tensor'}")
        if planned.colour is Colour.LOW and node.role != "op" and node.pinned is not None:
            raise PlanError(f"{planned.name} is a model {node.role}: it cannot be low, only its copies can")


def check_casts(region: RegionPlan, casts: tuple[Cast, ...]) -> None:
    """Raise PlanError if the casts that `region` lists differ from `casts`, which were computed from the colours (formats) of its nodes.

    Casts are compared by value and format. A region that lists no casts is valid, because casts follow from colours.
    """
    planned, given = ({(cast.value, cast.to): cast for cast in some} for some in (region.casts, casts))
    for key in [*planned, *given]:
        if region.casts and (key in planned) != (key in given):
            what = "lists the cast" if key in planned else "lacks the cast"
            raise PlanError(
                f"the plan {what} {(planned | given)[key]}, but its colours say otherwise: casts follow from colours, so edit "
                "those (plan.edit does) and leave 'casts' empty"
            )


def each_once(plans: Iterable[RegionPlan]) -> tuple[RegionPlan, ...]:
    """Return `plans` without repeats. A repeat has the same module, nodes, colours, edits, pads and fp8 GEMMs as an earlier plan (`_kind`).

    Notes that only the repeat has are added to the earlier plan. A rewrite can apply the earlier plan to the graph of the repeat as well.
    """
    shown: dict[object, RegionPlan] = {}
    for plan in plans:
        first = shown.setdefault(key := _kind(plan), plan)
        mode = "" if plan.training == first.training else "in training: " if plan.training else "in inference: "
        said = (f"{mode}{note}" for note in plan.notes if note not in first.notes)
        shown[key] = replace(first, notes=tuple(dict.fromkeys((*first.notes, *said))))
    return tuple(shown.values())


def _kind(plan: RegionPlan) -> object:
    """Return a key that is equal for two plans if they have the same captured module, nodes, colours, edits, pads and fp8 GEMMs.

    A plan without nodes gets a unique key, so that it is never a repeat: its graph stays fp32 for a reason of its own. The key leaves out
    nodes whose value is a size (SymInt), because a graph captured with fixed sizes lacks them.
    """
    if not plan.nodes:
        return object()  # a new object equals no other key, so each graph that was left in fp32 is shown with its own reason
    parts = plan.flat("")
    nodes = (node for part in parts for node in part.nodes if node.dtype or node.role == "output")
    padded = (value.value for part in parts for value in part.pads.values)
    done = (edit for part in parts for edit in part.edits)
    fp8 = ((each.node, gemm.gemm) for part in parts for each in part.quantised.products for gemm in each.gemms if gemm.fp8)
    return plan.entry, *((node.name, node.op, node.inputs, node.colour, node.module) for node in nodes), *padded, *done, *fp8
