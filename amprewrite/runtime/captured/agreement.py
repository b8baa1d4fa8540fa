"""Keep one plan for all graphs of a model: store the shared colours (low or high) of ops, and mark graphs that contradict them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from amprewrite.ir.evidence.agreed import Agreed
from amprewrite.ir.evidence.range_rules import Fit
from amprewrite.ir.plans.plan import NodePlan, RegionPlan
from amprewrite.runtime.captured.entries import Anew, Graphs
from amprewrite.runtime.captured.weight_watch import moved, weights_by_path
from amprewrite.tables.formats import Format
from amprewrite.tables.recipes import OUT
from amprewrite.tables.vocabulary import Colour


class Agreement:
    """The colours (low or high) of ops that all graphs of one model share. If `on` is False, each graph is planned separately."""

    def __init__(self, on: bool) -> None:
        self.on, self.colours = on, Agreed()

    def join(self, plan: RegionPlan, every: Sequence[Graphs], note: Callable[[str], None]) -> None:
        """Add the colours (low or high) of a newly planned graph to the colours that all graphs share. Mark graphs that contradict these.

        `every` holds all graphs. A marked graph is captured anew in its next call, and `note` is called with the reason.
        """
        before = self.colours
        for part in plan.flat("") if self.on else ():
            self.colours = self.colours.joined(part.nodes).joined_by_products(_products(part))
        for graphs in every if self.colours is not before else ():
            if graphs.anew is None and any(self._contradicts(region.plan) for region in list(graphs.regions)):
                graphs.anew = Anew.AGREED
                note("captured anew: another graph keeps high what ran low in this one, and one plan serves all graphs of the model")

    def _contradicts(self, plan: RegionPlan) -> bool:
        """True if an op of the plan has another colour (low or high) than the graphs share, or another decision on fp8."""
        fp8 = self.colours.products
        return any(self.colours.contradicts(part.nodes) or (fp8 and fp8.contradicts(_products(part))) for part in plan.flat(""))

    def follow_weights(self, every: Sequence[Graphs], root: nn.Module, low: Format, note: Callable[[str], None]) -> str:
        """Mark graphs for a new capture if one of their weights moved into or out of the low format's range.

        `note` is called for each such weight. If graphs share colours, all graphs in `every` are marked. Returns a warning if a weight no
        longer fits, otherwise "".
        """
        if not any(graphs.weights for graphs in every):
            return ""
        weights = weights_by_path(root)
        found = {graphs: moved(graphs.weights, weights, low) for graphs in every if graphs.anew is None}
        said = [each for changes in found.values() for each in changes]
        for graphs in every if said else ():
            if self.on or found.get(graphs):
                graphs.anew, graphs.weights = graphs.anew or Anew.WEIGHTS, []  # empty, because the new capture measures all weights again
        if said and self.on:
            self.colours = Agreed()
        for text, _ in said:
            note(text)
        worse = [text for text, now in said if now is not Fit.FITS]
        more = f" (and {len(worse) - 1} more weights)" if worse[1:] else ""
        return f"{worse[0]}{more}; results since then may be wrong, and the next call keeps high what reads it" if worse else ""


def _products(plan: RegionPlan) -> list[NodePlan]:
    """Return the products that the planner considered for fp8, coloured low if the result is computed in fp8, otherwise high."""
    fp8 = {each.node: each.takes(OUT) for each in plan.quantised.products}
    return [replace(node, colour=Colour.LOW if fp8[node.name] else Colour.HIGH) for node in plan.nodes if node.name in fp8]
