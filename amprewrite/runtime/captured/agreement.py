"""One plan for all graphs of a model: what they have agreed on, and which of them must be captured anew for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from amprewrite.ir.evidence.agreed import Agreed
from amprewrite.ir.plans.plan import NodePlan, RegionPlan
from amprewrite.runtime.captured.entries import Graphs
from amprewrite.tables.recipes import OUT
from amprewrite.tables.vocabulary import Colour


class Agreement:
    """The colours that the graphs of one model share; if `on` is False they share none."""

    def __init__(self, on: bool) -> None:
        self.on, self.colours = on, Agreed()

    def join(self, plan: RegionPlan, every: Sequence[Graphs], note: Callable[[str], None]) -> None:
        """Let the colours of a newly planned graph hold for `every` graph; those that have others are captured anew when called."""
        before = self.colours
        for part in plan.flat("") if self.on else ():
            self.colours = self.colours.joined(part.nodes).joined_by_products(_products(part))
        for graphs in every if self.colours is not before else ():
            if not graphs.outdated and any(self._contradicts(region.plan) for region in list(graphs.regions)):
                graphs.outdated = True
                note("captured anew: another graph keeps high what ran low in this one, and one plan serves all graphs of the model")

    def _contradicts(self, plan: RegionPlan) -> bool:
        fp8 = self.colours.products
        return any(self.colours.contradicts(part.nodes) or (fp8 and fp8.contradicts(_products(part))) for part in plan.flat(""))

    def follow_weights(self, look: Callable[[], str], every: Sequence[Graphs]) -> str:
        """Give what `look` says of the weights. If it finds one graph outdated, all are: they agreed on weights as they were.

        What is decided anew rests on the weights as they are, so the graphs forget those they knew.
        """
        before = [graphs.outdated for graphs in every]
        said = look()
        if self.on and before != [graphs.outdated for graphs in every]:
            self.colours = Agreed()
            for graphs in every:
                graphs.outdated = True
                graphs.weights = []
        return said


def _products(plan: RegionPlan) -> list[NodePlan]:
    """The products that fp8 was weighed for: low if their results are made in fp8."""
    fp8 = {each.node: each.takes(OUT) for each in plan.quantised.products}
    return [replace(node, colour=Colour.LOW if fp8[node.name] else Colour.HIGH) for node in plan.nodes if node.name in fp8]


__all__ = ["Agreement"]
