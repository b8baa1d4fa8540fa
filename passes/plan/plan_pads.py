"""Decide which dims of matrix products to round up for Tensor Cores, to what size, and where the graph needs pads and slices.

1. Take the arguments and shapes of every op, and add each planned cast as an op.
2. Collect the unaligned dims of low-precision matrix products that `pad=` allows to be padded, and the gain of each product.
3. Choose by minimum cut which dims to pad. Track the values in the padding. Where they would change a result, slice the padding off, and
   choose again.
4. Record the layout of every padded value, and every change of size that is left: weights padded in their casts, pads where a region
   begins, slices where it ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from amprewrite.ir.op_graph import Call, Ref
from amprewrite.ir.pass_base import Decisions, Pass, Problem
from amprewrite.ir.plans.pad_plan import KINDS, Layout, PadCopy, PaddedValue, PadPlan, PadRegion
from amprewrite.ir.plans.plan import Cast
from amprewrite.ir.policies.policy import PadRule
from amprewrite.planner.padding.pad_cost import PadCost, Product, stopwatch
from amprewrite.planner.padding.regions import ROUNDS, Regions, Want, value_name
from amprewrite.tables.devices import device_row
from amprewrite.tables.formats import FORMATS
from amprewrite.tables.ops.op_lists import Trait, ops_with
from amprewrite.tables.vocabulary import Colour, OpKind

MOST_GROWTH = 1.35
"""Largest factor by which `pad="auto"` lets a dim larger than FEW grow. XLA has the same cap for convolutions."""
FEW = 4
"""Dims up to this size, such as the channels of an image, may grow by any factor."""


class PlanPads(Pass[Problem, Decisions]):
    def __call__(self, problem: Problem, decisions: Decisions) -> None:
        if problem.given is not None or not gains_nothing(problem):
            decisions.pads = plan_pads(problem, decisions.casts, decisions.colours)


def gains_nothing(problem: Problem) -> bool:
    """True if the device does not gain from padding, and no `pad=` says "always" or "measure". Then only a given plan pads anything."""
    rules = (problem.pad.default, *problem.pad.modules) if problem.pad is not None else ()
    row = problem.planned_for or device_row(problem.device)
    return all(rule.mode in ("auto", "never") for rule in rules) and not PadCost(row, problem.policy.low, training=False).gains


def plan_pads(problem: Problem, casts: Iterable[Cast], colours: Mapping[str, Colour]) -> PadPlan:
    """Return the plan of the padding of one graph. It is empty if no option allows padding or no dim needs it.

    If padding does not pay, the plan only lists the reasons. `casts` and `colours` are the planned casts and the planned node colours.
    """
    if problem.pad is None or problem.pad.off or problem.pads_off:
        return PadPlan()
    if problem.given is not None and problem.given.casts:  # an edited plan has no casts, so this plan is unedited, and its pads fit
        return problem.given.pads
    if not problem.calls:
        return PadPlan()
    calls = calls_with_casts(problem.calls, casts)

    def numel(value: str) -> int:
        return problem.graph[value.split(" -> ")[0].partition("#")[0]].numel

    regions = Regions(calls, numel, _is_weight(problem), refused={**_steep_norms(problem, colours), **problem.pad_refused})
    if regions.all_aligned(_multiple_of(problem, colours)):
        return PadPlan()
    regions.build()
    wants = regions.wants(_multiple_of(problem, colours))
    if not wants:
        return PadPlan()
    chooser = _Chooser(problem, regions)
    for _ in range(ROUNDS):
        chooser.choose(wants)
        if regions.check():
            break
        regions.build()
        wants = regions.wants(_multiple_of(problem, colours))
    else:
        return PadPlan((PadRegion(0, 0, (), why=f"padding was still unsafe after {ROUNDS} rounds"),))
    return _written_down(regions, wants, chooser, _versions(problem, casts))


def _steep_norms(problem: Problem, colours: Mapping[str, Colour]) -> dict[str, str]:
    """Return {name: reason} for low batch norms in training that must not be padded: second derivatives overflow there (variance 0)."""
    low, norms = problem.policy.low, ops_with(Trait.TAKES_BATCH_MEAN)
    learns = {n: each.kwargs.get("eps", 1e-5) for n, each in problem.calls.items() if each.op in norms and each.kwargs.get("training")}
    # terms of the second derivative grow up to eps ** -1.5 in padding
    steep = [name for name, eps in learns.items() if colours.get(name) is Colour.LOW and eps > 0 and eps**-1.5 > low.max]
    return dict.fromkeys(steep, f"the second derivative of batch_norm in padding is beyond {low.name}")


# -- treat planned casts as ops (step 1 of this file) ----------------------------------------
def cast_name(cast: Cast) -> str:
    """Return the name of a cast's result in the pad plan, such as "linear -> bf16"; "add -> bf16 (1)" after one in-place write."""
    return f"{cast.value} -> {cast.to}" + (f" ({cast.write_version})" if cast.write_version else "")


def calls_with_casts(calls: Mapping[str, Call], casts: Iterable[Cast]) -> dict[str, Call]:
    """Return `calls` with an additional call for each planned cast. The users of the cast read it in place of the value."""
    copies: dict[str, list[Cast]] = defaultdict(list)
    instead: dict[tuple[str, str], str] = {}
    for cast in casts:
        copies[cast.value].append(cast)
        instead |= {(cast.value, user): cast_name(cast) for user in cast.users}
    found: dict[str, Call] = {}
    for name, call in calls.items():
        found[name] = _renamed(call, {value: copy for value in call.refs() if (copy := instead.get((value, name)))})
        for cast in copies[name]:
            found[cast_name(cast)] = Call(cast_name(cast), "cast", (Ref(name),), {}, call.shapes, opaque=call.opaque)
    return found


def _renamed(call: Call, names: dict[str, str]) -> Call:
    if not names:
        return call

    def plain(value: object) -> object:
        if isinstance(value, Ref):
            return Ref(names.get(value.name, value.name))
        if isinstance(value, tuple):
            return tuple(plain(v) for v in value)
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return value

    args = plain(call.args)
    kwargs = plain(dict(call.kwargs))
    assert isinstance(args, tuple) and isinstance(kwargs, dict)
    return Call(call.name, call.op, args, kwargs, call.shapes, call.several, call.floating, call.item, call.opaque, call.role)


def _is_weight(problem: Problem) -> Callable[[str], bool]:
    def is_weight(value: str) -> bool:
        node = problem.graph.nodes.get(value)
        return node is not None and (node.role == "parameter" or (node.role == "buffer" and not problem.calls[value].opaque))

    return is_weight


# -- choose the dims to pad (steps 2 and 3 of this file) ------------------------------------
def _multiple_of(problem: Problem, colours: Mapping[str, Colour]) -> Callable[[str], int | None]:
    """Return a function that maps the name of an op to the multiple to which its dims should be padded, such as 8 for bf16.

    The function returns None for an op that is no product, runs in fp32, or must not be padded.
    """
    multiple = FORMATS[problem.policy.low.name].pad_multiple

    def of(name: str) -> int | None:
        node = problem.graph.nodes.get(name)
        if node is None or colours.get(name) is not Colour.LOW or node.kind is not OpKind.ALLOW:
            return None
        rule = _rule(problem, name)
        return None if rule.mode == "never" else rule.multiple or multiple

    return of


def _rule(problem: Problem, name: str) -> PadRule:
    assert problem.pad is not None
    return problem.pad.rule(problem.graph[name].module)


@dataclass
class _Chooser:
    """Chooses which dims to pad: by gain if the option `pad=` says "auto" or "measure", at any cost if it says "always"."""

    problem: Problem
    regions: Regions

    def __post_init__(self) -> None:
        problem = self.problem
        row = problem.planned_for or device_row(problem.device)
        modes = {_rule(problem, name).mode for name in problem.calls if name in problem.graph.nodes}
        low = problem.policy.low
        watch = stopwatch(problem.device, low.dtype) if "measure" in modes else None
        kept, training = problem.costs.cached_weights, problem.costs.training >= 0.5
        self.model = PadCost(row, low, training, cached_weights=kept)
        self.watch = PadCost(row, low, training, watch, cached_weights=kept)
        self.gains: dict[str, float] = {}
        self.why: dict[str, str] = {}

    def choose(self, wants: list[Want]) -> None:
        """Choose by a minimum cut which of `wants`, the unaligned dims of low-precision matrix products, to pad.

        If a dim is not padded, the reason is in its `Want.why_not`, or in `self.why` under the name of its call.
        """
        asked, weighed = [], []
        by_call: dict[str, list[Want]] = defaultdict(list)
        for want in wants:
            by_call[want.call].append(want)
        for call, together in by_call.items():
            mode = _rule(self.problem, call).mode
            if mode == "auto":
                for want in together:
                    growth = want.padded(self.regions) / want.size if want.leaves else 1.0
                    if growth > MOST_GROWTH and want.size > FEW:
                        want.leaves, want.why_not = (), f"it would grow by {100 * (growth - 1):.0f} %"
            possible = [want for want in together if want.leaves]
            if mode == "always":
                asked += possible
            elif possible:
                self.gains[call] = self._gain(call, mode, possible)
                weighed += possible
        self.regions.cut(asked, weighed, self.gains, self.model)

    def _gain(self, call: str, mode: str, wants: list[Want]) -> float:
        """Return the seconds that a step saves if all `wants` (unaligned dims) of the product `call` are padded.

        With `mode` "measure" the products are timed, with "auto" they are priced. The result for "auto" is 0 if the device does not gain
        from padding. Stores in `self.why` the reason to show if the padding is not chosen.
        """
        if not self.model.gains and mode == "auto":
            self.why[call] = f"{self.model.device.name} gains nothing from aligned ones"
            return 0.0
        found, padded = self._products(call, wants)
        gain = (self.watch if mode == "measure" else self.model).gain(found, padded)
        self.why[call] = f"the products would save {gain * 1e6:.1f} us a step, less than its pads and bytes cost"
        return gain

    def _products(self, call: str, wants: list[Want]) -> tuple[Product, Product]:
        """Return the sizes of the matrix product `call` as two records: without padding, and with the dims in `wants` padded."""
        sizes = [self.regions.want_size(call, slot, dim) for slot, dim in self.regions.rules[call].wants]
        k, n = (sizes + sizes)[:2]
        grown = {(want.slot, want.dim): want.padded(self.regions) for want in wants}
        places = self.regions.rules[call].wants
        after = [grown.get(place, size) for place, size in zip(places, sizes, strict=True)]
        k_after, n_after = (after + after)[:2]
        rows = max(self.problem.graph[call].flops // (2 * max(n * k, 1)), 1)
        return Product(rows, n, k), Product(rows, n_after, k_after)


# -- record layouts and changes of size (step 4 of this file) ------------------------------------
def _versions(problem: Problem, casts: Iterable[Cast]) -> dict[tuple[str, str], int]:
    """Return {(value, reader): write version}. It depends on the writes to the value before the reader, and on the reader's grad mode.

    Only readers with the same write version may share a padded copy of the value.
    """
    found = {(operand.value, node.name): operand.write_version for node in problem.graph for operand in node.operands}
    return found | {(cast.value, cast_name(cast)): cast.write_version for cast in casts}


def _written_down(regions: Regions, wants: list[Want], chooser: _Chooser, versions: Mapping[tuple[str, str], int]) -> PadPlan:
    values, copies = layouts(regions, versions)
    return PadPlan(_regions(regions, wants, chooser, copies), values, copies)


def layouts(regions: Regions, versions: Mapping[tuple[str, str], int]) -> tuple[tuple[PaddedValue, ...], tuple[PadCopy, ...]]:
    """Return (layouts of padded results, changes of padding between a result and its readers, such as a pad or a slice).

    `versions` is {(value, reader): write version}, see `_versions`. Readers of different versions get separate copies.
    """
    values, have = [], {}
    for call in regions.calls.values():
        for i in range(len(call.shapes)):
            layout = have[value_name(call, i)] = regions.value_layout(call, i)
            if layout:
                values.append(PaddedValue(value_name(call, i), layout))
    users: dict[tuple[str, Layout, bool, int], list[str]] = {}
    for call in regions.calls.values():
        for value in regions.reads(call):
            if value.partition("#")[0] in regions.rules[call.name].ignored:
                continue
            want = regions.use_layout(value, call.name)
            refresh = (value, call.name) in regions.barriers and bool(want) and bool(have[value])
            if want != have[value] or refresh:
                users.setdefault((value, want, refresh, versions.get((value, call.name), 0)), []).append(call.name)
    return tuple(values), tuple(
        PadCopy(value, tuple(readers), layout, have[value], refresh, regions.is_weight(value))
        for (value, layout, refresh, _), readers in users.items()
    )


def _regions(regions: Regions, wants: list[Want], chooser: _Chooser, copies: tuple[PadCopy, ...]) -> tuple[PadRegion, ...]:
    """Return records that explain the padding: one for each padded axis, and one for each (size, reason) of unpadded dims in `wants`."""
    found = []
    reasons = tuple(f"{name}: {why}" for name, why in regions.reasons.items())
    by_axis = regions.dims_by_axis()
    for axis, extent in regions.extent.items():
        if axis not in by_axis:
            continue
        dims, added = by_axis[axis]
        touched = [copy for copy in copies if regions.touches(copy, axis)]
        by_kind = {kind: tuple(dict.fromkeys(copy.value for copy in touched if copy.kind == kind)) for kind in KINDS}
        calls = list(dict.fromkeys(want.call for want in wants if axis in want.leaves))
        gains = [chooser.gains[call] for call in calls if call in chooser.gains]
        modes = {_rule(chooser.problem, call).mode for call in calls}
        names = {dim.rpartition(".")[0] for dim in dims}
        found.append(
            PadRegion(
                regions.size_of(axis),
                extent,
                dims,
                by_kind["pad"] + by_kind["re-pad"],
                by_kind["slice"],
                by_kind["weight"],
                by_kind["weight copy"],
                added * chooser.problem.policy.low.bytes,
                sum(gains) if gains else None,
                "measure" in modes,
                "asked for" if modes == {"always"} else "it pays",
                tuple(reason for reason in reasons if reason.partition(":")[0] in names),
            )
        )
    missed: dict[tuple[int, str], list[str]] = defaultdict(list)
    for want in wants:
        if not regions.met(want):
            why = want.why_not or chooser.why.get(want.call, "") or regions.reasons.get(want.call, "") or "no pad can reach it"
            missed[want.size, why].append(f"{want.call if isinstance(want.slot, int) else want.slot}.{want.dim}")
    found += [PadRegion(size, size, tuple(dict.fromkeys(dims)), why=why) for (size, why), dims in missed.items()]
    return tuple(found)
