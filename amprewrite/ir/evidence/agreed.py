"""Colours that the graphs of one model have agreed on: an op has one colour, whichever graph it is captured in.

An op is known by where it stands: the module it is called in, its name, the line that calls it, and how often that line called it
before. Another tracer may stop at other lines. Where a graph shares no line of a module's ops with those known, they are matched in
order if there are as many, or if all of them have one colour.

1. The graph that is captured first decides.
2. A later graph takes over the colours of the ops that it shares, and decides the rest around them.
3. Facts of a later graph may keep an op high that runs low so far. High then holds for all: graphs that run it low are outdated.

So colours only ever go from low to high, and agreeing comes to an end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from amprewrite.tables.vocabulary import Colour, Reason

Place = tuple[str, str]
"""A module by its path, and an op called in it."""
Call = tuple[str, int]
"""A line, and how often it called the op before."""
FREE = (Reason.BODY, Reason.OPAQUE, Reason.TRANSFORMED)
"""Reasons of colours that no other graph binds: the vertex stands for a graph inside, or is inside a torch.func transform."""
APART = (*FREE, Reason.DEVICE)
"""Reasons of colours that bind no other graph: those, and that the whole graph was left in fp32."""


class ColouredOp(Protocol):
    """What is asked of an op, of a graph or of a plan."""

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def role(self) -> str: ...


class Planned(ColouredOp, Protocol):
    """An op of a plan."""

    @property
    def colour(self) -> Colour: ...
    @property
    def reason(self) -> Reason: ...
    @property
    def because_of(self) -> str: ...
    @property
    def detail(self) -> str: ...


AnyOp = TypeVar("AnyOp", bound=ColouredOp)


@dataclass(frozen=True)
class Agreed:
    """What has been agreed on so far. Frozen: `joined` gives another one that knows more."""

    places: Mapping[Place, Mapping[Call, Colour]] = field(default_factory=dict)
    whys: Mapping[Place, Mapping[Call, str]] = field(default_factory=dict)
    """The reasons of the graphs that decided."""
    products: Agreed | None = None
    """Whether products give their results in fp8 (low) or not (high); None: nothing is known."""

    def of(self, ops: Iterable[ColouredOp]) -> dict[str, Colour]:
        """The colours of those of the ops of one graph that are agreed on, by name."""
        return {name: self.places[place][match] for name, place, match in self._known(ops)}

    def whys_of(self, ops: Iterable[ColouredOp]) -> dict[str, str]:
        """Why the ops that `of` gives have their colours, in the graphs that decided them."""
        return {name: self.whys[place][match] for name, place, match in self._known(ops)}

    def _known(self, ops: Iterable[ColouredOp]) -> Iterator[tuple[str, Place, Call]]:
        for place, calls in _by_place(ops).items():
            for call, match in _matches(calls, self.places.get(place, {})).items():
                yield calls[call].name, place, match

    def joined(self, plan: Iterable[Planned]) -> Agreed:
        """This with the colours of the ops of one planned graph; the very same if it changes nothing."""
        plan = tuple(plan)
        planned = {node.name: node.colour for node in plan if node.colour is not Colour.PLAIN and node.reason not in APART}
        places, whys, changed = dict(self.places), dict(self.whys), False
        for place, calls in _by_place(node for node in plan if node.name in planned).items():
            known, why = dict(places.get(place, {})), dict(whys.get(place, {}))
            matches = _matches(calls, known)
            for call, op in calls.items():
                match = matches.get(call, call)
                colour = Colour.HIGH if known.get(match) is Colour.HIGH else planned[op.name]
                if known.get(match) is not colour:
                    changed, why[match] = True, ", ".join(part for part in (op.reason.value, op.because_of, op.detail) if part)
                known[match] = known[call] = colour
                why[call] = why[match]
            places[place], whys[place] = known, why
        return replace(self, places=places, whys=whys) if changed else self

    def joined_by_products(self, products: Iterable[Planned]) -> Agreed:
        """This with what one planned graph decided on products; the very same if it changes nothing."""
        known = self.products or Agreed()
        joined = known.joined(products)
        return self if joined is known else replace(self, products=joined)

    def contradicts(self, plan: Iterable[Planned]) -> bool:
        """Whether an op of a planned graph has another colour than the one that is agreed on, for no fact of its own."""
        plan = tuple(plan)
        agreed = self.of(plan)
        return any(agreed.get(node.name, node.colour) is not node.colour and node.reason not in FREE for node in plan)


NOTHING_AGREED = Agreed()


def _by_place(ops: Iterable[AnyOp]) -> dict[Place, dict[Call, AnyOp]]:
    found: dict[Place, dict[Call, AnyOp]] = {}
    counts: Counter[tuple[Place, str]] = Counter()
    for op in ops:
        if op.role == "op":
            place = (op.module, op.op)
            found.setdefault(place, {})[op.source, counts[place, op.source]] = op
            counts[place, op.source] += 1
    return found


def _matches(calls: Mapping[Call, ColouredOp], known: Mapping[Call, Colour]) -> dict[Call, Call]:
    """For calls of an op in one module: which of the known calls each of them is."""
    lines = {line for line, _ in known}
    if any(line in lines for line, _ in calls):
        return {call: call for call in calls if call in known}
    if len(calls) == len(known):
        return dict(zip(calls, known, strict=True))
    return dict.fromkeys(calls, next(iter(known))) if len(set(known.values())) == 1 else {}


__all__ = ["NOTHING_AGREED", "Agreed"]
