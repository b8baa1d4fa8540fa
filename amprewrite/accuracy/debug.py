"""The numerics debugger: compare the low run with fp32 op by op, find numeric faults, and suggest the fewest nodes to keep in fp32.

Every op's error is split into a part inherited from its operands and a part introduced by its own rounding. An ordinary rounding
introduces at most half an eps. Only larger errors are reported, of three kinds:

1. *overflow*: finite values that exceed the format's range;
2. *underflow*: values that are rounded to zero, or to subnormals with few bits;
3. *cancellation*: an op with a far larger relative error than its operands, because it subtracts nearly equal values. The bits were lost
   earlier, where the largest operand was rounded. So the finding names that node and the op.

`suggest_overrides` starts with every low node in fp32. It makes chunks of them low again (half of the nodes, a quarter, and so on) as
long as the output error stays within the target (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002).
In the end, no single further node can be made low without missing the target, unless the limit of runs ends the search earlier. A real
rewrite then checks the result.
"""

from __future__ import annotations

import glob
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from amprewrite.accuracy.strict.interpreter import Row
from amprewrite.accuracy.strict.run import Outcome, StrictRun
from amprewrite.accuracy.trial import Loss
from amprewrite.accuracy.verify import percentage, table_of
from amprewrite.ir.evidence.agreed import NOTHING_AGREED
from amprewrite.ir.policies.policy import Override, parse_overrides
from amprewrite.report.cast_plan import CastPlan
from amprewrite.report.counts import op_table
from amprewrite.runtime.model.rewritten import RewrittenBase, face_of, plain_of, session_of, wrap
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.errors import AmpRewriteWarning, PolicyError
from amprewrite.tables.formats import FORMATS, FP32
from amprewrite.tables.vocabulary import Colour

GROWTH = 8.0
"""An op is reported as cancellation if its error before rounding is more than GROWTH times the largest error of its operands.

For comparison, a sum of k rounded terms has about √k times the error of a term. An op is also reported, as underflow, if its own rounding
error is more than GROWTH eps of the low format. Rounding a normal number loses at most half an eps, so such values are subnormal or zero.
"""
NOISE = 16.0
"""A cancellation, or an underflow to zero (`FLUSHED`), is reported only if its error is more than this many eps of the low format."""
FLUSHED = 0.1
"""An op is reported as underflow if at least this share of its values rounds to zero and its rounding error is above NOISE eps.

A gradient is reported if at least the same share of its values rounds to zero and its rounding error is above 0.01.
"""
TOLERANCE = 8.0
"""Default limit of `suggest_overrides` for the relative output error, in eps of the low format."""
MOST_CHECKED = 10
"""If `suggest_overrides` finds at most this many fp32 nodes, it tries each in the low format again, and leaves it low if the target is met.

The number is small because each test of a node rewrites and captures the model again.
"""


@dataclass(frozen=True)
class Finding:
    """One numeric fault of the low run, such as an overflow: where it shows, and where the bits were lost."""

    kind: str
    """overflow, underflow or cancellation."""
    row: Row
    """Measured errors of the tensor in which the fault shows."""
    lost_at: Row
    """Measured errors of the tensor whose rounding lost the bits: the same tensor as in `row`, or a tensor upstream."""
    detail: str
    """The figures of the fault, in words."""
    backward: bool = False
    """Whether the fault is in a gradient."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of two nodes: where the bits were lost, and where the fault shows. One name if both are the same node."""
        return tuple(dict.fromkeys(_node(row) for row in (self.lost_at, self.row)))

    def __str__(self) -> str:
        way = "gradient " * self.backward
        text = f"{way}{self.kind} at {_at(self.row)}: {self.detail}"
        return text if self.lost_at is self.row else f"{text}; the bits were lost at {_at(self.lost_at)}"


@dataclass(frozen=True)
class DebugReport:
    """Comparison of the low run with the fp32 run, node by node. `print(report)` shows the faults first."""

    low: str
    plan: CastPlan
    rows: tuple[Row, ...]
    """Measured errors of each op result and each cast copy of the forward pass, in running order."""
    gradient_rows: tuple[Row, ...]
    """Measured errors of each rounded gradient of the backward pass, in running order. Magnitudes include the loss scale."""
    gradients: Mapping[str, float]
    """Relative L2 error of each parameter's gradient, by the parameter's name."""
    output_error: float
    """Relative L2 error of the rounded run against the fp32 run, over all floating outputs of the model together."""
    findings: tuple[Finding, ...]
    """Faults in the order in which they occur, forward before backward."""
    notes: tuple[str, ...] = ()
    run: StrictRun | None = field(default=None, repr=False, compare=False)
    amp: nn.Module | None = field(default=None, repr=False, compare=False)

    @property
    def first_bad(self) -> Finding | None:
        """The first of `findings`; None if there is no fault."""
        return self.findings[0] if self.findings else None

    def op_table(self) -> str:
        """Return a text table of each op's calls and FLOPs, in the low format and in fp32."""
        return op_table(self.plan)

    def table(self, n: int = 20, backward: bool = False) -> str:
        """Return a text table of the `n` results or cast copies with the largest total errors. Results that overflow come first.

        Its columns are the inherited error, the op's own rounding error, the total error, the smallest and largest magnitude, and the
        shares of elements that overflow and underflow. Low results without rounding error are omitted. `backward=True` shows gradients.
        """
        rows = self.gradient_rows if backward else self.rows
        shown = [row for row in rows if row.introduced or row.overflow or row.colour is Colour.HIGH]
        shown.sort(key=lambda row: -(math.inf if row.overflow else 0.0 if math.isnan(row.accumulated) else row.accumulated))
        columns = {"inherit": 7, "own": 7, "total": 7, "min": 7, "max": 7, "over": 6, "under": 6}

        def figures(row: Row) -> Sequence[str]:
            errors = map(_figure, (row.inherited, row.introduced, row.accumulated, row.smallest, row.largest))
            return *errors, percentage(row.overflow), percentage(row.underflow)

        return table_of("gradient" if backward else "node", columns, shown, n, figures)

    def suggest_overrides(self, max_rel_err: float | None = None, most_runs: int = 300) -> dict[str, str]:
        """Find overrides that keep few nodes in fp32 and bring the relative L2 error of the outputs down to `max_rel_err`.

        `max_rel_err=None` means 8 eps of the low format (0.06 in bf16, 0.008 in fp16). Pass the result to `rewrite` as `overrides=`; it
        includes the overrides that the model already has. `most_runs` limits the number of trial runs of the model.

        Warns with AmpRewriteWarning if the target is not reached. Raises PolicyError if `max_rel_err` is no positive number.
        """
        assert self.run is not None and self.amp is not None
        target = TOLERANCE * FORMATS[self.low].eps if max_rel_err is None else max_rel_err
        if not target > 0:
            raise PolicyError(f"max_rel_err={shown(max_rel_err)} is no error to aim at; give a positive number")
        return _suggest(self.run, self.amp, target, most_runs)

    def __str__(self) -> str:
        count = f"{len(self.findings)} finding{'s' * (len(self.findings) != 1)}"
        lines = [f"debugged in {self.low}: output error {self.output_error:.2e}, {count}"]
        lines += [f"{number}. {finding}" for number, finding in enumerate(self.findings, 1)]
        if not self.findings:
            lines.append("no overflow, no underflow to speak of, no cancellation: errors are rounding as usual")
        lines += [f"note: {note}" for note in self.notes]
        lines += ["", self.table(12)]
        if self.gradient_rows:
            worst = sorted(self.gradients.items(), key=lambda item: -item[1])[:3]
            lines += ["", self.table(8, backward=True), "gradients furthest off: " + ", ".join(f"{n} {e:.2e}" for n, e in worst)]
        return "\n".join([*lines, "", self.op_table()])


def debug(
    amp: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backward: bool | None = None,
    loss: Loss | None = None,
) -> DebugReport:
    """Run the rewritten model `amp` with and without rounding on the same inputs, and report the nodes where the numbers differ.

    `backward=True` also runs backward from `loss(output)`, a 0-dim tensor. `backward=None` does so if gradients are enabled, and either the
    model is in training mode or `loss` is given. Without `loss`, the loss is the attribute or item `loss` of the output if it is a 0-dim
    tensor. Otherwise it is the sum of the mean squares of the outputs that require a gradient, or the only such output itself if 0-dim.

    The model is captured again in its current mode. Parameters, `.grad`, buffers, random state and inputs do not change. Raises PolicyError
    if `amp` is not rewritten, there is no loss, or gradients are off with `backward=True`; CaptureError if nothing can be captured.
    """
    if backward is None:
        backward = torch.is_grad_enabled() and (loss is not None or (isinstance(amp, nn.Module) and amp.training))
    if backward and not torch.is_grad_enabled():
        raise PolicyError("backward=True needs gradients: call debug outside torch.no_grad()")
    run = StrictRun(amp, args, kwargs, backward, loss, "debug")
    found = run.rounded()
    findings = (*_findings(found.rows, run.low), *_gradient_findings(found))
    return DebugReport(run.low, run.plan, found.rows, found.gradient_rows, found.gradients, found.error, findings, found.notes, run, amp)


# -- find faults in the measured rows -----------------------------------------------------
def _findings(rows: Iterable[Row], low: str) -> Iterator[Finding]:
    fmt = FORMATS[low]
    by_name: dict[str, Row] = {}
    told: set[str] = set()
    for row in rows:
        by_name[row.name] = row
        if fmt is FP32:
            continue
        if row.overflow:
            reach = f"{percentage(row.overflow)} of its values pass {fmt.max:.4g}, the largest reaches {row.largest:.3g}"
            if row.op != "cast" or _node(row) not in told:
                yield Finding("overflow", row, row, reach)
            told.add(_node(row))
        elif row.underflow >= FLUSHED and row.introduced > NOISE * fmt.eps:
            zeros = f"{percentage(row.underflow)} of its values become zero, below {fmt.smallest_subnormal:.2g}"
            yield Finding("underflow", row, row, zeros)
        elif row.introduced > fmt.eps * GROWTH:
            yield Finding("underflow", row, row, f"its values, from {row.smallest:.2g} up, lie where {low} keeps few bits")
        elif _cancels(row, by_name, fmt.eps):
            before, lost = max(_errors(row, by_name), default=0.0), _lost_at(row, by_name)
            if lost.largest > fmt.max:  # the cast clamped too large a value, such as a mask: report an overflow instead of a cancellation
                yield Finding("overflow", lost, lost, f"the largest reaches {lost.largest:.3g} and is clamped to {fmt.max:.4g}")
                continue
            yield Finding("cancellation", row, lost, f"the relative error grows from {before:.2g} to {row.inherited:.2g}")


def _errors(row: Row, by_name: Mapping[str, Row]) -> list[float]:
    return [by_name[name].accumulated for name in row.inputs if name in by_name]


def _cancels(row: Row, by_name: Mapping[str, Row], eps: float) -> bool:
    """True if the op of `row` loses accuracy by cancellation: its result has a far larger error than its operands.

    The error before rounding must exceed NOISE * eps, and also GROWTH times the largest error of an operand. False for casts, for ops
    without measured operands, and if one of the errors is not finite.
    """
    errors = _errors(row, by_name)
    if row.op == "cast" or not errors or not all(map(math.isfinite, (*errors, row.inherited))):
        return False
    return row.inherited > NOISE * eps and row.inherited > GROWTH * max(errors)


def _lost_at(row: Row, by_name: Mapping[str, Row]) -> Row:
    """Return the row (measured errors of one tensor) whose rounding caused the error of `row`.

    The search goes upstream from `row`, at each step to the operand with the largest absolute error. It ends at the first operand whose own
    rounding error is more than a tenth of its total error. If this operand is a cast copy, return the row of the value that was cast. It
    also ends at a row without measured operands. If that row is a cast copy without a rounding error, no cause is found: return `row`.
    """
    here, seen = row, {row.name}
    while True:
        fed = [by_name[name] for name in here.inputs if name in by_name and name not in seen]
        if not fed:
            return row if here.op == "cast" and not here.introduced else here
        here = max(fed, key=lambda r: r.accumulated * r.largest if math.isfinite(r.accumulated) else 0.0)
        seen.add(here.name)
        if here.introduced > 0.1 * here.accumulated:
            return by_name.get(_node(here), here) if here.op == "cast" else here


def _gradient_findings(found: Outcome) -> Iterator[Finding]:
    """Yield a `Finding` for the first overflow of the backward pass, and for each gradient in which many elements round to zero."""
    overflowed = False
    for row in found.gradient_rows:
        if row.overflow and not overflowed:
            overflowed = True
            yield Finding("overflow", row, row, f"{percentage(row.overflow)} of it, the largest reaches {row.largest:.3g}", True)
        elif row.underflow >= FLUSHED and row.introduced > 1e-2:
            yield Finding("underflow", row, row, f"{percentage(row.underflow)} of it becomes zero; a larger loss scale keeps it", True)


def _node(row: Row) -> str:
    return row.name.partition(" -> ")[0]


def _at(row: Row) -> str:
    source = f" ({row.source})" if row.source else ""
    module = f" in {row.module}" if row.module else ""
    return f"{_node(row)}{module}{source}"


def _figure(value: float) -> str:
    return "-" if math.isnan(value) else "inf" if math.isinf(value) else f"{value:.1e}" if value else "0"


# -- suggested overrides ---------------------------------------------------------------------
def _suggest(run: StrictRun, amp: nn.Module, target: float, most_runs: int) -> dict[str, str]:
    ops = [(node.name.rpartition("/")[2], node.colour) for node in run.plan.nodes if node.role == "op"]
    low = dict.fromkeys(name for name, colour in ops if colour is Colour.LOW)
    asked = partial(_overrides, session_of(amp).options.overrides, [name for name, _ in ops])
    trials = _Trials(run, target, most_runs)
    if trials.holds(()) or not low:
        return asked(())
    kept = trials.fewest(list(low))
    while True:
        error = _real_error(amp, run, asked(kept))
        if error <= target or set(kept) >= set(low):
            break
        # The rewrite misses the target, because casts around the kept nodes round values. So also keep the neighbours in fp32.
        kept = _with_neighbours(run.plan, kept, set(low))
    if error <= target and len(kept) <= MOST_CHECKED:
        for name in tuple(kept):  # let each node run low again if the output error then still meets the target
            fewer = [each for each in kept if each != name]
            kept = fewer if _real_error(amp, run, asked(fewer)) <= target else kept
    if not error <= target:
        warnings.warn(
            f"with every node in fp32 that can be, the output error is {error:.2g}, above {target:.2g}: give a larger max_rel_err",
            AmpRewriteWarning,
            stacklevel=3,
        )
    return asked(kept)


def _overrides(own: Sequence[Override], names: Sequence[str], kept: Sequence[str]) -> dict[str, str]:
    """Return the model's overrides `own`, with an override to fp32 added for each node of `kept`. `names` has the names of all nodes.

    Two overrides must not contradict each other for a node. So an override in `own` that matches a node of `kept` is split: every
    other matching node gets a separate override.
    """
    asked: dict[str, str] = {}
    for each in own:
        if any(map(each.matches_node, kept)):
            asked |= {f"node:{glob.escape(name)}": each.word for name in names if each.matches_node(name)}
        else:
            asked[each.key] = each.word
    return asked | {f"node:{glob.escape(name)}": "fp32" for name in kept}


class _Trials:
    """Runs the model with some nodes in fp32, to find few nodes that keep the output error within `target`. Makes at most `most` runs."""

    def __init__(self, run: StrictRun, target: float, most: int) -> None:
        self.run, self.target, self.left = run, target, most
        self.known: dict[frozenset[str], bool] = {}

    def holds(self, kept: Iterable[str]) -> bool:
        """Run the model with the nodes `kept` in fp32, and return True if the output error is then within the target.

        A set of nodes that was tried before is not run again. For a new set, return False if no runs are left.
        """
        asked = frozenset(kept)
        if asked not in self.known:
            if not self.left:
                return False
            self.left -= 1
            self.known[asked] = self.run.rounded(asked).error <= self.target
        return self.known[asked]

    def fewest(self, kept: list[str]) -> list[str]:
        """Return a small subset of the fp32 nodes `kept` that meets the target. Try to make half of them low, then a quarter, and so on."""
        size = max(len(kept) // 2, 1)
        while kept:
            start, dropped = 0, False
            while start < len(kept):
                rest = kept[:start] + kept[start + size :]
                if self.holds(rest):
                    kept, dropped = rest, True
                else:
                    start += size
            if size == 1 and not dropped:
                return kept
            size = max(min(size, len(kept)) // 2, 1) if size > 1 else 1
        return kept


def _with_neighbours(plan: CastPlan, kept: list[str], low: set[str]) -> list[str]:
    near = set(kept)
    for region in plan.regions:
        for node in region.nodes:
            if node.name in kept:
                near.update(node.inputs)
            elif any(value in kept for value in node.inputs):
                near.add(node.name)
    wider = [name for name in low if name in near]
    return wider if len(wider) > len(kept) else list(low)


def _real_error(amp: nn.Module, run: StrictRun, overrides: Mapping[str, str]) -> float:
    """Rewrite the model anew with these `overrides`, run it with emulated rounding, and return its output error."""
    assert isinstance(amp, RewrittenBase)
    asked = parse_overrides(overrides, FORMATS[run.low])
    options = replace(session_of(amp).options, overrides=asked, given=None, agreed=NOTHING_AGREED)
    trial = wrap(plain_of(amp), options, face_of(amp))
    trial.train(amp.training)
    return StrictRun(trial, run.args, run.kwargs).rounded().error
