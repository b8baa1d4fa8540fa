"""Collects the decisions on one graph. The deciding passes write them, and `freeze` turns them into a `RegionPlan`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from amprewrite.ir.plans.pad_plan import PadPlan
from amprewrite.ir.plans.plan import Cast, NodeEdit, NodePlan, RegionPlan
from amprewrite.ir.plans.product_plan import QuantisedProducts
from amprewrite.ir.problem import Problem
from amprewrite.tables.vocabulary import Colour, Edit, Reason


@dataclass(frozen=True)
class Painted:
    """The colour of one node (low, high or plain) as decided so far, the reason, the node that caused it ("" if none did), and a detail."""

    colour: Colour
    reason: Reason
    because_of: str = ""
    detail: str = ""


@dataclass
class Decisions:
    """The decisions made so far on one `Problem`. Deciding passes add to them. Applying passes see only the plan that `freeze` returns."""

    paints: dict[str, Painted] = field(default_factory=dict)
    casts: tuple[Cast, ...] = ()
    pads: PadPlan = field(default_factory=PadPlan)
    edits: list[NodeEdit] = field(default_factory=list)
    quantised: QuantisedProducts = field(default_factory=QuantisedProducts)
    notes: list[str] = field(default_factory=list)

    def paint(self, name: str, colour: Colour, reason: Reason, because_of: str = "", detail: str = "") -> None:
        self.paints[name] = Painted(colour, reason, because_of, detail)

    def keep_high(self, problem: Problem, name: str, reason: Reason, because_of: str = "") -> None:
        """Give the op `name` the colour high (fp32), unless a fact (`OpNode.pinned`) or an override has decided its colour.

        Ops that are high already, that carry no fp32 value, or whose colour follows from their subgraph (`Reason.BODY`) do not change.
        """
        node, paint = problem.graph[name], self.paints.get(name)
        asked = node.op in problem.lists.asked or (paint is not None and paint.reason in (Reason.ASKED, Reason.BODY))
        if node.carries_fp32 and node.pinned is None and not asked and (paint is None or paint.colour is Colour.LOW):
            self.paint(name, Colour.HIGH, reason, because_of)

    @property
    def colours(self) -> dict[str, Colour]:
        return {name: painted.colour for name, painted in self.paints.items()}

    def edit(self, problem: Problem, node: str, what: Edit) -> None:
        """Add the edit `what` of the op `node`, switched off if a given plan (`problem.given`) has the edit and switches it off."""
        given = problem.given.edits if problem.given is not None else ()
        off = any(edit.node == node and edit.what is what and not edit.on for edit in given)
        self.edits.append(NodeEdit(node, what, on=not off))

    def edit_low(self, problem: Problem, nodes: Iterable[str], what: Edit) -> None:
        """Add the edit `what` to each of the ops `nodes` that has the colour low."""
        for name in nodes:
            if self.paints[name].colour is Colour.LOW:
                self.edit(problem, name, what)

    def note(self, text: str) -> None:
        """Add `text` to the notes of the plan, unless they hold it already."""
        if text not in self.notes:
            self.notes.append(text)

    def freeze(self, problem: Problem) -> RegionPlan:
        """Return the decisions as the plan of the graph of `problem`. Every node of the graph must have a colour (low, high or plain)."""
        return RegionPlan(
            name=problem.name,
            nodes=tuple(self._node_plans(problem)),
            casts=self.casts,
            training=problem.training,
            notes=tuple(dict.fromkeys((*problem.notes, *self.notes))),
            entry=problem.entry,
            pads=self.pads,
            edits=tuple(self.edits),
            scales_loss=problem.scale_loss,
            quantised=self.quantised,
            basis=problem,
        )

    def _node_plans(self, problem: Problem) -> list[NodePlan]:
        low, plans = problem.policy.low.name, []
        for node in problem.graph:
            painted = self.paints[node.name]
            plans.append(
                NodePlan(
                    name=node.name,
                    op=node.op,
                    colour=painted.colour,
                    reason=painted.reason,
                    because_of=painted.because_of,
                    detail=painted.detail,
                    kind=node.kind,
                    dtype=low if painted.colour is Colour.LOW and node.carries_fp32 else node.dtype,
                    shape=node.shape,
                    flops=node.flops,
                    module=node.module,
                    source=node.source,
                    role=node.role,
                    inputs=tuple(operand.value for operand in node.operands),
                )
            )
        return plans
