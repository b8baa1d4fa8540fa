"""Find out how a rewritten graph reads each weight of its model: cast to the low format, in fp32, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from amprewrite.passes.lower.emit import Emitted
from amprewrite.passes.lower.hoist_weight_casts import Copy
from amprewrite.tables.boundary.members import named_parameters_in
from amprewrite.tables.errors import CaptureError


@dataclass(frozen=True)
class WeightReads:
    """The paths of the weights that one graph reads, by how it reads them.

    `low`: weights that the graph casts to the low format and reads in no other way. `full`: all other weights that it reads.
    """

    low: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    copies: Mapping[str, frozenset[Copy | None]] = field(default_factory=dict)
    """The low copies that the graph makes of each weight. A set contains None if the graph reads the weight in fp32.

    A tied weight is listed under one name.
    """


class RoundedRead(CaptureError):
    """Raised by a check of `ReadChecks`: a call would read rounded weights in fp32. The graphs stay valid: they need no new capture."""


@dataclass
class ReadChecks:
    """Functions that check how the graphs and calls of one model read weights. `gather_low` adds them, because it rounds weights."""

    graphs: tuple[Callable[[WeightReads, str], None], ...] = ()
    """Functions called before a graph runs, with its reads and the name of its code. They raise RoundedRead if the graph must not run."""
    calls: tuple[Callable[[str, str, bool], None], ...] = ()
    """Functions called after a call of a module. The arguments are its path, its name for messages, and whether a single graph, all of the
    module's forward, ran in the call. They raise RoundedRead if the call may have read rounded weights."""


def weight_reads(emitted: Emitted, inputs: Sequence[Any], root: nn.Module) -> WeightReads:
    """For each weight of `root` among the `inputs` of an emitted graph, return how the graph reads it: low, in fp32, or both."""
    names: dict[int, list[str]] = {}
    for name, weight in named_parameters_in(root, remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    reads: dict[bool, set[str]] = {True: set(), False: set()}
    weights = {place: names[id(value)] for place, value in enumerate(inputs) if id(value) in names}
    for place, paths in weights.items():
        if emitted.copies[place]:
            reads[place in emitted.low_alone].update(paths)
    copies = {paths[-1]: emitted.copies[place] for place, paths in weights.items()}
    return WeightReads(frozenset(reads[True] - reads[False]), frozenset(reads[False]), copies)
