"""Choose the graphs that a plan of a whole model shows: each kind once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from amprewrite.ir.plans.plan import RegionPlan


def each_once(plans: Iterable[RegionPlan]) -> tuple[RegionPlan, ...]:
    """The plans, without those that are like an earlier one but for sizes or mode: the same values, colours, edits and padding.

    A rewrite that follows an earlier plan finds the graphs of the later one in it, too. The earlier one takes over its notes.
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
    """All that a graph must share with another to be shown with it. Symbolic sizes, which have no dtype, come and go with the batch."""
    if not plan.nodes:
        return object()  # left in fp32, each for a reason of its own
    parts = plan.flat("")
    nodes = (node for part in parts for node in part.nodes if node.dtype or node.role == "output")
    padded = (value.value for part in parts for value in part.pads.values)
    done = (edit for part in parts for edit in part.edits)
    return plan.entry, *((node.name, node.op, node.inputs, node.colour, node.module) for node in nodes), *padded, *done


__all__ = ["each_once"]
