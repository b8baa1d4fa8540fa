"""Explain a plan in sentences: a node's format, the rule that decided it, the node that caused it, and the price of a change.

If the whole plan is explained, heavy ops (matmuls and convolutions) that stay fp32 come first, each with a condition for running low.

`WhatIf` finds changes that would alter a node's colour (low or high). A region (the plan of one graph) keeps the `Problem` (graph, policy
and evidence) from which the passes decided it. Deciding is a pure function of that problem and takes milliseconds. So each change is
tried by deciding again, and every answer is checked:

1. `forced` overrides the node itself, and compares the new plan with the old: other nodes that change colour, casts, and predicted time.
2. `cause` looks for a small set of other nodes whose override also changes this node. It tries the cause that the plan records, then ops
   on the deny list upstream if one is the reason, then the nearest nodes of the same colour: first one by one, then several together.
   Nodes that turn out not to be needed are dropped from the set.

`decided_after` finds the pass that decided each node's colour. It records the colours that each deciding pass changes.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from amprewrite.ir.cost import TICK, Prices
from amprewrite.ir.op_graph import OpGraph, reached
from amprewrite.ir.pass_base import Decisions, Problem, run_passes
from amprewrite.ir.plans.plan import ModelPlan, NodePlan, RegionPlan
from amprewrite.ir.policies.policy import Override
from amprewrite.passes import pipeline, plan_region
from amprewrite.report.counts import amount, by_impact, is_heavy_high, share
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.boundary.printable import printable
from amprewrite.tables.errors import PlanError
from amprewrite.tables.formats import FORMATS, FP32
from amprewrite.tables.vocabulary import Colour, OpKind, Reason

MOST_ALONE, MOST_TOGETHER = 6, 16
"""`WhatIf.cause` overrides at most MOST_ALONE nodes one by one, then at most MOST_TOGETHER nodes together."""
OTHER = {Colour.LOW: Colour.HIGH, Colour.HIGH: Colour.LOW}


@dataclass(frozen=True)
class Change:
    """The effect of overriding the colour (low or high) of some nodes of one graph: how its plan and its price change."""

    colour: Colour
    """The colour (low or high) to which the nodes are overridden."""
    nodes: tuple[str, ...]
    """The nodes that are overridden."""
    moved: tuple[str, ...]
    """Further nodes that change colour as a result. The node whose colour the caller wants to change is left out."""
    casts: int
    """Number of additional casts of activations; negative if there are fewer."""
    weight_casts: int
    """Number of additional low copies of weights; negative if there are fewer."""
    cast_bytes: int
    """Number of additional bytes that all casts together read and write."""
    seconds: float = 0.0
    """Additional modelled time of one pass, in seconds."""

    @property
    def overrides(self) -> dict[str, str]:
        """The change as a value for the option `overrides=` of `rewrite`, such as {"node:linear_3": "fp32"}."""
        word = "low" if self.colour is Colour.LOW else "fp32"
        return {f"node:{glob.escape(name)}": word for name in self.nodes}

    def price(self) -> str:
        """Return the price in words: how many casts, bytes and seconds the change adds or saves, and how many more nodes change colour."""
        parts = [_count(self.casts, "cast"), _count(self.weight_casts, "copy of a weight", "copies of weights")]
        said = " and ".join(part for part in parts if part) or "no cast more or fewer"
        sign = "+" if self.cast_bytes > 0 else "-"
        size = f" ({sign}{amount(abs(self.cast_bytes), 'B')})" if self.cast_bytes else ""
        moved = f"; {len(self.moved)} more node{'s' * (len(self.moved) != 1)} would follow" if self.moved else ""
        time = f", {1e6 * self.seconds:+.3g} µs a pass" if self.seconds else ""
        return f"{said}{size}{time}{moved}"


class WhatIf:
    """Plans one graph anew with other colours (low or high) for some nodes. `WhatIf.of` returns None for a saved or edited plan."""

    def __init__(self, region: RegionPlan) -> None:
        self.basis = _problem(region)
        self.base = self.decide({})
        self.colours = {node.name: node.colour for node in self.base.nodes}
        self.prices = Prices(self.basis.graph, self.basis.costs.time)

    @classmethod
    def of(cls, region: RegionPlan) -> WhatIf | None:
        return cls(region) if isinstance(region.basis, Problem) else None

    def decide(self, colours: Mapping[str, Colour]) -> RegionPlan:
        """Plan the graph anew with additional overrides {node: colour}, and return the new plan.

        If the user gave a plan (`plan=`) for the graph, the colours are changed in that plan instead.
        """
        basis = self.basis
        if basis.given is not None:
            nodes = tuple(replace(node, colour=colours.get(node.name, node.colour)) for node in basis.given.nodes)
            basis = replace(basis, given=replace(basis.given, nodes=nodes, casts=()))
        elif colours:
            kept = tuple(o for o in basis.policy.overrides if not any(o.matches_node(name) for name in colours))
            asked = tuple(Override(f"node:{name}", "node", glob.escape(name), colour.value) for name, colour in colours.items())
            basis = replace(basis, policy=replace(basis.policy, overrides=(*kept, *asked)))
        return plan_region(basis)

    def forced(self, name: str) -> Change | None:
        """Return the effect of an override that gives the node `name` its other colour (low or high); None if no override can do this."""
        return self._change(name, (name,))

    def cause(self, name: str) -> Change | None:
        """Find a small set of other nodes whose override makes `name` change colour. Return the effect; None if there is no such set."""
        candidates = list(self._candidates(name))
        for each in candidates[:MOST_ALONE]:
            change = self._change(name, (each,))
            if change is not None:
                return change
        for size in range(2, len(candidates) + 1):
            if self._change(name, tuple(candidates[:size])) is not None:
                return self._fewest(name, candidates[:size])
        return None

    def _fewest(self, name: str, nodes: list[str]) -> Change | None:
        for each in reversed(nodes):
            fewer = [other for other in nodes if other != each]
            if fewer and self._change(name, tuple(fewer)) is not None:
                nodes = fewer
        return self._change(name, tuple(nodes))

    def _candidates(self, name: str) -> Iterator[str]:
        """Yield at most MOST_TOGETHER ops that may have caused the colour of the node `name`, the likeliest first. All have this colour."""
        colour, graph = self.colours[name], self.basis.graph
        planned = {node.name: node for node in self.base.nodes}
        nearest = list(_by_distance(graph, name))
        above = set(reached([name], graph.digraph.predecessors))
        denied = [n for n in nearest if n in above and graph[n].kind is OpKind.DENY]
        told = [planned[name].because_of, *(denied if planned[name].reason is Reason.AFTER_DENY else ()), *nearest]
        same = (n for n in dict.fromkeys(told) if n in self.colours and n != name and self.colours[n] is colour and graph[n].role == "op")
        yield from islice(same, MOST_TOGETHER)

    def _change(self, name: str, nodes: tuple[str, ...]) -> Change | None:
        """Return the effect of overriding `nodes` to the colour that the node `name` does not have; None if `name` keeps its colour."""
        colour = OTHER.get(self.colours[name])
        if colour is None:
            return None
        plan = self.decide(dict.fromkeys(nodes, colour))
        after = {node.name: node.colour for node in plan.nodes}
        if after[name] is not colour:
            return None
        moved = tuple(n for n, c in after.items() if c is not self.colours[n] and n not in nodes and n != name)
        old, new = self._counts(self.base), self._counts(plan)
        seconds = (self.prices.of(after).total - self.prices.of(self.colours).total) * TICK
        return Change(colour, nodes, moved, new[0] - old[0], new[1] - old[1], new[2] - old[2], seconds)

    def _counts(self, plan: RegionPlan) -> tuple[int, int, int]:
        """Return the number of casts of activations, the number of casts of weights, and the bytes that all these casts read and write."""
        weights = sum(cast.weight for cast in plan.casts)
        size = FP32.bytes + FORMATS[self.basis.policy.low.name].bytes
        moved = sum(self.basis.graph[cast.value].numel for cast in plan.casts if cast.value in self.basis.graph.nodes)
        return len(plan.casts) - weights, weights, moved * size


def _by_distance(graph: OpGraph, name: str) -> Iterator[str]:
    """Yield all other nodes that are connected with node `name` by edges in either direction, nearest first."""
    near = graph.digraph
    return islice(reached([name], lambda n: chain(near.predecessors(n), near.successors(n))), 1, None)


def _count(number: int, word: str, words: str = "") -> str:
    if not number:
        return ""
    plural = words or f"{word}s"
    return f"{abs(number)} {word if abs(number) == 1 else plural} {'more' if number > 0 else 'fewer'}"


def conditions(node: NodePlan, low: str) -> str:
    """Return the condition, which follows from the recorded reason, under which `node` would have its other colour (low or high).

    The text completes the sentence "it would run low …" or "it would run high …" (in fp32). It is "" if no condition follows from the
    reason, as when the colours of neighbours decide. `low` names the low format.
    """
    text = _CONDITIONS.get(node.reason, "")
    return text.format(op=node.op, name=node.name, detail=node.detail, low=low, source=node.source or "its line")


_CONDITIONS = {
    Reason.ON_ALLOWLIST: "with its op on another list: overrides={{'{op}': 'deny'}}",
    Reason.ON_DENYLIST: "with its op on another list: overrides={{'{op}': 'low'}}",
    Reason.FORCED: "with lists='default', or with an override",
    Reason.UNLISTED: "if {op} had a row in the op table, with its behaviour in {low}",
    Reason.UNTYPED: "if the file declared the type of {detail}, in its value_info",
    Reason.NO_FLOAT: "never: there is nothing to cast",
    Reason.NOT_DENSE: "on dense tensors: this one is {detail}",
    Reason.HALF: "never: it is in {detail} already",
    Reason.BOUNDARY: "never: {detail}; only its copies can be low",
    Reason.PARAMETER: "never: the optimizer steps it; only its copies can be low",
    Reason.EXPLICIT_DTYPE: "without the fp32 that {source} asks for ({detail}); `.to(x.dtype)` leaves the choice open",
    Reason.INSIDE_AUTOCAST: "without the torch.autocast region around it",
    Reason.OPAQUE: "without the inner graph around it ({detail})",
    Reason.TRANSFORMED: "without the torch.func transform around it",
    Reason.UNSCALED: "in bf16; code of the user ({detail}) sees its gradients unscaled",
    Reason.UNSEEN: "in bf16; or if {detail} computed in half precision itself",
    Reason.UNREAD: "in bf16, or in inference; or if the graph read the result of {detail}",
    Reason.BODY: "with another plan for the graph {detail}",
    Reason.NO_KERNEL: "on a device that has the kernel: there is no {detail}",
    Reason.UNSET: "where nothing is trained, with other sizes, or on another device ({detail})",
    Reason.LOW_BACKWARD: "in inference, or where gradients are added up in fp32 ({detail})",
    Reason.UNEVEN: "on a device whose kernel rounds all elements alike ({detail})",
    Reason.REFUSED: "if the op took {low}: it said {detail}",
    Reason.CONSTANT: "in a format that holds the constant: {detail}",
    Reason.OUT_OF_RANGE: "with values that fit: {detail}",
    Reason.CANCELS: "if no difference magnified its rounding ({detail})",
    Reason.UNROUNDED: "behind a product, or with overrides={{'{op}': 'low'}}",
    Reason.DRAWN: "with overrides={{'{op}': 'low'}}",
    Reason.MAGNIFIED: "if only products read it, or ops that do not magnify a rounding, or with overrides={{'{op}': 'low'}}",
    Reason.TOLD_APART: "if no logarithm could read it, or with overrides={{'{op}': 'low'}}",
    Reason.SMALL_STEPS: "with fewer or larger steps, or with overrides={{'{op}': 'low'}}",
    Reason.RUNNING_SUM: "with fewer sums, or with overrides={{'{op}': 'low'}}",
    Reason.COUNTS: "if its whole numbers were small, or with overrides={{'{op}': 'low'}}",
    Reason.READ_BY_MANY: "if eight or fewer read it, or with overrides={{'{op}': 'low'}}",
    Reason.SENSITIVE: "with a looser tolerance ({detail})",
    Reason.RETURNED: "without hooks, and if it were returned only, or read only",
    Reason.SHARED: "if no result of the graph shared its memory",
    Reason.READ_BACK: "if it were not returned, or in inference",
    Reason.BETWEEN: "with granularity='model', or in a part",
    Reason.KEPT: "if its operands were not written through .data afterwards",
    Reason.WRITES_STATE: "if it did not write to memory that outlives the graph",
    Reason.ASKED: "without overrides['{detail}']",
    Reason.AGREED: "with parity=False, or with an override",
    Reason.IN_PLAN: "with another colour in the plan: plan.edit({{'{name}': ...}})",
    Reason.DEVICE: "with dtype= given, which is always followed",
    Reason.FP32_POLICY: "with dtype='bf16' or 'fp16'",
}


OPEN = "open"
"""Word in place of a colour for a node whose colour no pass has decided yet."""


@dataclass(frozen=True)
class Decided:
    """The colour of one op after some pass, and the last pass that changed it. Colours: low, high, plain (never cast), open (undecided)."""

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
    """The decisions on one region (the plan of one graph) after the pass `after` and all passes before it."""

    region: str
    after: str
    """Name of the last pass that has run."""
    nodes: tuple[Decided, ...]
    casts: int
    """Number of casts that are planned so far."""
    edits: int
    """Number of edits of single ops (changes other than casts and pads) that are planned so far."""


def decided_after(plan: ModelPlan, name: str) -> tuple[Progress, ...]:
    """Decide each graph of `plan` again up to the pass called `name`, and return the decisions. Graphs without this pass are left out.

    Raises PlanError if no graph's pipeline has such a pass. Also raises PlanError for a saved or edited plan: it cannot be decided again,
    because it does not hold the problem (graph, policy and evidence).
    """
    found = tuple(_progress(region, name) for region in plan.regions if any(each.name == name for each in pipeline(_problem(region))))
    if not found:
        known = dict.fromkeys(each.name for region in plan.regions for each in pipeline(_problem(region)))
        raise PlanError(f"no pass that decided this plan is called {shown(name)}; in order they are {', '.join(known)}")
    return found


def _problem(region: RegionPlan) -> Problem:
    if not isinstance(region.basis, Problem):
        raise PlanError(f"the plan of {region.name} has no problem to decide again: name the model, not a saved or edited plan")
    return replace(region.basis, pads_off=True)


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
    """Return a row (node, colour, pass, reason) for each op in `found`. Nodes of several graphs are named "region/node"."""
    several = len(found) > 1
    return [
        (f"{each.region}/{node.node}" if several else node.node, node.colour, node.by, node.why) for each in found for node in each.nodes
    ]


MOST_TRIED = 4
"""Largest number of nodes in a module whose explanation tries changes. Explanations of larger modules give recorded reasons only."""
MOST_HEAVY = 8
"""Largest number of heavy ops in fp32 (matmuls and convolutions) that are listed one by one; further ones are only counted."""


def explain(plan: ModelPlan, name: str = "") -> str:
    """Return sentences about the node or module `name`, or about the whole plan if `name` is "".

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
    """Return the name of `node` without "region/", the prefix of names in a plan of several graphs."""
    return node.name.partition("/")[2] if len(plan.regions) > 1 else node.name


def _sentences(plan: ModelPlan, node: NodePlan, asked: WhatIf | None) -> list[str]:
    """Return sentences on a node's format and reason, its casts, and changes that would alter its format.

    If `asked` is given, it plans the graph anew to find these changes. If `asked` is None, only a matrix product or convolution in fp32
    gets a sentence on changes: the condition under which it would run in the low format.
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
    """Return sentences on changes that would give the node its other colour (low or high); [] if the node is no op, or is never cast.

    The first sentence states the condition that the recorded reason of the colour implies, if any, such as "it would run low in bf16".
    If `asked` is given, it plans the graph anew to find overrides that would change the colour, and further sentences state their price.
    `bare` is the node's name without the prefix "region/", and `low` the name of the low format.
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
        names = " and ".join(filter(None, (", ".join(cause.nodes[:-1]), cause.nodes[-1])))
        lines.append(f"it would run {other} if {names} did: {_change(cause)}")
    elif forced is not None and not condition:
        lines.append("no small set of other nodes decides it: its colour is the cheapest")
    if forced is not None:
        lines.append(f"it alone can be told to: {_change(forced)}")
    return lines


def _change(change: Change) -> str:
    return f"overrides={change.overrides} gives {change.price()}"


def heavy(plan: ModelPlan) -> list[str]:
    """Return sentences on the largest matmuls and convolutions in fp32, each with a condition for running low, and a count of the rest."""
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
    """Return one sentence for each pair of colour (low or high) and reason: the number of ops with both, and the name of the first op."""
    ops = [node for node in plan.nodes if node.role == "op" and node.colour is not Colour.PLAIN]
    counted = Counter((node.colour, node.reason) for node in ops)
    lines = []
    for (colour, reason), count in sorted(counted.items(), key=lambda item: (item[0][0].value, -item[1])):
        first = next(node for node in ops if (node.colour, node.reason) == (colour, reason))
        names = first.name if count == 1 else f"{first.name} and {count - 1} more"
        lines.append(f"{count} of {len(ops)} ops ({share(count, len(ops))}) run {colour.value} because {reason.value}: {names}")
    return lines
