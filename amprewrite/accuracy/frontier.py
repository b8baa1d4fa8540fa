"""Find the fastest plan within an error limit, by bisection of a chain of plans. The strict interpreter measures the error of each plan.

1. Measure the error of every edge (`sensitivity`): (value, reader) → squared output error of rounding the value for this reader.
2. Minimise time + λ·error² for growing λ (`error_cut`). This gives a chain of nested sets of nodes to keep in fp32, from none to all.
3. For each set, the planner decides the formats of all other nodes, as usual.
4. If the planner's own choice is within the target, take it. Otherwise bisect the chain. The error does not always fall along the chain,
   so also try some faster plans just before the plan found. In total, at most ceil(log2(plans)) + 3 plans are run.
5. With `accuracy="autocast"`, the plan found may keep matmuls in fp32. Then also try a plan that keeps the same nodes in fp32 as
   torch.autocast. If it is within the target, take it: its matmuls run in the same formats as under torch.autocast, with fewer casts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from amprewrite.accuracy.error_cut import Chain
from amprewrite.accuracy.sensitivity import measure_edges
from amprewrite.accuracy.strict.interpreter import Recording, Row, StrictInterpreter, StrictRegion
from amprewrite.accuracy.strict.metric import Judged, Metric, check_reference, kept, parse_metric
from amprewrite.accuracy.trial import GraphRunner, Trial
from amprewrite.graphs.fx.captured import Captured
from amprewrite.ir.cost import TICK, price
from amprewrite.ir.evidence.ranges import KeepHigh, as_text, fingerprint
from amprewrite.ir.pass_base import Problem
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes import decide, plan_region
from amprewrite.passes.driver import rewrite_graph
from amprewrite.runtime.compiler.capture_check import results_of
from amprewrite.runtime.model.rewritten import session_of
from amprewrite.runtime.options import Options
from amprewrite.tables.boundary.arguments import is_word, shown
from amprewrite.tables.boundary.printable import bar
from amprewrite.tables.errors import AccuracyError, CalibrationError, MissingPackageError, PolicyError
from amprewrite.tables.vocabulary import Colour

NEIGHBOURS = 2
"""If the search finds a plan, it also tries this many plans just before it in the chain. They are faster, and sometimes also exact enough,
because the error does not always fall along the chain."""


@dataclass(frozen=True)
class TriedPlan:
    """One plan that the search ran, with its error and predicted time."""

    name: str
    """The plan in a few words, such as "the planner's own choice"."""
    error: float
    """Error of the outputs over all batches, in the unit of the metric. Measured in fp32, with every rounding of the plan emulated."""
    seconds: float
    """Modelled time of ops and casts in one pass, in seconds, without checkpoint bodies. It compares plans and predicts no run time."""
    activation_casts: int
    """Number of casts of activations (all casts except those of weights)."""
    low_ops: int
    """Number of ops that run in the low format."""
    chosen: bool = False
    """Whether the search chose this plan."""


@dataclass(frozen=True)
class Frontier:
    """Result of `search`: the plan chosen, and all plans tried. `print(frontier)` shows a table, `plot(path)` writes a picture."""

    keep_high: KeepHigh
    """The nodes that the chosen plan keeps in fp32, with reasons."""
    target: float
    """Largest error that the search allowed, in `unit`."""
    candidates: tuple[TriedPlan, ...]
    """All plans that were run, in order of falling error."""
    plans: int
    """Number of plans in the chain that was searched."""
    evaluations: int
    """Number of plans of the chain that were run to measure their errors."""
    unit: str = "relative L2"
    """Unit of all errors."""

    @property
    def chosen(self) -> TriedPlan:
        """The plan that the search chose."""
        return next(candidate for candidate in self.candidates if candidate.chosen)

    def table(self) -> Table:
        """Return a rich table with one plan per row: error, predicted time, casts of activations, low ops."""
        title = f"{self.evaluations} of {self.plans} nested plans tried for an error of at most {self.target:.3g} ({self.unit})"
        table = Table(title=title, caption="* the plan that was taken")
        for column in ("plan", "error", "predicted time", "activation casts", "low ops"):
            table.add_column(column, justify="left" if column == "plan" else "right")
        for each in self.candidates:
            style = "bold" if each.chosen else ""
            mark = "* " if each.chosen else "  "
            numbers = (f"{each.error:.3e}", f"{1e6 * each.seconds:.1f} us", str(each.activation_casts), str(each.low_ops))
            table.add_row(mark + each.name, *numbers, style=style)
        return table

    def __str__(self) -> str:
        return as_text(self.table())

    def plot(self, path: str | Path) -> None:
        """Write a plot of error over predicted time to the file `path`. Raises MissingPackageError if matplotlib is not installed."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingPackageError("plot()", "matplotlib", "plot") from error
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="predicted time, us", ylabel=f"strict error, {self.unit}", yscale="symlog")
        finite = [each for each in self.candidates if math.isfinite(each.error)]
        axes.set_yscale("symlog", linthresh=max(min((e.error for e in finite if e.error), default=1e-8), 1e-8))
        axes.plot([1e6 * each.seconds for each in finite], [each.error for each in finite], "o", label="tried")
        axes.plot([1e6 * self.chosen.seconds], [self.chosen.error], "*", markersize=14, label="taken")
        axes.axhline(self.target, linestyle="--", label="asked for")
        axes.legend()
        figure.savefig(path)


def search(
    module: nn.Module,
    batches: Sequence[Any] | None,
    options: Options,
    tolerance: float | None = None,
    accuracy: str | None = None,
    metric: Any = None,
) -> Frontier:
    """Find the plan of `module` with the least modelled time whose output error on `batches` is within a target.

    Pass exactly one of two options for the target: `tolerance` is the largest error; `accuracy="autocast"` allows the error that
    torch.autocast's rules cause. `metric` defines the error: None or "l2" (relative L2 of all outputs), "logprob", or a function.
    All options mean the same as for `rewrite`. Errors are measured in fp32, with every rounding of the plan emulated.

    Raises PolicyError for an invalid target. Raises AccuracyError if there are no batches, if `tolerance` is below the error of fp32
    itself, or if no plan that was tried meets the target.
    """
    measure = parse_metric(metric)
    check_target(tolerance, accuracy, measure)
    asked = f"tolerance={tolerance:g}" if tolerance is not None else f"accuracy={shown(accuracy)}"
    if not batches:
        raise AccuracyError(f"{asked} is measured on data: pass calibration=batches, or example_inputs=")
    trial = Trial(module, options)
    low = options.low or session_of(trial.amp).policy.low  # if the user gave no dtype, use the default of the model's device
    trial = Trial(module, replace(options, low=low))
    exact = reference(trial, batches, measure)
    tried: list[TriedPlan] = []

    def run(name: str, prepare: Callable[[Captured], Captured]) -> float:
        runner = RoundedRunner(prepare)
        error = strict_error(trial, batches, exact, runner, measure)
        tried.append(_candidate(name, error, runner))
        return error

    target = tolerance if tolerance is not None else run("torch.autocast's rules", autocast_rules)
    if tolerance is not None:
        check_floor(trial, batches, exact, tolerance, measure)
    chain = Chain(measure_edges(trial, batches, low, measure), _own_choice, measure)

    with bar("plans tried", None) as advance:

        def error_of(index: int) -> float:
            error = run(chain.words(index), lambda captured: _keeping(captured, chain.keep_high(index)))
            advance()
            return error

        errors = bisect(error_of, len(chain), target)
    within = [index for index, error in errors.items() if error <= target]
    times = {each.name: each.seconds for each in tried}
    found = min(within, key=lambda index: (chain.flops[index], times[chain.words(index)], index), default=None)
    if found is None:
        best = min(tried[-len(errors) :], key=lambda each: each.error)
        raise AccuracyError(
            f"{asked} is not reachable: the best of the plans tried ({best.name}) has an error of {best.error:.3g}, and {target:.3g} was "
            "asked for; overrides that force ops low cost the rest, or code that runs outside the captured graphs differs by itself"
        )
    keep, name = chain.keep_high(found), chain.words(found)
    if tolerance is None and chain.raised[found]:
        theirs = _kept_by_autocast(trial, chain)
        if run(_THEIRS, lambda captured: _keeping(captured, theirs)) <= target:
            keep, name = theirs, _THEIRS
    candidates = sorted((replace(each, chosen=each.name == name) for each in tried), key=lambda each: -each.error)
    taken = next(each for each in candidates if each.chosen)
    of = "" if metric is None else f" ({measure.unit})"
    note = f"{asked}: {name}; strict error{of} {taken.error:.3g} where {target:.3g} was allowed; {len(errors)} of {len(chain)} plans tried"
    return Frontier(replace(keep, note=note), target, tuple(candidates), len(chain), len(errors), measure.unit)


_THEIRS = "the same ops high as under torch.autocast, casts shared"


def _kept_by_autocast(trial: Trial, chain: Chain) -> KeepHigh:
    """Return the nodes that torch.autocast's rules run in fp32 and the planner would run low."""
    graphs: dict[str, dict[str, str]] = {}
    for captured in trial.graphs.values():
        graph, theirs = captured.problem.graph, autocast_rules(captured).problem
        colours = decide(theirs).colours
        high = {ours.name for ours, node in zip(graph, theirs.graph, strict=True) if colours[node.name] is Colour.HIGH}
        graphs[fingerprint(graph)] = dict.fromkeys(sorted(high & chain.lows[fingerprint(graph)]), "torch.autocast's rules run it high")
    return KeepHigh(graphs)


def check_target(tolerance: float | None, accuracy: str | None, metric: Metric) -> None:
    """Raise PolicyError if `tolerance` and `accuracy` are both given, or if the given option is invalid for `metric`."""
    if tolerance is not None and accuracy is not None:
        raise PolicyError("tolerance= and accuracy= both say how accurate the plan must be: pass one of them")
    if accuracy is not None and not is_word(accuracy, "autocast"):
        raise PolicyError(f"accuracy={shown(accuracy)} is not known: 'autocast' is; for a number use tolerance=")
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if tolerance is not None and not (number and 0 < tolerance < _most(metric)):
        kind = "relative error: use a number between 0 and 1" if _most(metric) == 1 else "error: use a positive number"
        raise PolicyError(f"tolerance={shown(tolerance)} is no {kind}, such as 1e-3")


def _most(metric: Metric) -> float:
    """Return the limit below which `tolerance` must stay: 1, or infinity for a user's function, whose errors may have any size."""
    return math.inf if isinstance(metric, Judged) else 1


def check_floor(trial: Trial, batches: Sequence[Any], exact: Sequence[Any], tolerance: float, metric: Metric) -> None:
    """Raise AccuracyError if `tolerance` is below the error of fp32 itself, so that no plan can meet it.

    A run with random changes in the last bit of weights and inputs measures the error of fp32. `exact` holds the unchanged fp32 outputs.
    """
    generator = torch.Generator().manual_seed(0)

    def nudged(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.layout == torch.strided):
            return value
        up = torch.randint(0, 2, value.shape, generator=generator, device="cpu").to(value.device).bool()
        moved = torch.nextafter(value, torch.where(up, math.inf, -math.inf).to(value))
        # do not nudge whole numbers, which are exact (zeros of a mask, ids stored as floats), or numbers that would become infinite
        return torch.where((value == value.round()) | ~moved.isfinite(), value, moved)

    def run_nudged(captured: Captured, inputs: tuple[Any, ...]) -> Any:
        with torch.no_grad():
            return run_fp32(captured, tuple(nudged(value) for value in inputs))

    floor = strict_error(trial, batches, exact, run_nudged, metric)
    if tolerance < floor:
        raise AccuracyError(
            f"tolerance={tolerance:g} is below what fp32 itself reproduces: a change in the last bit of weights and inputs moves the "
            f"outputs by {floor:.2g}; ask for more than that"
        )


def autocast_rules(captured: Captured) -> Captured:
    """Return `captured.by_autocast`: the same graph, with ops classified by the op lists of torch.autocast instead of the user's."""
    assert captured.by_autocast is not None
    return captured.by_autocast


def _own_choice(captured: Captured) -> set[str]:
    """Return the names of the nodes that the planner runs low, without restrictions by an accuracy search.

    The restrictions of an earlier search (`keep_high`) are removed from `captured`, in place.
    """
    _keeping(captured, None)
    return {node.name for node in planned(captured).nodes if node.colour is Colour.LOW}


def _keeping(captured: Captured, keep_high: KeepHigh | None) -> Captured:
    """Tell a graph and the body graphs of its checkpoints which nodes to keep in fp32 (None: no nodes). Return the graph."""
    for each in captured.with_parts():
        each.know(keep_high=keep_high)
    return captured


def _candidate(name: str, error: float, runner: RoundedRunner) -> TriedPlan:
    casts = [cast for plan in runner.plans for cast in plan.casts]
    low = sum(node.role == "op" and node.colour is Colour.LOW for plan in runner.plans for node in plan.nodes)
    seconds = sum(predicted_seconds(region.captured.problem, region.plan) for region in runner.regions.values())
    return TriedPlan(name, error, seconds, sum(not cast.weight for cast in casts), low)


def predicted_seconds(problem: Problem, plan: RegionPlan) -> float:
    """Return the modelled time of one pass through the graph of `problem` with this plan, in seconds. It includes ops and casts."""
    return price(problem.graph, {node.name: node.colour for node in plan.nodes}, problem.costs.time).total * TICK


def bisect(error_of: Callable[[int], float], plans: int, target: float) -> dict[int, float]:
    """Bisect for the first plan with an error of at most `target`. Return {index: error} of all plans that were tried.

    `error_of(index)` runs a plan and returns its error. Indices are 0 … plans - 1, and plan 0 is tried first. Bisection assumes that errors
    fall with the index. As single errors may rise, NEIGHBOURS plans before the plan found are also tried. At most
    ceil(log2(plans)) + 3 plans are tried.
    """
    errors: dict[int, float] = {}

    def within(index: int) -> bool:
        if index not in errors:
            errors[index] = error_of(index)
        return errors[index] <= target

    if within(0):
        return errors
    below = 1 + bisect_left(range(1, plans), True, key=within)
    if below < plans:
        for index in range(below - 1, max(below - 1 - NEIGHBOURS, 0), -1):
            within(index)
    return errors


_NOTHING = Row("", "", Colour.HIGH, 0.0, 0.0, 0.0, 0.0, 0.0)


class _Unmeasured(StrictInterpreter):
    """A strict interpreter that rounds by the plan, but does not measure the error of each result, which saves time."""

    def _row(self, *args: Any) -> Row:
        return _NOTHING


def run_fp32(captured: Captured, inputs: tuple[Any, ...]) -> Any:
    """Run a captured graph on real inputs, in fp32 and without gradients."""
    with torch.no_grad():
        return captured.module(*inputs)


class RoundedRunner:
    """Runs captured graphs in fp32, and rounds each value that the plan makes low. Each graph is planned at its first run.

    `prepare(captured)` returns the graph to plan. For example, it stores in `captured` the nodes to keep in fp32 and returns `captured`,
    or it returns `captured.by_autocast`, the same graph with ops classified by the op lists of torch.autocast.
    """

    def __init__(self, prepare: Callable[[Captured], Captured]) -> None:
        self.prepare = prepare
        self.regions: dict[int, StrictRegion] = {}

    def __call__(self, captured: Captured, inputs: tuple[Any, ...]) -> Any:
        if id(captured) not in self.regions:
            asked = self.prepare(captured)
            self.regions[id(captured)] = StrictRegion.of(asked, planned(asked))
        with torch.no_grad():
            return _Unmeasured(self.regions[id(captured)], Recording(rounding=True)).run(*inputs)

    @property
    def plans(self) -> list[RegionPlan]:
        """The plans of the graphs that ran, and of the body graphs of their activation checkpoints."""
        return [part for region in self.regions.values() for part in region.plan.flat(region.plan.name)]


def planned(captured: Captured) -> RegionPlan:
    """Return the plan of a captured graph. Ops whose kernels refuse low inputs stay fp32.

    The first call finds these ops: `rewrite_graph` edits a copy of the graph by the plan and runs the copy on fake tensors. The ops are
    stored in `captured`, so later calls only plan. If the graph has body graphs (of activation checkpoints or loops), every call uses
    `rewrite_graph`, because no other function plans the bodies.
    """
    if captured.tried:
        return plan_region(captured.problem)
    _, plan = rewrite_graph(captured)
    captured.tried = not plan.bodies  # False if there are body graphs, because only `rewrite_graph` plans these
    return plan


def reference(trial: Trial, batches: Sequence[Any], metric: Metric) -> list[Any]:
    """Return the model's output for each batch in an unrounded fp32 run, as copies.

    Raises CalibrationError if the model cannot be run without gradients, if no graph of it was captured, or if an output has no floating
    tensor or holds NaN.
    """
    try:
        results = [kept(trial.run(batch, run_fp32)) for batch in batches]
    except RuntimeError as error:
        said = f"{trial.name} cannot be run on a batch without gradients: {type(error).__name__}: {error}"
        raise CalibrationError(f"{said}; of a model that takes gradients itself use amprewrite.debug") from error
    trial.check_captured()
    for index, output in enumerate(results):
        check_reference(results_of(output), trial.name, index)
        check_reference(metric.outputs(output), trial.name, index)
    return results


def strict_error(trial: Trial, batches: Sequence[Any], exact: Sequence[Any], runner: GraphRunner, metric: Metric) -> float:
    """Run the model on all batches, with `runner` for its graphs, and return the error of the outputs against the fp32 outputs `exact`.

    If outputs overflow or change shape, the error is inf. Only a user's metric function may return another error for such outputs.
    """
    return metric.over([metric.error(wanted, trial.run(batch, runner)) for batch, wanted in zip(batches, exact, strict=True)])
