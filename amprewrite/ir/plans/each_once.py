"""Choose the graphs that the plan of a whole model shows: one of each kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from amprewrite.ir.plans.plan import RegionPlan


def each_once(plans: Iterable[RegionPlan]) -> tuple[RegionPlan, ...]:
    """The plans without repetitions: two plans are alike if they differ in sizes or mode only, not in values, colours, edits or padding.

    A rewrite that follows the first of such plans finds the graphs of the others in it, too. The first takes over their notes.
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
    """The parts in which plans must agree to be alike. Symbolic sizes have no dtype and depend on the batch, so they do not count."""
    if not plan.nodes:
        return object()  # left in fp32: each graph has its own reason
    parts = plan.flat("")
    nodes = (node for part in parts for node in part.nodes if node.dtype or node.role == "output")
    padded = (value.value for part in parts for value in part.pads.values)
    done = (edit for part in parts for edit in part.edits)
    return plan.entry, *((node.name, node.op, node.inputs, node.colour, node.module) for node in nodes), *padded, *done


__all__ = ["each_once"]
