"""Explain a plan in sentences: a node's format, the rule that decided it, the node that caused it, and the price of a change.

Heavy ops (matmuls and convolutions) that stay fp32 always come first, each with the condition under which it would run low.
"""

from __future__ import annotations

from collections import Counter

from amprewrite.ir.plans.plan import ModelPlan, NodePlan, RegionPlan
from amprewrite.report.counts import amount, by_impact, is_heavy_high, share
from amprewrite.report.questions.what_if import Change, WhatIf, conditions
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.vocabulary import Colour

MOST_TRIED = 4
"""Largest number of nodes in a module for which changes are tried. Explanations of larger modules have no trials."""
MOST_HEAVY = 8
"""Number of heavy ops in fp32 that are listed one by one; any further ops are only counted."""


def explain(plan: ModelPlan, name: str = "") -> str:
    """Return sentences about the node or module `name`, or about the whole plan without a name.

    Raises PlanError for an unknown name; the message lists similar names.
    """
    if not name:
        every = f"no heavy op was left high: every matmul and convolution multiplies {plan.low}"
        whole = heavy(plan) or [every] * any(node.flops for node in plan.nodes)
        return "\n".join(map(printable, [*whole, *_by_reason(plan)]))
    found = plan.find(name)
    if len(found) > MOST_TRIED:
        heavy_first = sorted(found, key=lambda node: not is_heavy_high(region_of(plan, node), node))
        return "\n".join(printable(line) for node in heavy_first for line in _sentences(plan, node, None))
    asked: dict[str, WhatIf | None] = {}
    lines = []
    for node in found:
        region = region_of(plan, node)
        if region.name not in asked:
            asked[region.name] = WhatIf.of(region)
        lines += _sentences(plan, node, asked[region.name])
    return "\n".join(map(printable, lines))


def region_of(plan: ModelPlan, node: NodePlan) -> RegionPlan:
    """Return the region (the plan of one graph) that holds `node`, which is one of `plan.nodes`."""
    name = node.name.partition("/")[0]
    return next((region for region in plan.regions if len(plan.regions) > 1 and region.name == name), plan.regions[0])


def bare_name(plan: ModelPlan, node: NodePlan) -> str:
    """Return the name of `node` without the prefix of its region, which names in a plan of several graphs have."""
    return node.name.partition("/")[2] if len(plan.regions) > 1 else node.name


def _sentences(plan: ModelPlan, node: NodePlan, asked: WhatIf | None) -> list[str]:
    """Return sentences on a node's format and reason, its casts, and changes that would alter its format.

    With `asked`, such changes are found by planning the graph with them. Without it, only a matrix product or convolution in fp32 gets a
    sentence on a change that could make it low.
    """
    bare, region = bare_name(plan, node), region_of(plan, node)
    heavy_high = is_heavy_high(region, node)
    lines = [_left_high(node) if heavy_high else node.sentence()]
    lines += [f"  its result is cast: {cast}" for cast in region.casts if cast.value == bare]
    lines += [f"  it reads a cast copy of {cast.value} in {cast.to}" for cast in region.casts if bare in cast.users]
    lines += region.quantised.about(bare) + region.pads.about(bare)
    lines += [f"  {edit}" for edit in region.edits if edit.node == bare]
    if asked is not None or heavy_high:
        lines += [f"  {line}" for line in what_would_change(node, bare, plan.low, asked)]
    return lines


def what_would_change(node: NodePlan, bare: str, low: str, asked: WhatIf | None) -> list[str]:
    """Return sentences on changes that would give the node its other colour; [] for a node that is no op or carries no fp32 values.

    `bare` is the node's name without its region. If the node's reason names a condition, the first sentence states it ("it would run low
    ..."). With `asked`, trial plans also show which overrides would change the colour, and at what price.
    """
    if node.colour is Colour.PLAIN or node.role != "op":
        return []
    other = "high" if node.colour is Colour.LOW else "low"
    condition = conditions(node, low)
    lines = [f"it would run {other} {condition}"] if condition else []
    if asked is None:
        return lines
    forced = asked.forced(bare)
    cause = asked.cause(bare) if forced is not None and not condition else None
    if cause is not None:
        lines.append(f"it would run {other} if {_and(cause.nodes)} did: {_change(cause)}")
    elif forced is not None and not condition:
        lines.append("no small set of other nodes decides it: its colour is the cheapest")
    if forced is not None:
        lines.append(f"it alone can be told to: {_change(forced)}")
    return lines


def _change(change: Change) -> str:
    return f"overrides={change.overrides} gives {change.price()}"


def _and(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def heavy(plan: ModelPlan) -> list[str]:
    """Return sentences on matmuls and convolutions that stay fp32, most FLOPs first, each with the condition for running low."""
    found = by_impact(plan)
    lines = []
    for node in found[:MOST_HEAVY]:
        lines.append(_left_high(node))
        condition = conditions(node, plan.low)
        lines += [f"  it would run low {condition}"] if condition else []
    rest = found[MOST_HEAVY:]
    if rest:
        lines.append(f"and {len(rest)} more heavy ops left high ({amount(sum(node.flops for node in rest), 'FLOP')})")
    return lines


def _left_high(node: NodePlan) -> str:
    return f"heavy op left high: {node.sentence()}, {amount(node.flops, 'FLOP')}"


def _by_reason(plan: ModelPlan) -> list[str]:
    """Return one sentence for each colour (low or high) and reason: the number of ops with that reason, and the first op's name."""
    ops = [node for node in plan.nodes if node.role == "op" and node.colour is not Colour.PLAIN]
    counted = Counter((node.colour, node.reason) for node in ops)
    lines = []
    for (colour, reason), count in sorted(counted.items(), key=lambda item: (item[0][0].value, -item[1])):
        first = next(node for node in ops if (node.colour, node.reason) == (colour, reason))
        names = first.name if count == 1 else f"{first.name} and {count - 1} more"
        lines.append(f"{count} of {len(ops)} ops ({share(count, len(ops))}) run {colour.value} because {reason.value}: {names}")
    return lines
