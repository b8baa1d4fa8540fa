"""Find values that a plan makes low although they leave the range of its low format. The evidence is the value ranges of a run in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from amprewrite.graphs.fx.captured import Captured
from amprewrite.ir.evidence.range_rules import POLES
from amprewrite.ir.evidence.ranges import RegionRanges, fingerprint
from amprewrite.ir.op_graph import OpNode
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import Colour

ROOM = 2
"""Safety factor: low ops are assumed to return values up to this many times larger or smaller than fp32 ops."""
_EXCHANGES, _DIVIDES = ops_with(Trait.EXCHANGES_INFINITIES), ops_with(Trait.DIVIDES)


def exchanges_infinities(captured: Captured) -> bool:
    """True if an op of the graph may hide an infinity: it returns a finite value for an infinity, or tests for infinities."""
    return any(vertex.op in _EXCHANGES for vertex in captured.problem.graph)


def dangers(captured: Captured, plan: RegionPlan, seen: Mapping[str, RegionRanges]) -> Iterator[str]:
    """Yield a description of each value that leads to an infinity because `plan` makes it, or a copy of it, in the low format.

    Such a value is too large, or it becomes zero and an op that returns an infinity for zero (`log`, `reciprocal`) reads it. `seen` holds
    the ranges of an fp32 run, by fingerprint of the graph.
    """
    yield from too_large(captured, plan, seen)
    smallest = ROOM * captured.problem.policy.low.smallest_subnormal
    for each, planned in _planned(captured, plan):
        ranges, made = seen.get(fingerprint(each.problem.graph)), _made_low(planned)
        found = {} if ranges is None else {name: value for name, value in ranges.values.items() if value.smallest < smallest}
        low = made | _copied_low(each, planned)
        for vertex in each.problem.graph if found else ():
            for name in poles(vertex) if vertex.name in made else ():
                if name in low and name in found:
                    yield f"{name} comes down to {found[name].smallest:.3g} before {vertex.name}"


def too_large(captured: Captured, plan: RegionPlan, seen: Mapping[str, RegionRanges], room: float = ROOM) -> Iterator[str]:
    """Yield a description of each value that `plan` makes or copies low although `room` times the value exceeds the low format's range.

    Only results of ops get this margin; the values of weights are known. Values that may be clamped to ±max, such as masks, are left out.
    `seen` is as for `dangers`.
    """
    end = captured.problem.policy.low.max
    for each, planned in _planned(captured, plan):
        graph, ranges = each.problem.graph, seen.get(fingerprint(each.problem.graph))
        low = {name for name in _made_low(planned) if not graph[name].may_saturate} | _copied_low(each, planned)
        for name, value in ranges.values.items() if ranges is not None else ():
            if name in low and value.amax * (room if graph[name].role == "op" else 1) > end:
                yield f"{name} reaches {value.amax:.3g}"


def _made_low(plan: RegionPlan) -> set[str]:
    """Return the names of the ops that `plan` runs in the low format."""
    return {node.name for node in plan.nodes if node.colour is Colour.LOW and node.role == "op"}


def _copied_low(captured: Captured, plan: RegionPlan) -> set[str]:
    """Return the names of the values that `plan` casts to the low format without clamping."""
    return {cast.value for cast in plan.casts if cast.to == captured.problem.policy.low.name and not cast.saturate}


def unobserved(captured: Captured, plan: RegionPlan) -> bool:
    """True if `plan` runs ops low in the body graph of a loop or a condition. No run observes the values of such a graph."""
    bodies = {each.name: each for each in plan.bodies}
    parts = {part.problem.name: part for part in captured.parts.values()}
    hidden = (body for name, body in bodies.items() if name not in parts)
    if any(map(_made_low, hidden)):
        return True
    return any(unobserved(part, bodies[name]) for name, part in parts.items() if name in bodies)


def poles(vertex: OpNode) -> list[str]:
    """Return the names of the operands for which `vertex` has a pole at zero: it returns an infinity if such an operand is 0."""
    if vertex.op in POLES:
        return [operand.value for operand in vertex.operands]
    return [vertex.operands[1].value] if vertex.op in _DIVIDES and len(vertex.operands) == 2 else []


def _planned(captured: Captured, plan: RegionPlan) -> list[tuple[Captured, RegionPlan]]:
    """Return (graph, plan) for this graph and for the body graphs of its checkpoints, nested ones included."""
    plans = {each.name: each for each in plan.bodies}
    found = [(captured, plan)]
    for part in captured.parts.values():
        if part.problem.name in plans:
            found += _planned(part, plans[part.problem.name])
    return found
