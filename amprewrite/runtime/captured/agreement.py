"""One plan for all graphs of a model: what they have agreed on, and which of them must be captured anew for it."""

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
    """The colours that the graphs of one model share; if `on` is False they share none."""

    def __init__(self, on: bool) -> None:
        self.on, self.colours = on, Agreed()

    def join(self, plan: RegionPlan, every: Sequence[Graphs], note: Callable[[str], None]) -> None:
        """Let the colours of a newly planned graph hold for `every` graph. Graphs with other colours are captured anew when called."""
        before = self.colours
        for part in plan.flat("") if self.on else ():
            self.colours = self.colours.joined(part.nodes).joined_by_products(_products(part))
        for graphs in every if self.colours is not before else ():
            if not graphs.outdated and any(self._contradicts(region.plan) for region in list(graphs.regions)):
                graphs.anew = Anew.AGREED
                note("captured anew: another graph keeps high what ran low in this one, and one plan serves all graphs of the model")

    def _contradicts(self, plan: RegionPlan) -> bool:
        fp8 = self.colours.products
        return any(self.colours.contradicts(part.nodes) or (fp8 and fp8.contradicts(_products(part))) for part in plan.flat(""))

    def follow_weights(self, every: Sequence[Graphs], root: nn.Module, low: Format, note: Callable[[str], None]) -> str:
        """Have graphs captured anew whose weights came into the low format's range or left it, and note these weights.

        If graphs agree, all are captured anew. Returns a warning if a weight does not fit any more, "" otherwise.
        """
        if not any(graphs.weights for graphs in every):
            return ""
        weights = weights_by_path(root)
        found = {graphs: moved(graphs.weights, weights, low) for graphs in every if not graphs.outdated}
        said = [(weight.says(low), weight.now) for each in found.values() for weight in each]
        for graphs in every if said else ():
            if self.on or found.get(graphs):
                graphs.anew, graphs.weights = Anew.WEIGHTS, []  # the next decision rests on the weights of its own time
        if said and self.on:
            self.colours = Agreed()
        for text, _ in said:
            note(text)
        worse = [text for text, now in said if now is not Fit.FITS]
        more = f" (and {len(worse) - 1} more weights)" if worse[1:] else ""
        return f"{worse[0]}{more}; results since then may be wrong, and the next call keeps high what reads it" if worse else ""


def _products(plan: RegionPlan) -> list[NodePlan]:
    """The products that fp8 was weighed for: low if their results are made in fp8."""
    fp8 = {each.node: each.takes(OUT) for each in plan.quantised.products}
    return [replace(node, colour=Colour.LOW if fp8[node.name] else Colour.HIGH) for node in plan.nodes if node.name in fp8]


__all__ = ["Agreement"]
