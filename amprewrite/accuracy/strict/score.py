"""Run plans under the strict interpreter, and measure only the error of the outputs. The search for a plan within an error uses this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from amprewrite.accuracy.strict.interpreter import Recording, Row, StrictInterpreter, StrictRegion
from amprewrite.accuracy.strict.metric import Metric, check_reference, kept
from amprewrite.accuracy.trial import GraphRunner, Trial
from amprewrite.graphs.fx.captured import Captured
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes import plan_region
from amprewrite.passes.driver import rewrite_graph
from amprewrite.runtime.compiler.capture_check import results_of
from amprewrite.tables.vocabulary import Colour

_NOTHING = Row("", "", Colour.HIGH, 0.0, 0.0, 0.0, 0.0, 0.0)


class _Unmeasured(StrictInterpreter):
    """A strict interpreter that rounds as its base class does, but does not measure the error of each result, to save time."""

    def _row(self, *args: Any) -> Row:
        return _NOTHING


def run_fp32(captured: Captured, inputs: tuple[Any, ...]) -> Any:
    """Run a captured graph on real inputs, in fp32 and without gradients."""
    with torch.no_grad():
        return captured.module(*inputs)


class RoundedRunner:
    """Runs captured graphs in fp32 with the rounding of a plan. Each graph is planned at its first run.

    `prepare` returns the graph to plan for a captured graph: the same graph with nodes to keep in fp32, or the graph read with other lists.
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
        """The plans of the graphs that ran, and of the body graphs of their checkpoints."""
        return [part for region in self.regions.values() for part in region.plan.flat(region.plan.name)]


def planned(captured: Captured) -> RegionPlan:
    """Return a plan of a captured graph, in which ops that refuse low inputs stay fp32.

    To find these ops, the first call also edits a copy of the graph by the plan, and runs the copy on fake tensors. Later calls only plan,
    because `captured` keeps the ops found. A graph with body graphs (activation checkpoints, loops) is edited and run at each call.
    """
    if captured.tried:
        return plan_region(captured.problem)
    _, plan = rewrite_graph(captured)
    captured.tried = not plan.bodies  # False if there are body graphs, because only `rewrite_graph` plans these
    return plan


def reference(trial: Trial, batches: Sequence[Any], metric: Metric) -> list[Any]:
    """Return a copy of the fp32 output for each batch.

    Raises CalibrationError if nothing of the model was captured, or if an output has no floating tensor or holds NaN.
    """
    results = [kept(trial.run(batch, run_fp32)) for batch in batches]
    trial.check_captured()
    for index, output in enumerate(results):
        check_reference(results_of(output), trial.name, index)
        check_reference(metric.outputs(output), trial.name, index)
    return results


def strict_error(trial: Trial, batches: Sequence[Any], exact: Sequence[Any], runner: GraphRunner, metric: Metric) -> float:
    """Run all batches with `runner` and return the error of the outputs against the fp32 outputs `exact`.

    The error is inf if outputs overflow or change shape, unless the metric is a user's function.
    """
    return metric.over([metric.error(wanted, trial.run(batch, runner)) for batch, wanted in zip(batches, exact, strict=True)])
