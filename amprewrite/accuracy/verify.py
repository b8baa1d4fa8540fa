"""Measure the rounding errors of a plan, op by op, independent of this machine's kernels.

CPU kernels may compute fp16 in fp32, which hides rounding errors. So `verify` runs a plan under the strict interpreter: every op runs
in fp32, and the results of low ops and of casts to the low format are rounded to nearest even. Comparison with the op's result before
rounding gives the error that the op introduces; comparison with an unrounded run gives the error accumulated so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from amprewrite.accuracy.strict.interpreter import Row
from amprewrite.accuracy.strict.run import StrictRun
from amprewrite.tables.boundary.printable import fragment
from amprewrite.tables.vocabulary import Colour

Measure = Literal["accumulated", "introduced", "overflow", "underflow", "largest"]
WIDTH = 80
"""Width of a printed report in characters."""
_COLUMNS = {"colour": 6, "own": 8, "total": 8, "largest": 8, "over": 6, "under": 6}
"""Titles and widths of the columns of figures in a printed report."""
LOST = 0.1
"""A row whose total relative error is at least LOST is shown even if its op introduced no rounding error."""


@dataclass(frozen=True)
class Report:
    """Result of `verify`: the errors of a rewritten model on one set of inputs. `print(report)` shows the worst nodes first."""

    low: str
    """Name of the low format."""
    rows: tuple[Row, ...]
    """Measured errors of each op result and each cast copy, in running order."""
    output_error: float
    """Relative L2 error of the rounded run against the fp32 run, over all floating outputs of the model together."""
    notes: tuple[str, ...] = ()
    capture_error: float | None = 0.0
    """Relative L2 error of the captured fp32 graphs against the eager model: the effect of capture alone, without rounding.

    The value is 0 if the error is within fp32's rounding, and None if two runs of the model differ.
    """
    parted: str = ""
    """The first captured op whose result the eager model does not compute; "" if none was found."""

    @property
    def overflows(self) -> tuple[Row, ...]:
        """Rows with values that overflow the low format, in running order. Later overflows often follow from the first."""
        return tuple(row for row in self.rows if row.overflow > 0)

    def worst(self, n: int = 10, by: Measure = "accumulated") -> tuple[Row, ...]:
        """Return the `n` worst rows: first rows with overflow in running order, then the other rows in falling order of the field `by`."""

        def badness(row: Row) -> float:
            value: float = getattr(row, by)
            return -1.0 if math.isnan(value) else value

        others = sorted((row for row in self.rows if not row.overflow), key=badness, reverse=True)
        return (*self.overflows, *others)[:n]

    def table(self, n: int = 20, by: Measure = "accumulated") -> str:
        """Return a text table of the `n` worst rows, 80 characters wide: format, own and total error, largest value, over- and underflow.

        Rows with overflow are first; the other rows are in falling order of the field `by`. Rows of low-precision results are left out
        if their own error is 0 and their total error is below `LOST` (0.1).
        """
        return table_of("node", _COLUMNS, self._telling(by), n, _figures)

    def _telling(self, by: Measure = "accumulated") -> list[Row]:
        """Return the rows that a printed report shows, worst first. Low rows with an own error of 0 and a small total error are omitted."""

        def tells(row: Row) -> bool:
            return row.colour is Colour.HIGH or row.introduced > 0 or row.overflow > 0 or not row.accumulated < LOST

        return [row for row in self.worst(len(self.rows), by) if tells(row)]

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", self.table()])

    def _repr_html_(self) -> str:
        """Return an HTML fragment that notebooks display."""
        rows = ((f"{row.name} in {row.module}" if row.module else row.name, *_figures(row)) for row in self._telling()[:20])
        return fragment(self._head(), ("node", *_COLUMNS), rows)

    def _head(self) -> list[str]:
        bad = self.overflows
        lines = [f"strict run in {self.low}: output error {self.output_error:.2e} over {len(self.rows)} results and cast copies"]
        if bad:
            lines.append(f"overflow: {bad[0].name} is the first of {len(bad)}; it reaches {bad[0].largest:.3g}")
        if self.capture_error != 0:
            lines.append(f"capture: {self._captured()}")
        return lines + [f"note: {note}" for note in self.notes]

    def _captured(self) -> str:
        if self.capture_error is None:
            return "not compared with the eager model, of which two runs differ"
        place = f", from {self.parted} on" if self.parted else ""
        return f"changed the model by {self.capture_error:.2e} in fp32, before any rounding{place}; torch.compile alone does the same"


def verify(amp: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Report:
    """Measure the errors of the rewritten model `amp` on these inputs, op by op, with every low result truly rounded.

    The model is captured again in its current mode (train or eval, with or without gradients). The original model also runs eagerly, so
    that the report separates effects of capture from effects of rounding. Buffers, random state and inputs do not change. During the
    call, memory holds all results of one fp32 run.

    Raises PolicyError if `amp` is not rewritten, CaptureError if nothing of it can be captured.
    """
    run = StrictRun(amp, args, kwargs)
    found = run.rounded()
    return Report(run.low, found.rows, found.error, found.notes, *run.capture())


# -- format reports as text -----------------------------------------------------------------
def _figures(row: Row) -> Sequence[str]:
    errors = (f"{figure:.2e}" for figure in (row.introduced, row.accumulated, row.largest))
    return row.colour.value, *errors, percentage(row.overflow), percentage(row.underflow)


def table_of(first: str, columns: Mapping[str, int], rows: Sequence[Row], most: int, figures: Callable[[Row], Sequence[str]]) -> str:
    """Format the first `most` rows as a text table.

    `first` is the title of the first column, which shows node and module. `columns` has {title: width} of the other columns, and
    `figures(row)` returns their cells.
    """
    left = WIDTH - sum(columns.values()) - len(columns)
    lines = [f"{first:{left}}" + "".join(f" {title:>{width}}" for title, width in columns.items())]
    for row in rows[:most]:
        cells = zip(figures(row), columns.values(), strict=True)
        lines.append(place_of(row, left) + "".join(f" {text:>{width}}" for text, width in cells))
    return "\n".join([*lines, *[f"and {len(rows) - most} more"] * (len(rows) > most)])


def percentage(share: float) -> str:
    return f"{100 * share:.3g} %" if share else "-"


def place_of(row: Row, width: int) -> str:
    """Return a row's name and module, padded or cut to `width` characters. A long name or module path is cut at the front."""
    name = row.name if len(row.name) <= width else "…" + row.name[1 - width :]
    room = width - len(name) - len(" in ")
    if not row.module or room < 6:
        return f"{name:{width}}"
    module = row.module if len(row.module) <= room else "…" + row.module[1 - room :]
    return f"{name} in {module}".ljust(width)


__all__ = ["Report", "Row", "verify"]
