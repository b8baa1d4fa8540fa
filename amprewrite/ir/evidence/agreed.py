"""Keep the colour (low or high) of an op equal in all graphs of a model in which the op is captured.

An op is identified by the module that calls it, its name, the line of code that calls it, and the number of earlier calls by that line.
Another tracer may report different lines. If a graph calls the op only at unknown lines, but as often as earlier graphs, its calls match
the known calls in order. If the number of calls differs, too, they match only if all known calls have the same colour.

1. The graph that is captured first decides.
2. A later graph takes over the colours of shared ops and decides the rest.
3. Facts about a later graph may require fp32 for an op that is low so far. The op then becomes fp32 in all graphs, and graphs that run it
   low are planned anew.

Colours therefore change only from low to high, so that planning terminates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from amprewrite.ir.plans.plan import NodePlan
from amprewrite.tables.vocabulary import Colour, Reason

Place = tuple[str, str]
"""(path of a module, name of an op that the module calls)."""
Call = tuple[str, int]
"""(line of the model's code, number of earlier calls of the op by this line)."""
FREE = (Reason.BODY, Reason.OPAQUE, Reason.TRANSFORMED)
"""Reasons for which an op may have different colours in different graphs: it holds a subgraph, or is inside a torch.func transform."""
APART = (*FREE, Reason.DEVICE)
"""If an op has its colour for one of these reasons, other graphs do not take the colour over. DEVICE: the device gains nothing from low."""


class ColouredOp(Protocol):
    """Protocol: the attributes that identify an op across graphs. Nodes of op graphs (OpNode) and of plans (NodePlan) have them."""

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


AnyOp = TypeVar("AnyOp", bound=ColouredOp)


@dataclass(frozen=True)
class Agreed:
    """The colours (low or high) that the graphs planned so far gave to their ops. Later graphs give the same ops the same colours.

    Frozen: `joined` returns a copy that includes one more graph.
    """

    places: Mapping[Place, Mapping[Call, Colour]] = field(default_factory=dict)
    whys: Mapping[Place, Mapping[Call, str]] = field(default_factory=dict)
    """The reason for each colour in `places`, as text, from the graph that decided the colour."""
    products: Agreed | None = None
    """Decisions about fp8 in the same form: low means that a product runs in fp8, high that it does not. None if no graph has decided."""

    def of(self, ops: Iterable[ColouredOp]) -> dict[str, Colour]:
        """Return {name: agreed colour (low or high)} for `ops`, which belong to one graph. Ops without an agreed colour are left out."""
        return {name: self.places[place][match] for name, place, match in self._known(ops)}

    def whys_of(self, ops: Iterable[ColouredOp]) -> dict[str, str]:
        """Return {name: reason of the agreed colour} for `ops` (see `of`). The reason comes from the graph that decided the colour."""
        return {name: self.whys[place][match] for name, place, match in self._known(ops)}

    def _known(self, ops: Iterable[ColouredOp]) -> Iterator[tuple[str, Place, Call]]:
        for place, calls in _by_place(ops).items():
            for call, match in _matches(calls, self.places.get(place, {})).items():
                yield calls[call].name, place, match

    def joined(self, plan: Iterable[NodePlan]) -> Agreed:
        """Return a copy that also holds the colours of one planned graph; `self` if nothing changes.

        An op that is low in one graph and high in another becomes high. Two sorts of ops are left out, because their colours do not bind
        other graphs: ops that are never cast (plain), and ops that have their colour for a reason in APART, such as holding a subgraph.
        """
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

    def joined_by_products(self, products: Iterable[NodePlan]) -> Agreed:
        """Return a copy that also holds the fp8 decisions for the matrix products of one planned graph; `self` if nothing changes.

        `products` are the products of the graph. Here the colour low means that a product runs in fp8, high that it does not.
        """
        known = self.products or Agreed()
        joined = known.joined(products)
        return self if joined is known else replace(self, products=joined)

    def contradicts(self, plan: Iterable[NodePlan]) -> bool:
        """True if an op of a planned graph has a colour that differs from the agreed colour.

        Ops whose reason is in FREE, such as ops that hold a subgraph, are ignored: their colours may differ between graphs.
        """
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
    """Return {call in `calls`: call in `known` whose colour it takes over}. Calls without a match are left out.

    `calls` are the calls of one op by one module. `known` holds the calls of this op in earlier graphs, with their colours. Calls match by
    line of code. If no line matches, calls match in order. If the numbers of calls also differ, they match only if `known` has one colour.
    """
    lines = {line for line, _ in known}
    if any(line in lines for line, _ in calls):
        return {call: call for call in calls if call in known}
    if len(calls) == len(known):
        return dict(zip(calls, known, strict=True))
    return dict.fromkeys(calls, next(iter(known))) if len(set(known.values())) == 1 else {}
