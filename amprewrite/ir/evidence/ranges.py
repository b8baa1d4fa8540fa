"""Ranges of a model's values on sample batches, which can be merged and saved, and the risk that a format cannot hold the values.

A range holds only counts, the least and the greatest number, and a histogram of magnitudes by powers of two. So memory does not grow with
the number of batches. A fit to the histogram's tail estimates the probability that a value leaves a format's range although no sample did.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from amprewrite.ir.op_graph import OpGraph
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.boundary.files import read_text, write_text
from amprewrite.tables.boundary.json_data import BadData, build, read_json
from amprewrite.tables.boundary.members import named_parameters_in
from amprewrite.tables.boundary.printable import console, fragment, printable
from amprewrite.tables.errors import CalibrationError
from amprewrite.tables.formats import FORMATS, NARROWEST, Format

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1
"""Version of the JSON form. Files of other versions are refused."""
CHUNK = 2**22
"""Number of elements of a tensor that are read at once, to limit temporary memory."""
FALLS_OFF = (0.5, 8.0)
"""Parameters of the Beta prior of q, the share of a histogram's tail that lies beyond the next power of two (see `_beyond`). The mean is
0.06, and the prior weighs as much as about eight values."""
_TITLES = ("node", "largest", "smallest", "P(overflow) a pass", "P(underflow)", "NaN, inf")
_BIAS = 127
_NOT_FINITE = 255


@dataclass(frozen=True)
class ValueRange:
    """Counts of the elements of one value, their least and greatest number, and their histogram. `a | b` merges two ranges."""

    count: int = 0
    """Number of elements seen, in all batches together."""
    zeros: int = 0
    """Number of zeros among the elements."""
    nan: int = 0
    """Number of NaNs among the elements."""
    infinite: int = 0
    """Number of infinities among the elements."""
    least: float = math.inf
    """The least finite element; inf if none was seen."""
    greatest: float = -math.inf
    """The greatest finite element; -inf if none was seen."""
    smallest: float = math.inf
    """The smallest magnitude of an element other than zero; inf if none was seen."""
    batches: int = 0
    """Number of tensors that were merged into this range."""
    exponents: tuple[tuple[int, int], ...] = ()
    """Pairs (e, count): `count` finite nonzero elements have a magnitude in [2**e, 2**(e + 1))."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ValueRange:
        """Return the range of one floating point tensor of any shape and device. Its elements are converted to fp32."""
        bins = torch.zeros(256, dtype=torch.int64, device="cpu")
        nan = zeros = 0
        least, greatest, smallest = math.inf, -math.inf, math.inf
        for part in tensor.detach().float().contiguous().reshape(-1).split(CHUNK):
            here = torch.bincount((part.view(torch.int32) >> 23) & 255, minlength=256).cpu()
            bins += here
            if here[_NOT_FINITE]:
                nan += int(part.isnan().sum())
                part = part[part.isfinite()]
            if part.numel():
                low, high = part.aminmax()
                least, greatest = min(least, low.item()), max(greatest, high.item())
                size = part.abs()
                if here[0]:
                    size = size[size > 0]
                    zeros += part.numel() - size.numel()
                smallest = min(smallest, size.min().item()) if size.numel() else smallest
        not_finite = int(bins[_NOT_FINITE])
        bins[0] -= zeros  # zeros have no exponent, but share bin 0 (exponent bits 0) with subnormal numbers
        exponents = tuple((e - _BIAS, int(n)) for e, n in enumerate(bins.tolist()) if n and e != _NOT_FINITE)
        return cls(tensor.numel(), zeros, nan, not_finite - nan, least, greatest, smallest, 1, exponents)

    @classmethod
    def limits(cls, tensor: torch.Tensor, smallest: bool) -> ValueRange:
        """Return a range of one fp32 tensor at less cost than `of`: without a histogram, and without counts of zeros, NaNs and infinities.

        It has `least` and `greatest`, and also `smallest` if the argument `smallest` is True. NaNs and infinities count as zeros.
        """
        values = tensor.detach()
        if not values.numel():
            return cls()
        least, greatest = torch.stack(values.aminmax()).tolist()
        if not math.isfinite(greatest - least):
            values = values.nan_to_num(0.0, 0.0, 0.0)
            least, greatest = torch.stack(values.aminmax()).tolist()
        size = values.abs() if smallest else None
        magnitude = math.inf if size is None else size.where(size > 0, math.inf).min().item()
        return cls(values.numel(), least=least, greatest=greatest, smallest=magnitude, batches=1)

    def __or__(self, other: ValueRange) -> ValueRange:
        exponents = Counter(dict(self.exponents))
        exponents.update(dict(other.exponents))
        return ValueRange(
            self.count + other.count, self.zeros + other.zeros, self.nan + other.nan, self.infinite + other.infinite,
            min(self.least, other.least), max(self.greatest, other.greatest), min(self.smallest, other.smallest),
            self.batches + other.batches, tuple(sorted(exponents.items())),
        )  # fmt: skip

    @property
    def amax(self) -> float:
        """Largest finite magnitude; 0 if no finite element was seen."""
        return max(abs(self.least), abs(self.greatest)) if self.least <= self.greatest else 0.0

    @property
    def nonzero(self) -> int:
        """Number of finite elements other than zero."""
        return sum(n for _, n in self.exponents)

    # -- risks in a format ---------------------------------------------------------------
    def overflow(self, fmt: Format) -> float:
        """Return the probability that an element overflows `fmt`: the share of the observed elements that do.

        The histogram counts by powers of two, so only elements at or above the first power of two beyond `fmt.max` count. If there are
        none, the probability is estimated by a fit to the upper tail of the histogram.
        """
        return _beyond(list(self.exponents), self.count, math.ceil(math.log2(fmt.max)))

    def overflow_in_pass(self, fmt: Format) -> float:
        """Return the probability that at least one element overflows `fmt` in a forward pass with a batch of average size."""
        return -math.expm1(-self.overflow(fmt) * self.count / max(self.batches, 1))

    def underflow(self, fmt: Format) -> float:
        """Return the probability that a nonzero element becomes zero in `fmt`: the share of the observed nonzero elements that become zero.

        If no observed element becomes zero, the probability is estimated by a fit to the lower tail of the histogram.
        """
        mirrored = sorted((-e, n) for e, n in self.exponents)
        return _beyond(mirrored, self.nonzero, 2 - round(math.log2(fmt.smallest_subnormal)))

    def subnormal(self, fmt: Format) -> float:
        """Return the share, from 0 to 1, of the nonzero elements that lose bits because they are below the normal numbers of `fmt`."""
        limit = round(math.log2(fmt.smallest_normal))
        return sum(n for e, n in self.exponents if e < limit) / max(self.nonzero, 1)


def _beyond(exponents: list[tuple[int, int]], count: int, limit: int) -> float:
    """Estimate the probability that an exponent is at least `limit`, from a histogram of `count` elements.

    `exponents` has sorted pairs (exponent, number of elements with this exponent). If elements reach `limit`, return their share. Otherwise
    fit a tail. Above a high threshold, the tail is assumed to decay by a constant factor q per octave, because log|x| is exponential there
    (Hill, "A simple general approach to inference about the tail of a distribution", Annals of Statistics 3, 1975). q is estimated with the
    Beta prior FALLS_OFF, which matters only for small samples. The result is the largest estimate over all thresholds with at most
    sqrt(count) values above them. It is rather too high for tails that decay faster than a power law, such as a normal distribution's.
    """
    seen = sum(n for e, n in exponents if e >= limit)
    if seen or not count:
        return seen / count if count else 0.0
    worst, above, octaves, previous = 0.0, 0, 0, 0
    for e, n in reversed(exponents):
        octaves, previous = octaves + above * (previous - e) if above else 0, e
        above += n
        if worst and above > math.isqrt(count):
            break
        q = (octaves + FALLS_OFF[0]) / (octaves + above + sum(FALLS_OFF))
        worst = max(worst, above / count * q ** (limit - e))
    return worst


# -- ranges of a whole model ----------------------------------------------------------------
@dataclass(frozen=True)
class RegionRanges:
    """Ranges of the values of one captured graph. `a | b` merges the ranges `a` and `b`."""

    graph: str
    """The `fingerprint` of the graph."""
    name: str = ""
    """Name of the graph in the plan."""
    values: Mapping[str, ValueRange] = field(default_factory=dict)
    """Ranges by name of the node. Only fp32 values have ranges; token ids and boolean masks have none."""
    gradients: Mapping[str, ValueRange] = field(default_factory=dict)
    """Ranges of the gradients by name of the node; empty unless gradients were asked for."""

    def __or__(self, other: RegionRanges) -> RegionRanges:
        return replace(self, values=merge(self.values, other.values), gradients=merge(self.gradients, other.gradients))


@dataclass(frozen=True)
class Calibration:
    """Ranges of a model's values on sample batches. It never changes: `a | b` returns a new calibration, with the ranges of both."""

    model: str
    """Name of the model's class; "" for an ONNX file, and for ranges that a rewritten model learns in its first calls."""
    parameters: str
    """Fingerprint of the names and shapes of the model's parameters."""
    batches: int
    """Number of batches seen."""
    regions: tuple[RegionRanges, ...]
    """For each captured graph: the ranges of its fp32 values, seen in runs in fp32."""
    version: int = SCHEMA

    def of(self, graph: OpGraph) -> RegionRanges | None:
        """Return the ranges of the values of `graph`; None if this graph did not run in the calibration."""
        wanted = fingerprint(graph)
        return next((region for region in self.regions if region.graph == wanted), None)

    def check(self, model: torch.nn.Module) -> None:
        """Raise CalibrationError if the names or shapes of the parameters of `model` differ from the calibrated model's."""
        if self.parameters != parameters_fingerprint(model):
            raise CalibrationError(
                f"the calibration was made with a {self.model} of other parameters than this {type(model).__name__} has; "
                "make it anew with amprewrite.calibrate(model, batches)"
            )

    def __or__(self, other: Calibration) -> Calibration:
        """Return one calibration with the merged ranges of both. Raises CalibrationError if `other` is no calibration of the same model."""
        if not isinstance(other, Calibration):
            raise CalibrationError(f"a calibration merges with another, not with one {type(other).__name__}; Calibration.load reads one")
        if self.parameters != other.parameters:
            raise CalibrationError(f"these calibrations are of different models ({self.model} and {other.model}) and do not merge")
        theirs = {region.graph: region for region in other.regions}
        regions = [region | theirs.pop(region.graph) if region.graph in theirs else region for region in self.regions]
        return replace(self, batches=self.batches + other.batches, regions=(*regions, *theirs.values()))

    merge = __or__

    # -- files ------------------------------------------------------------------------------
    def to_json(self) -> str:
        """Return the calibration as JSON text, from which `from_json` makes an equal calibration."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Return the calibration in `text`, which `to_json` wrote. Raises CalibrationError if the text is no valid calibration."""
        try:
            data = read_json(text)
        except BadData as error:
            raise CalibrationError(f"this is no calibration: {error}") from error
        if not isinstance(data, dict) or "regions" not in data or "parameters" not in data:
            raise CalibrationError("this is no calibration: the JSON has no 'regions'; write one with calibration.save(path)")
        if data.get("version") != SCHEMA:
            version = shown(data.get("version"))
            raise CalibrationError(f"the calibration has version {version}, this amprewrite reads {SCHEMA}; make it anew")
        try:
            found: Calibration = build(cls, data)
            found._check_values()
            return found
        except BadData as error:
            raise CalibrationError(f"the calibration is damaged: {error}; make it anew") from error
        except RecursionError as error:
            raise CalibrationError("the calibration is damaged: it is nested too deeply; make it anew") from error

    def _check_values(self) -> None:
        """Raise BadData if a range holds counts or exponents that are impossible."""
        for region in self.regions:
            for name, seen in (*region.values.items(), *region.gradients.items()):
                counts = (seen.count, seen.zeros, seen.nan, seen.infinite, seen.batches, *(n for _, n in seen.exponents))
                if min(counts) < 0:
                    raise BadData(f"{name!r} has a count below zero")
                if any(abs(e) > _BIAS + 23 for e, _ in seen.exponents):
                    raise BadData(f"{name!r} has an exponent that no fp32 number has")
                if seen.nonzero > seen.count:
                    raise BadData(f"{name!r} has more values by exponent than in all")

    def save(self, path: str | Path) -> None:
        """Write the calibration to a file that `load` reads. Raises EmitError if the file cannot be written."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Return the calibration in a file that `save` wrote. Raises CalibrationError if the file is unreadable or holds no calibration."""
        try:
            return cls.from_json(read_text(path))
        except ValueError as error:
            raise CalibrationError(f"no calibration at {printable(path)}: {error}") from error
        except CalibrationError as error:
            raise CalibrationError(f"{printable(path)}: {error}") from error

    # -- tables -----------------------------------------------------------------------------
    def table(self, n: int = 20, fmt: str = NARROWEST.name, gradients: bool = False) -> Table:
        """Return a table (of the library rich) of the `n` values with the greatest risk of overflow in `fmt`, the riskiest first.

        Values of equal risk are sorted by magnitude, the largest first. With `gradients` the table shows gradients instead of values.
        """
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(printable(self._title(fmt, gradients))), title_style="table.title")
        for title in _TITLES:
            table.add_column(title, justify="left" if title == "node" else "right")
        for name, *figures in self._rows(n, fmt, gradients):
            table.add_row(Text(printable(name)), *figures)
        return table

    def _title(self, fmt: str, gradients: bool) -> str:
        return f"{self.model}: {'gradients' if gradients else 'values'} in {self.batches} batches, against {fmt}"

    def _rows(self, n: int, fmt: str, gradients: bool) -> Iterator[tuple[str, ...]]:
        """Yield a row (name, figures…) for each of the `n` values, or gradients, with the greatest risk of overflow in `fmt`."""
        row = FORMATS[fmt]
        found = [
            (f"{region.name}/{name}" if len(self.regions) > 1 else name, seen)
            for region in self.regions
            for name, seen in (region.gradients if gradients else region.values).items()
            if seen.count
        ]
        found.sort(key=lambda item: (item[1].overflow_in_pass(row), item[1].amax), reverse=True)
        for name, seen in found[:n]:
            smallest = f"{seen.smallest:.3g}" if math.isfinite(seen.smallest) else "-"
            lost = str(seen.nan + seen.infinite) if seen.nan or seen.infinite else "-"
            yield name, f"{seen.amax:.3g}", smallest, f"{seen.overflow_in_pass(row):.2g}", f"{seen.underflow(row):.2g}", lost

    def __str__(self) -> str:
        return as_text(self.table())

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        return fragment([self._title(NARROWEST.name, False)], _TITLES, self._rows(20, NARROWEST.name, False))


def merge(ours: Mapping[str, ValueRange], theirs: Mapping[str, ValueRange]) -> dict[str, ValueRange]:
    """Return the union of two mappings from names to ranges. If both mappings have a name, its two ranges are merged."""
    return {name: ours.get(name, ValueRange()) | theirs.get(name, ValueRange()) for name in {**ours, **theirs}}


def fingerprint(graph: OpGraph) -> str:
    """Return a hash of the names, ops and operands of a graph's nodes. It does not depend on batch size, formats or op lists."""
    lines = (
        f"{node.name} {node.op} {' '.join(operand.value for operand in node.operands)}"
        for node in graph
        if node.dtype or node.role == "output"  # leave out sizes (SymInt): a graph of fixed sizes has none and must get the same hash
    )
    return _digest(lines)


def parameters_fingerprint(model: torch.nn.Module) -> str:
    """Return a hash of the names and shapes of the parameters of `model`."""
    return _digest(f"{name} {tuple(p.shape)}" for name, p in named_parameters_in(model))


def as_text(table: Table, width: int = 110) -> str:
    """Return a table of the library rich as plain text, `width` characters wide."""
    screen = console(width=width, no_color=True)
    with screen.capture() as capture:
        screen.print(table)
    return capture.get()


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class KeepHigh:
    """Result of an accuracy search: the nodes to keep in fp32."""

    graphs: Mapping[str, Mapping[str, str]]
    """Fingerprint of a graph → name of a node → the reason in words."""
    note: str = ""
    """A sentence with the target and the result of the search, which the plan shows among its notes."""

    def of(self, graph: OpGraph) -> Mapping[str, str] | None:
        """Return {name of a node to keep in fp32: reason in words} for `graph`; None if the accuracy search did not see this graph."""
        return self.graphs.get(fingerprint(graph))
