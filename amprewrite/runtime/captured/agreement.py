"""One plan for all graphs of a model: what they have agreed on, and which of them must be captured anew for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from amprewrite.ir.evidence.agreed import Agreed
from amprewrite.ir.plans.plan import RegionPlan


class Planned(Protocol):
    """What is needed of a region."""

    plan: RegionPlan


class Graphs(Protocol):
    """What is needed of what an entry has captured."""

    outdated: bool

    @property
    def regions(self) -> Sequence[Planned]: ...


class Entry(Protocol):
    """What is needed of an entry."""

    @property
    def graphs(self) -> Graphs: ...


class Agreement:
    """The colours that the graphs of one model share; if `on` is False they share none."""

    def __init__(self, on: bool) -> None:
        self.on, self.colours = on, Agreed()

    def join(self, plan: RegionPlan, entries: Iterable[Entry], note: Callable[[str], None]) -> None:
        """Let the colours of a newly planned graph hold for all graphs; those that have others are captured anew when called."""
        before = self.colours
        for part in plan.flat("") if self.on else ():
            self.colours = self.colours.joined(part.nodes)
        for graphs in [entry.graphs for entry in list(entries)] if self.colours is not before else ():
            if not graphs.outdated and any(self._contradicts(region.plan) for region in list(graphs.regions)):
                graphs.outdated = True
                note("captured anew: another graph keeps high what ran low in this one, and one plan serves all graphs of the model")

    def _contradicts(self, plan: RegionPlan) -> bool:
        return any(self.colours.contradicts(part.nodes) for part in plan.flat(""))

    def follow_weights(self, look: Callable[[], str], entries: Sequence[Entry]) -> str:
        """What `look` says of the weights. If it finds graphs outdated, all are: what was agreed on rests on weights as they were."""
        every = [entry.graphs for entry in entries]
        before = [graphs.outdated for graphs in every]
        said = look()
        if self.on and before != [graphs.outdated for graphs in every]:
            self.colours = Agreed()
            for graphs in every:
                graphs.outdated = True
        return said


__all__ = ["Agreement"]
