"""Choose the graphs that the plan of a whole model shows: one of each kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from amprewrite.ir.plans.plan import RegionPlan


def each_once(plans: Iterable[RegionPlan]) -> tuple[RegionPlan, ...]:
    """Return the first plan of each kind. Plans of one kind have the same nodes, colours, edits and padding.

    The notes of the plans that are left out are added to the first plan of their kind. A rewrite that follows the first plan can apply it
    to the graphs of the left-out plans as well.
    """
    shown: dict[object, RegionPlan] = {}
    for plan in plans:
        first = shown.setdefault(key := _kind(plan), plan)
        said = (f"in {_mode(plan)}: {note}" if plan.training != first.training else note for note in plan.notes if note not in first.notes)
        shown[key] = replace(first, notes=tuple(dict.fromkeys((*first.notes, *said))))
    return tuple(shown.values())


def _mode(plan: RegionPlan) -> str:
    return "training" if plan.training else "inference"


def _kind(plan: RegionPlan) -> object:
    """Return a key that is equal for plans of one kind: plans with the same nodes, colours, edits and padding.

    Nodes whose value is a size (SymInt) instead of a tensor do not count, because a graph captured with fixed sizes has no such nodes.
    """
    if not plan.nodes:
        return object()  # an object equals no other key: each graph that was left in fp32 is shown with its own reason
    parts = plan.flat("")
    nodes = (node for part in parts for node in part.nodes if node.dtype or node.role == "output")
    padded = (value.value for part in parts for value in part.pads.values)
    done = (edit for part in parts for edit in part.edits)
    return plan.entry, *((node.name, node.op, node.inputs, node.colour, node.module) for node in nodes), *padded, *done
