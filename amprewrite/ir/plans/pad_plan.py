"""The part of a plan about padding, with reasons: frozen data that refer to nodes by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Factors = tuple[tuple[int, int], ...]
"""The axes into which views split one dim, outer to inner, each as (extent without padding, extent with padding). For example, a dim of 300
elements in three chunks of 100, each padded to 104, is ((3, 3), (100, 104))."""
Layout = tuple[tuple[int, Factors], ...]
"""The padded dims of one tensor as (dim, its factors), in order of the dims; () if no dim is padded."""

KINDS = ("pad", "slice", "re-pad", "weight", "weight copy")
"""Values of `PadCopy.kind`."""


def extents(factors: Factors) -> tuple[int, int]:
    """Return (size without padding, size with padding) of the dim with the axes `factors`: (300, 312) for ((3, 3), (100, 104))."""
    return math.prod(n for n, _ in factors), math.prod(m for _, m in factors)


def physical(shape: tuple[Any, ...], layout: Layout) -> tuple[Any, ...]:
    """Return the padded shape of a tensor. `shape` is its shape without padding, and `layout` gives the sizes of the padded dims."""
    sizes = list(shape)
    for dim, factors in layout:
        sizes[dim] = extents(factors)[1]
    return tuple(sizes)


@dataclass(frozen=True)
class PaddedValue:
    """A result that an op returns padded, because its operands are padded. No extra kernel is needed."""

    value: str
    """Name of the node, "node#1" for its result 1 if it has several, or "node -> bf16" for its copy in bf16."""
    layout: Layout
    """The padded dims. In JSON, for each: [dim, [[size without padding, size with padding] for each axis in the dim]]."""


@dataclass(frozen=True)
class PadCopy:
    """One copy of a value with other padding: a pad before padded ops, a slice after them, or a padded copy of a parameter."""

    value: str
    """Name of the value, in the form that `PaddedValue.value` has."""
    users: tuple[str, ...]
    """Names of the nodes that read the copy. A cast is named by its value and format, as "weight -> bf16"."""
    layout: Layout
    """The layout in which the users read the value; () after a slice."""
    have: Layout = ()
    """The layout that the value has before the change; () if it is not padded."""
    refresh: bool = False
    """Whether the value's padding is replaced by zeros, because the users cannot take the numbers in it."""
    weight: bool = False
    """Whether the value is a parameter. A cast to the low format pads it at no cost. A parameter that is read in fp32 needs a padded copy,
    which the weight cache keeps in calls without gradients."""

    @property
    def kind(self) -> str:
        """The kind of this copy, one of `KINDS`.

        "pad" adds padding, "slice" removes all padding, and "re-pad" replaces padding by other padding. "weight" is a parameter that is
        padded by its cast, "weight copy" a parameter that is padded without a cast.
        """
        if self.weight:
            return "weight" if all(" -> " in user for user in self.users) else "weight copy"
        return "re-pad" if self.layout and self.have else "pad" if self.layout else "slice"

    def __str__(self) -> str:
        users = ", ".join(self.users[:4]) + (f" and {len(self.users) - 4} more" if len(self.users) > 4 else "")
        return f"{self.value} {_shown(self.layout) or _shown(self.have, back=True)} for {users}"


@dataclass(frozen=True)
class PadRegion:
    """Dims of one graph that are the same axis of the model, such as its hidden size, and therefore get the same padded extent."""

    size: int
    """Extent without padding."""
    padded: int
    """Extent with padding; equal to `size` if the region was considered and is not padded."""
    dims: tuple[str, ...]
    """The dims of this region, such as "linear.1" for dim 1 of the result of the node linear. Results of ops precede copies of weights."""
    pads: tuple[str, ...] = ()
    """Values that a kernel pads, at the entry of the region."""
    slices: tuple[str, ...] = ()
    """Values that are sliced to their size without padding, at the exit of the region."""
    weights: tuple[str, ...] = ()
    """Weights that are padded by their casts, at no cost."""
    weight_copies: tuple[str, ...] = ()
    """Weights that are read in fp32. Each needs a padded copy, which a small kernel makes in training."""
    bytes_added: int = 0
    """Bytes of padding that a forward writes."""
    gain: float | None = None
    """Seconds that a call saves, predicted or measured; None if the gain was not computed."""
    measured: bool = False
    """Whether `gain` was measured."""
    why: str = ""
    """The reason why the region is padded, or why not."""
    reasons: tuple[str, ...] = ()
    """Ops before which padding had to be cut off, each with the reason."""

    @property
    def declined(self) -> bool:
        """True if the dims of this region were considered for padding and are not padded."""
        return self.size == self.padded

    def __str__(self) -> str:
        if self.declined:
            return f"{self.size} stays: {self.why} ({_few(self.dims)})"
        gain = "" if self.gain is None else f", {'measured' if self.measured else 'predicted'} gain {self.gain * 1e6:.1f} us"
        copies = f"{len(self.weight_copies)} weight copies, " if self.weight_copies else ""
        return (
            f"{self.size} -> {self.padded} in {len(self.dims)} dims ({_few(self.dims)}): {len(self.weights)} weights in their casts, "
            f"{copies}{len(self.pads)} pads{_in(self.pads)}, {len(self.slices)} slices{_in(self.slices)}, "
            f"{self.bytes_added} bytes added{gain}; {self.why}"
        )


@dataclass(frozen=True)
class PadPlan:
    """All padding of one graph."""

    regions: tuple[PadRegion, ...] = ()
    """The groups of dims that the planner considered for padding, whether it padded them or not."""
    values: tuple[PaddedValue, ...] = ()
    """Results that ops return padded."""
    copies: tuple[PadCopy, ...] = ()
    """Pads and slices between an op and its readers, and padded copies of parameters."""

    def __bool__(self) -> bool:
        """True if at least one dim of the graph is padded."""
        return bool(self.values or self.copies)

    def lines(self) -> list[str]:
        """Return one line for each result that an op returns padded, and one for each pad, slice or padded parameter."""
        return [f"result {each.value}: {_shown(each.layout)}" for each in self.values] + [
            f"{each.kind} {each.value}: {_shown(each.layout) or _shown(each.have, back=True)}{' with new zeros' * each.refresh} for "
            f"{', '.join(each.users)}"
            for each in self.copies
        ]

    def about(self, name: str) -> list[str]:
        """Return lines about the node `name`: padding of its result and its operands, and its dims that stay unpadded; [] if none."""
        lines = [
            f"  its result is padded: {_shown(padded.layout)}" for padded in self.values if padded.value.split(" ")[0].split("#")[0] == name
        ]
        lines += [f"  it reads {copy.value}, {copy.kind}: {copy}" for copy in self.copies if name in copy.users]
        declined = [region for region in self.regions if region.declined]
        lines += [f"  padding: {region}" for region in declined if any(dim.rpartition(".")[0] == name for dim in region.dims)]
        return lines


def pad_summary(plans: list[PadPlan]) -> list[str]:
    """Return the lines about padding for the summary of a plan; [] if no padding was considered."""
    regions = [region for plan in plans for region in plan.regions]
    if not regions:
        return []
    done = [region for region in regions if not region.declined]
    kinds = [copy.kind for plan in plans for copy in plan.copies]
    pads, slices = kinds.count("pad") + kinds.count("re-pad"), kinds.count("slice")
    text = f"{len(done)} sizes padded: {kinds.count('weight')} weights in their casts, {pads} pads and {slices} slices"
    text += f", {copied} weights copied" if (copied := kinds.count("weight copy")) else ""
    whys = dict.fromkeys(region.why for region in regions if region.declined)
    lines = [text] if done else []
    return lines + [f"unaligned sizes stay: {why}" for why in list(whys)[:4]]


def _few(words: tuple[str, ...], most: int = 4) -> str:
    return ", ".join(words[:most]) + (f", … {len(words) - most} more" if len(words) > most else "")


def _in(words: tuple[str, ...]) -> str:
    return f" ({_few(words, 3)})" if words else ""


def _shown(layout: Layout, back: bool = False) -> str:
    found = []
    for dim, factors in layout:
        n, m = extents(factors)
        inside = "" if len(factors) == 1 else " as " + "·".join(str(a) if a == b else f"({a} -> {b})" for a, b in factors)
        found.append(f"dim {dim}: {m} -> {n}" if back else f"dim {dim}: {n} -> {m}{inside}")
    return ", ".join(found)
