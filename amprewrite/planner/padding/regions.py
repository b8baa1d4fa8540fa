"""Choose which dims of a graph to pad so that its matrix products become faster, and compute the numbers that the padding holds.

1. Axes: dims that have the same meaning, such as the hidden size, share an axis. At first every dim has a separate axis. The padding rules
   of the ops join axes, and views split them.
2. Wants: a dim of a low matrix product that has an unaligned size is a want. A padded extent is computed for one or more of its axes.
3. Cut: a minimum s–t cut chooses which ops to pad along which axes. Padded ops are on the source's side. A product that stays unaligned
   costs time. So does the pad or slice between a padded and an unpadded op, once for all readers of a value.
4. Content: walk the graph. If padding would hold numbers that the next op cannot take, cut the padding off before that op and start again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from amprewrite.ir.op_graph import Call, DisjointSets
from amprewrite.ir.plans.pad_plan import Factors, Layout, PadCopy, extents
from amprewrite.planner.min_cut import INFINITE, SINK, SOURCE, Network, min_cut
from amprewrite.planner.padding.pad_cost import PadCost
from amprewrite.planner.padding.rule import BROADCAST, MIXED, Axes, Content, Hazard, Rule, Slot, moved
from amprewrite.planner.padding.rules.table import rule_of

COPY = 100
"""Factor on the price of a second low copy of a weight, in another size. It is high, so that all readers use a copy of one size."""
ROUNDS = 60
"""Largest number of times that the cut is repeated because an op cannot take the numbers in padding. After that nothing is padded."""

Place = tuple[str, Slot, int]
"""One dim of an operand or result: (name of the call, slot, dim). A slot is the name of an operand or the index of a result."""
Variable = tuple[Place, int]
"""A yes-or-no choice of the cut: (a dim that stands for all dims that are padded together with it, the axis along which to pad them)."""


@dataclass
class Want:
    """A dim of a matrix product whose size is not a multiple of `unit`. Padding it may make the product faster."""

    call: str
    slot: Slot
    dim: int
    size: int
    unit: int
    leaves: tuple[int, ...] = ()
    """Axes to pad; () if no axis of the dim can be padded."""
    why_not: str = ""
    """The reason why the dim cannot be padded; "" if it can."""

    def padded(self, regions: Regions) -> int:
        """Return the size of this dim after padding. A view may have merged several axes into it; each axis in `leaves` is padded."""
        grown = self.size
        for leaf in self.leaves:
            grown = grown // regions.size_of(leaf) * regions.extent[leaf]
        return grown


@dataclass
class Regions:
    """The calls of ops in one graph, and the padding chosen for them. A value is named "node", or "node#1" if it is item 1 of a tuple."""

    calls: dict[str, Call]
    """The calls of the graph by name, in graph order. Planned casts to the low format are calls as well."""
    numel: Callable[[str], int]
    is_weight: Callable[[str], bool]
    """Function that is True for a value that is a parameter, or a buffer to which nothing writes."""
    barriers: set[tuple[str, str]] = field(default_factory=set)
    """Pairs (value, reader): the padding of the value is cut off before the reader. If the reader needs padding, zeros are added."""
    refused: dict[str, str] = field(default_factory=dict)
    """Calls whose operands and results must not be padded, with the reason."""
    reasons: dict[str, str] = field(default_factory=dict)
    rules: dict[str, Rule] = field(default_factory=dict)
    axes: Axes = field(default_factory=Axes)
    of_value: dict[str, list[int]] = field(default_factory=dict)
    of_use: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """By (value, reader): the axis of each dim of the value as the reader takes it. `of_value` has the axes of the value when it is made.
    The axes are the same, unless the pair (value, reader) is in `barriers`. Then the reader has separate axes."""
    group: DisjointSets[Place] = field(default_factory=DisjointSets)
    """Joins the dims of a call that are padded together. Dims that may not be padded are absent."""
    fixed: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By call: axes that the call's rule never pads, such as the 3 in a dim of three chunks, or the 4 in the four gates of an LSTM."""
    extent: dict[int, int] = field(default_factory=dict)
    """For each axis that a matrix product wants padded: its extent with padding."""
    padded: set[Variable] = field(default_factory=set)
    """The variables (group of dims, axis) for which the cut chose padding."""
    content: dict[str, Content] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for call in list(self.calls.values()):
            for name in call.refs():
                maker = self.calls.get(name)
                if maker is not None and maker.several and call.item is None:
                    self.calls[name] = replace(maker, opaque="its results are read as one tuple")

    # -- 1. axes -----------------------------------------------------------------------
    def build(self) -> None:
        """Find the axes of every dim of every value. Dims get a common axis if the padding rule of a call ties them to each other."""
        self.axes, self.of_value, self.of_use, self.group, self.rules = Axes(), {}, {}, DisjointSets(), {}
        self.fixed = defaultdict(list)
        for call in self.calls.values():
            for i, shape in enumerate(call.shapes):
                self.of_value[value_name(call, i)] = [self.axes.new(size) for size in shape]
            rule = self.rules[call.name] = self._rule(call)
            for value in self.reads(call):
                mine = self.of_value[value]
                fresh = (value, call.name) in self.barriers
                self.of_use[value, call.name] = [self.axes.new(self.axes.size(a)) for a in mine] if fresh else mine
            self._tie(call, rule)

    def _rule(self, call: Call) -> Rule:
        if call.role != "op":
            return Rule()
        if call.name in self.refused:
            return Rule(why_opaque=self.refused[call.name])
        makers = (self.calls[name] for name in call.refs() if name in self.calls)
        if not any(shape for each in (call, *makers) for shape in each.shapes):
            return Rule()  # no operand or result has dims, so nothing can be padded, and rules would index missing dims
        return rule_of(call, self.calls)

    def reads(self, call: Call) -> list[str]:
        """Return the names of the values that a call reads, such as "node". A tuple of results counts as its items "node#0", "node#1", …"""
        found: list[str] = []
        for name in call.refs():
            maker = self.calls.get(name)
            if maker is None or not maker.shapes:
                continue
            if not maker.several:
                found.append(name)
            elif call.item is not None:
                found.append(f"{name}#{call.item % len(maker.shapes)}")
            else:
                found += [f"{name}#{i}" for i in range(len(maker.shapes))]
        return found

    def _axes_of(self, call: Call, slot: Slot, dim: int) -> int | None:
        found = self.of_use.get((slot, call.name)) if isinstance(slot, str) else self.of_value.get(value_name(call, slot))
        return found[dim] if found and dim < len(found) else None

    def _tie(self, call: Call, rule: Rule) -> None:
        for tie in rule.ties:
            legs: list[list[int]] = []
            for leg in tie:
                parts = [self._fixed(call, p) if isinstance(p, int) else self._axes_of(call, *p) for p in leg]
                if any(p is None for p in parts):
                    break
                legs.append([p for p in parts if p is not None])
            if len(legs) != len(tie) or not all(self.axes.unify(legs[0], other) for other in legs[1:]):
                rule.why_opaque = rule.why_opaque or f"{call.op} mixes dims of different make"
                continue
            slots = [(call.name, *p) for leg in tie for p in leg if not isinstance(p, int)]
            for slot in slots:
                self.group.join(slot, slots[0])

    def _fixed(self, call: Call, size: int) -> int:
        """Make a new axis of `size` elements that `call` must not pad, such as the 4 gates in the weight of an LSTM. Return its id."""
        axis = self.axes.new(size)
        self.fixed[call.name].append(axis)
        return axis

    def variable(self, call: str, slot: Slot, dim: int, axis: int) -> Variable | None:
        """Return the variable of the minimum cut that says if a dim is padded along `axis`; None if the dim must not or need not be padded.

        The dim is `dim` of an operand (`slot`: its name) or of a result (`slot`: its index) of the op `call`. `axis` is one of its axes.
        """
        if (call, slot, dim) not in self.group.parent or self.axes.find(axis) not in self.extent:
            return None
        if call in self.fixed and axis in self.axes.leaves(self.fixed[call]):
            return None
        if (slot, dim) in self.rules[call].whole and axis != self.axes.leaves([self.of_use[str(slot), call][dim]])[0]:
            return None
        return self.group.find((call, slot, dim)), self.axes.find(axis)

    # -- 2. wants ----------------------------------------------------------------------
    def all_aligned(self, multiple_of: Callable[[str], int | None]) -> bool:
        """True if no matrix product needs padding: each of its sizes is 1 or a multiple of `multiple_of(name of the product)`.

        Products for which this multiple is None are ignored. A symbolic size gives False. The test is fast, because it reads only shapes.
        """
        for call in self.calls.values():
            multiple = multiple_of(call.name)
            if multiple is None:
                continue
            for slot, dim in self._rule(call).wants:
                shapes = call.shapes[slot : slot + 1] if isinstance(slot, int) else self.calls[slot.partition("#")[0]].shapes
                size = shapes[0][dim] if len(shapes) == 1 and dim < len(shapes[0]) else ""
                if isinstance(size, str) or (size > 1 and size % multiple):
                    return False
        return True

    def wants(self, multiple_of: Callable[[str], int | None]) -> list[Want]:
        """Return the dims of matrix products whose size is not a multiple of `multiple_of(name of the product)`.

        Products for which this multiple is None are left out, and so are dims of size 1. If a dim cannot be padded, its `why_not` says why.
        Also set `extent`, the padded size of each axis that has to grow.
        """
        found: list[Want] = []
        for call in self.calls.values():
            multiple = multiple_of(call.name) if self.rules[call.name].wants else None
            for slot, dim in self.rules[call.name].wants if multiple else ():
                axis = self._axes_of(call, slot, dim)
                size = None if axis is None else self.axes.size(axis)
                assert multiple is not None
                if isinstance(size, str):
                    found.append(Want(call.name, slot, dim, 0, multiple, why_not=f"its size {size} is symbolic"))
                elif size is not None and size > 1 and size % multiple:
                    found.append(Want(call.name, slot, dim, size, multiple))
        self.extent = {}
        units: dict[int, int] = {}
        composed = []
        for want in found:
            call = self.calls[want.call]
            axis = self._axes_of(call, want.slot, want.dim)
            if want.why_not or axis is None:
                continue
            if (want.call, want.slot, want.dim) not in self.group.parent:
                want.why_not = self.rules[want.call].why_opaque or f"{call.op} needs the logical size"
                continue
            leaves = self.axes.leaves([axis])
            if len(leaves) == 1:
                units[leaves[0]] = math.lcm(units.get(leaves[0], 1), want.unit)
                want.leaves = leaves
            else:
                composed.append((want, leaves))
        for want, leaves in composed:
            self._choose(want, leaves, units)
        self.extent = {leaf: -(-self.size_of(leaf) // unit) * unit for leaf, unit in units.items()}
        return found

    def _choose(self, want: Want, leaves: Sequence[int], units: dict[int, int]) -> None:
        """Choose which axes to pad in a dim that a view merged from the axes `leaves`. Write the choice to `want.leaves` and `units`.

        `units` maps each padded axis to the multiple to which its size is rounded up. If these multiples already make the size of the whole
        dim a multiple of `want.unit`, nothing is added. Otherwise one axis gets a new or a larger multiple. Three criteria choose the axis,
        in this order: no rule fixes its extent (`fixed`); it has a multiple already; it grows least.
        """
        grown = {leaf: -(-self.size_of(leaf) // units.get(leaf, 1)) * units.get(leaf, 1) for leaf in leaves}
        counted = set(self.axes.leaves([axis for axes in self.fixed.values() for axis in axes]))
        marked = tuple(leaf for leaf in leaves if leaf in units)
        if math.prod(grown.values()) % want.unit:
            best = None
            for leaf in reversed(leaves):
                rest = math.prod(grown[other] for other in leaves if other != leaf)
                unit = math.lcm(units.get(leaf, 1), want.unit // math.gcd(want.unit, rest))
                growth = -(-self.size_of(leaf) // unit) * unit / self.size_of(leaf)
                rank = (leaf in counted, leaf not in units, growth)
                if self.size_of(leaf) > 1 and (best is None or rank < best[0]):
                    best = (rank, leaf, unit)
            if best is None:
                want.why_not = "its size is made of ones"
                return
            units[best[1]] = best[2]
            marked = tuple(leaf for leaf in leaves if leaf in units)
        want.leaves = tuple(leaf for leaf in marked if units[leaf] > 1)

    def size_of(self, axis: int) -> int:
        """Return the size of `axis` without padding, for an axis whose size is a number, not a symbol."""
        size = self.axes.size(axis)
        assert isinstance(size, int)
        return size

    # -- 3. cut ---------------------------------------------------------------------------
    def cut(self, asked: Sequence[Want], weighed: Sequence[Want], gains: Mapping[str, float], prices: PadCost) -> None:
        """Choose the dims to pad by a minimum cut, and store the choice in `padded`.

        Dims in `asked` are padded at any cost. Dims in `weighed` are padded if the gain exceeds the cost of pads and slices. `gains` holds
        the seconds that padding saves, by name of the matrix product. `prices` computes the cost of pads and slices.
        """
        network = Network()
        vertices: dict[Variable, int] = {}

        def vertex(variable: Variable | None) -> int:
            if variable is None:
                return SINK
            if variable not in vertices:
                vertices[variable] = network.vertex()
            return vertices[variable]

        for (_, value, axis), (maker, readers) in self._edges().items():
            numel = self.numel(value)
            weight = self.is_weight(value)
            if weight:  # leave out casts, because they pad the weight at no cost while they copy it
                readers = [(reader, variable) for reader, variable in readers if self.calls[reader].op != "cast"]
            pad = (prices.weight if weight else prices.pad)(numel)
            cut = prices.slice(numel)
            if not weight and self.is_weight(value.split(" -> ")[0]):  # raise prices of a weight's low copy: all readers then take one size
                pad, cut = COPY * pad, COPY * cut
            share = self.extent[axis] / self.size_of(axis) - 1
            network.arc(vertex(maker), SINK, _picoseconds(prices.inside(numel * share)))
            ends = [vertex(variable) for _, variable in readers]
            if "#" in value:  # "node#1" is one of several results: no pad or slice can follow it, so maker and readers must agree
                for end in ends:
                    network.arc(end, vertex(maker), INFINITE)
                    network.arc(vertex(maker), end, INFINITE)
                continue
            network.once(vertex(maker), set(ends) - {SINK}, _picoseconds(pad), outwards=True)
            network.once(vertex(maker), ends, _picoseconds(cut), outwards=False)
        for value, variable in self._behind_barriers():
            network.arc(vertex(variable), SINK, _picoseconds(prices.pad(self.numel(value))))
        for call in dict.fromkeys(want.call for want in weighed):
            ends = [vertex(v) for want in weighed if want.call == call for v in self._needs(want)]
            _wish(network, _picoseconds(gains.get(call, 0.0)), ends)
        total = sum(capacity for capacity in network.capacities if capacity != INFINITE)
        for want in asked:
            _wish(network, 2 * total + 1, [vertex(v) for v in self._needs(want)])
        reached = min_cut(network)[0] if network.tails else [False] * network.size
        self.padded = {variable for variable, v in vertices.items() if reached[v]}

    def _needs(self, want: Want) -> list[Variable]:
        found = (self.variable(want.call, want.slot, want.dim, leaf) for leaf in want.leaves)
        return [variable for variable in found if variable is not None]

    def met(self, want: Want) -> bool:
        """True if the minimum cut chose padding for all axes (`want.leaves`) that make up the dim of `want`, so its size is aligned."""
        needs = self._needs(want)
        return bool(needs) and all(variable in self.padded for variable in needs)

    def _edges(self) -> dict[tuple[int, str, int], tuple[Variable | None, list[tuple[str, Variable | None]]]]:
        """Return the choices of the cut for each value and each axis that a matrix product wants padded.

        The result is {(dim, value, axis): (choice for the op that makes the value, [(reader of the value, choice for the reader)])}. Each
        choice is the yes-or-no `Variable` that says if the op is padded in this dim along this axis. It is None if the op must not be
        padded there, and for a reader in `barriers`, which gets the value without padding.
        """
        found: dict[tuple[int, str, int], tuple[Variable | None, list[tuple[str, Variable | None]]]] = {}
        readers: dict[str, list[str]] = defaultdict(list)
        for (value, reader), _ in self.of_use.items():
            if value.partition("#")[0] not in self.rules[reader].ignored:
                readers[value].append(reader)
        for call in self.calls.values():
            for i in range(len(call.shapes)):
                value = value_name(call, i)
                for dim, axis in enumerate(self.of_value[value]):
                    for leaf in self.axes.leaves([axis]):
                        if leaf not in self.extent:
                            continue
                        ends = [
                            (reader, None if (value, reader) in self.barriers else self.variable(reader, value, dim, leaf))
                            for reader in readers[value]
                        ]  # None for a reader behind a barrier: the reader gets the value without padding, and pads it anew if needed
                        found[dim, value, leaf] = (self.variable(call.name, i, dim, leaf), ends)
        return found

    def _behind_barriers(self) -> list[tuple[str, Variable]]:
        """Return (value, `Variable`) for each dim in which a reader listed in `barriers` may be padded.

        Such a reader gets the value without padding. The `Variable` is the cut's choice whether to pad the value for it again, at a price.
        """
        return [
            (value, variable)
            for value, reader in sorted(self.barriers)
            for dim, axis in enumerate(self.of_use.get((value, reader), []))
            for leaf in self.axes.leaves([axis])
            if leaf in self.extent and (variable := self.variable(reader, value, dim, leaf)) is not None
        ]

    def want_size(self, call: str, slot: Slot, dim: int) -> int:
        """Return the size without padding of a dim that the rule of `call` wants aligned; 64 if the size is symbolic or unknown.
        `slot` is the name of an operand or the index of a result, and `dim` a dim of this operand or result."""
        axis = self._axes_of(self.calls[call], slot, dim)
        size = 64 if axis is None else self.axes.size(axis)
        return size if isinstance(size, int) else 64

    def dims_by_axis(self) -> dict[int, tuple[tuple[str, ...], int]]:
        """Return {padded axis: (dims padded along it, such as "linear.1" for dim 1 of "linear"; number of elements that this adds)}."""
        dims: dict[int, list[str]] = defaultdict(list)
        added: dict[int, float] = defaultdict(float)
        for call in self.calls.values() if self.padded else ():
            for i in range(len(call.shapes)):
                value = value_name(call, i)
                for dim, of_dim in enumerate(self.of_value[value]):
                    for axis in set(self.axes.leaves([of_dim])):
                        if self.variable(call.name, i, dim, axis) in self.padded:
                            dims[axis].append(f"{value}.{dim}")
                            added[axis] += self.numel(value) * (self.extent[axis] / self.size_of(axis) - 1)
        return {axis: (tuple(sorted(found, key=lambda dim: " -> " in dim)), round(added[axis])) for axis, found in dims.items()}

    def touches(self, copy: PadCopy, axis: int) -> bool:
        """True if `copy` (a pad or slice of a value) changes the extent of `axis`, or replaces the padding along it by zeros."""
        lists = [self.of_value[copy.value], *(self.of_use[copy.value, user] for user in copy.users[:1])]
        return any(
            axis in self.axes.leaves([axes[dim]])
            for dim in {dim for dim, _ in (*copy.layout, *copy.have)}
            for axes in lists
            if copy.refresh or dict(copy.layout).get(dim) != dict(copy.have).get(dim)
        )

    # -- layouts ---------------------------------------------------------------------------
    def value_layout(self, call: Call, i: int) -> Layout:
        """Return the padded layout of result `i` of a call: each padded dim with its sizes; () if the result is not padded."""
        return self._layout(call.name, i, self.of_value[value_name(call, i)])

    def use_layout(self, value: str, reader: str) -> Layout:
        """Return the padded layout in which `reader` takes `value`: each padded dim with its sizes; () if no dim is padded."""
        return self._layout(reader, value, self.of_use[value, reader])

    def _layout(self, call: str, slot: Slot, axes: Sequence[int]) -> Layout:
        found = []
        for dim, axis in enumerate(axes if self.padded else ()):
            factors: Factors = ()
            for leaf in self.axes.leaves([axis]):
                size = self.axes.size(leaf)
                chosen = self.variable(call, slot, dim, leaf) in self.padded
                if isinstance(size, int):
                    factors = (*factors, (size, self.extent[leaf] if chosen else size))
            if factors and extents(factors)[0] != extents(factors)[1]:
                found.append((dim, _merged(factors)))
        return tuple(found)

    # -- 4. content ---------------------------------------------------------------------------
    def check(self) -> bool:
        """Compute the numbers in the padding of all values. Return False if an op cannot take the numbers in the padding of its operands.

        For example, the op would divide by zeros. The operand is then recorded in `barriers`, so that its padding is cut off before the op.
        If the padding was cut off before, or no single operand is the cause, the op is recorded in `refused`, and is never padded. After
        False, `cut` must choose again.
        """
        self.content, sound = {}, True
        layouts: dict[str, Layout] = {}
        for call in self.calls.values() if self.padded else ():
            rule = self.rules[call.name]
            contents: dict[str, Content] = {}
            outs = [self.value_layout(call, i) for i in range(len(call.shapes))]
            for i, layout in enumerate(outs):
                layouts[value_name(call, i)] = layout
            uses = {value: self.use_layout(value, call.name) for value in self.reads(call) if value.partition("#")[0] not in rule.ignored}
            if not any(uses.values()) and not any(outs):
                continue
            for value, use in uses.items():
                known = self._arriving(value, call.name, use, layouts[value])
                covers = not rule.pointwise or self._covers(call, value, use, outs[0])
                contents[value] = known if use and covers else BROADCAST
            try:
                found = rule.content({value.partition("#")[0]: c for value, c in contents.items()})
            except Hazard as hazard:
                sound, found = False, 0.0
                blamed = [ref for ref in hazard.refs if (ref, call.name) not in self.barriers]
                self.reasons[call.name] = hazard.why
                if blamed:
                    self.barriers |= {(ref, call.name) for ref in blamed}
                else:
                    self.refused[call.name] = hazard.why
            for i in range(len(call.shapes)):
                self.content[value_name(call, i)] = found
        return sound

    def _covers(self, call: Call, value: str, use: Layout, out: Layout) -> bool:
        """True if `value` (padded layout `use`) is padded in all dims in which the result (padded layout `out`) is padded."""
        shift = len(call.shapes[0]) - len(self.of_use[value, call.name])
        return {dim for dim, _ in out} <= {dim + shift for dim, _ in use}

    def _arriving(self, value: str, reader: str, use: Layout, have: Layout) -> Content:
        """Return the numbers that `reader` finds in the padding of `value`.

        Padding that is added for the reader holds zeros. Other padding holds the numbers from the op that makes the value. `use` is the
        padded layout in which the reader takes the value, `have` the padded layout in which the op returns it.
        """
        if not have or (value, reader) in self.barriers:
            return 0.0
        kept = [dim for dim, factors in use if (dim, factors) in have]
        parts: dict[str, Content] = {}
        if kept:
            parts["kept"] = self.content.get(value, MIXED)
        if len(kept) < len(use):
            parts["made"] = 0.0
        return moved(parts)


def value_name(call: Call, i: int) -> str:
    """Return the name of result `i` of a call: "node#i" if it has several results, otherwise "node"."""
    return f"{call.name}#{i}" if call.several else call.name


def _merged(factors: Factors) -> Factors:
    """Merge each axis without padding into the axis before it. Axes are (size, padded size), outer first: (4, 5), (3, 3) give (12, 15)."""
    found: list[tuple[int, int]] = []
    for n, m in factors:
        if found and n == m:
            # merging keeps padding at the end: rows that are added below a matrix are also at the end of the flattened matrix
            found[-1] = (found[-1][0] * n, found[-1][1] * m)
        else:
            found.append((n, m))
    if len(found) > 1 and found[0] == (1, 1):
        found.pop(0)
    return tuple(found)


def _picoseconds(seconds: float) -> int:
    """Return seconds as an integer capacity in picoseconds, so that no realistic price above zero becomes zero."""
    return round(seconds * 1e12)


def _wish(network: Network, gain: int, ends: Sequence[int]) -> None:
    """Add a gain to the network. A cut receives it only if all vertices `ends` are on the source's side, that is, padded."""
    if not ends:
        return
    wish = network.vertex()
    network.arc(SOURCE, wish, gain)
    for end in ends:
        network.arc(wish, end, INFINITE)
