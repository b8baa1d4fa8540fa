"""Detect whether low values of a graph may overflow unseen: an infinity that shows in no result gives wrong numbers silently.

An infinity propagates from op to op, but not through all: `nan_to_num` makes it finite, a number divided by it is zero, and a comparison
returns no float. A graph inside an op, such as a loop's body, may do any of that. Ops that saturate, such as `tanh` and `clamp`, return for
an infinity the same as for a large value, and count as passing it on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.fx

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import differentiable, example_value, is_checkpoint, is_opaque, tensors, written
from amprewrite.ir.evidence.ranges import RegionRanges, fingerprint
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.tables.ops.op_lists import Trait, op_name, ops_with
from amprewrite.tables.vocabulary import Colour

_EXCHANGES, _INVERTS = ops_with(Trait.EXCHANGES_INFINITIES), ops_with(Trait.INVERSE)
_DIVIDES, _RAISES = ops_with(Trait.DIVIDES), ops_with(Trait.RAISES)


def may_overflow_unseen(captured: Captured, plan: RegionPlan) -> bool:
    """True if an op that `plan` runs low, in the graph or in a checkpoint body, could overflow while all results stay finite."""
    return any(_unseen(each, _made_low(planned)) for each, planned in _planned(captured, plan))


def exchanges_infinities(captured: Captured) -> bool:
    """True if an op of the graph returns a finite value for an infinity, or tests for infinities."""
    return any(vertex.op in _EXCHANGES for vertex in captured.problem.graph)


def beyond_range(captured: Captured, plan: RegionPlan, seen: Mapping[str, RegionRanges]) -> bool:
    """True if a value that `plan` makes or copies low was seen beyond that format's range. `seen` are ranges in fp32, by fingerprint.

    Values that may be clamped to ±max are left out: they are masks.
    """
    low = captured.problem.policy.low
    for each, planned in _planned(captured, plan):
        made = {name for name in _made_low(planned) if not each.problem.graph[name].may_saturate}
        names = made | {cast.value for cast in planned.casts if cast.to == low.name and not cast.saturate}
        ranges = seen.get(fingerprint(each.problem.graph))
        if ranges is not None and any(value.amax > low.max for name, value in ranges.values.items() if name in names):
            return True
    return False


def _planned(captured: Captured, plan: RegionPlan) -> list[tuple[Captured, RegionPlan]]:
    """This graph and the bodies of its checkpoints, each with its plan."""
    plans = {each.name: each for each in plan.bodies}
    found = [(captured, plan)]
    for part in captured.parts.values():
        if part.problem.name in plans:
            found += _planned(part, plans[part.problem.name])
    return found


def _made_low(plan: RegionPlan) -> set[str]:
    """The ops that `plan` runs low."""
    return {node.name for node in plan.nodes if node.colour is Colour.LOW and node.role == "op"}


def _unseen(captured: Captured, low: set[str]) -> bool:
    """True if an infinity in one of the ops `low` may not reach a result."""
    if low and exchanges_infinities(captured):
        return True
    shown: set[torch.fx.Node] = set()
    for node in reversed(captured.module.graph.nodes):  # readers before makers
        shows = node.op in ("output", "placeholder", "get_attr") or node in shown or not shown.isdisjoint(written(node))
        shown.update(_passed_on(node) if shows else ())
    nodes = (captured.nodes[name] for name in low)
    return any(node.users and node not in shown for node in nodes)


def _passed_on(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The node, and its operands whose infinities show in its result."""
    name, first = op_name(node.target), node.args[:1]
    made = tensors(example_value(node))
    if node.op == "output":
        return node.all_input_nodes
    if is_opaque(node) and not is_checkpoint(node):  # the graph inside is not searched
        return [node]
    if not node.op.startswith("call") or (made and not any(differentiable(each) for each in made)):
        return [node]
    if name in _INVERTS or (name in _RAISES and not _grows(node.args)):
        return [node]
    passed = first if name in _DIVIDES | _RAISES else node.all_input_nodes
    return [node, *(each for each in passed if isinstance(each, torch.fx.Node))]


def _grows(args: tuple[object, ...]) -> bool:
    """True if the exponent of a power is a positive number."""
    return len(args) > 1 and isinstance(args[1], int | float) and args[1] > 0


__all__ = ["beyond_range", "exchanges_infinities", "may_overflow_unseen"]
