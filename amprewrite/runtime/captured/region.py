"""Run one rewritten graph: a Region is the function that Dynamo calls in place of the code that it captured."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from amprewrite.graphs.fx.ops.on_device import recording
from amprewrite.graphs.fx.run.first_run import FirstRun, Refusals
from amprewrite.graphs.fx.uncaptured import closed_if_raised, pushed
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes.lower.emit import CompiledFn
from amprewrite.passes.weigh_plans import weighed
from amprewrite.runtime.ambient.past import Past
from amprewrite.runtime.captured.look_ahead import LookAhead
from amprewrite.runtime.compiler.dynamo import suspend_dispatch_modes
from amprewrite.runtime.training.overflow_probe import LatestInputs
from amprewrite.runtime.training.training import Training
from amprewrite.runtime.weights.weight_reads import ReadChecks, WeightReads

_IS_LEAF = operator.attrgetter("is_leaf")
Running = tuple[CompiledFn, torch.fx.GraphModule | None, WeightReads, Refusals]
"""An emitted graph: the function that runs, the edited graph (None if it scales no gradients), how the graph reads weights, and the ops
that refused low operands."""


def scale_device(graph: torch.fx.Graph) -> torch.device:
    """Return the device of the loss scale in a graph that scales gradients. The scale is the last input of the graph."""
    example: torch.Tensor = graph.find_nodes(op="placeholder")[-1].meta["example_value"]
    return example.device


class Region:
    """One rewritten graph, which Dynamo calls in place of the code that it captured.

    `module` is the edited graph. It is kept only if the graph scales gradients; otherwise `module` is None. `place` names the module whose
    code the graph is from. All graphs of the model share `training` and `checks`.
    """

    whole = False
    """True if the graph is all of its module's forward."""
    enters_regions = False
    """True if the graph enters contexts such as `torch.no_grad()`. They must be left if the graph raises an error."""

    def __init__(
        self, place: str, training: Training, checks: ReadChecks, plan: RegionPlan, run: CompiledFn,
        module: torch.fx.GraphModule | None = None, reads: WeightReads | None = None, refused: Refusals | None = None,
    ) -> None:  # fmt: skip
        self.place, self.training, self.checks = place, training, checks
        self.plan, self.run, self.module, self.reads = plan, run, module, reads or WeightReads()
        self.refused: Refusals = {} if refused is None else refused
        self.keep_high: Callable[[Refusals, tuple[Any, ...]], None] | None = None
        """Function that plans and emits the graph anew, so that the ops that refused low operands stay fp32; None after the first call."""
        self.device = torch.device("cpu") if module is None else scale_device(module.graph)
        self._past = Past[tuple[CompiledFn, WeightReads]]()
        self.latest = None if module is None else LatestInputs(plan, module)
        self.look_ahead: LookAhead | None = None
        self._weighed: tuple[RegionPlan | None, RegionPlan] = None, plan

    def weighed(self) -> RegionPlan:
        """Return the plan with the prices of the plans that it was compared with. They are computed when the plan is first read."""
        if (plan := self.plan) is not self._weighed[0]:
            self._weighed = plan, weighed(plan)
        return self._weighed[1]

    def become(
        self, plan: RegionPlan, run: CompiledFn, module: torch.fx.GraphModule | None, reads: WeightReads, refused: Refusals
    ) -> None:
        """Replace the running graph by a new rewrite of the same capture. Recomputations of earlier forwards still run the old one."""
        self._past.keep((self.run, self.reads))
        self.plan, self.run, self.module, self.reads, self.refused = plan, run, module, reads, refused

    def call(self, inputs: tuple[Any, ...], forward: int) -> Any:
        """Run the graph on the inputs of its captured code, and return its results.

        In fp16, an observed run in fp32 precedes each of the first calls. `forward` is the number of this forward of the model.
        """
        first = self.look_ahead
        with closed_if_raised() if self.enters_regions else contextlib.nullcontext():
            result = self.call_steady(inputs) if first is None else first.call(self.call_steady, inputs, forward)
        if first is not None and first.left < 0:
            self.look_ahead = None
        return result

    def call_steady(self, inputs: tuple[Any, ...]) -> Any:
        """Run the graph, with the loss scale as an additional input if it scales gradients, under the user's dispatch modes.

        A caller may use this method in place of `call` if `look_ahead` is None and `enters_regions` is False.
        """
        run, reads, scaled, given = self.run, self.reads, self.latest, inputs
        if self._past.before:
            run, reads = self._past.of_forward((run, reads))
        for check in self.checks.graphs:
            check(reads, self.place)
        if scaled is not None:
            learning, fed = scaled.taking_gradients(inputs)
            forward = self.training.forward_scale(self.device, len(learning) > 0)
            if fed or not all(map(_IS_LEAF, learning)):
                forward.copy_scale()
            inputs = (*inputs, *forward.on(self.device))
            scaled.keep(inputs)
            if self.training.probe.armed and not recording(self.device):
                run = self._watched
        modes = suspend_dispatch_modes.modes
        if not modes:
            results = run(*inputs)
        else:
            with pushed(modes):
                results = run(*inputs)
        if self.keep_high is not None:
            self._first_is_over(given)
        if scaled is not None:
            watched = results if isinstance(results, tuple | list) else (results,)
            forward.watch(watched, learning, fed)
            self.training.gate.await_backward(watched, [*map(id, learning)])
        return results

    def _first_is_over(self, inputs: tuple[Any, ...]) -> None:
        """After the first call, which runs op by op, plan the graph anew if ops refused low operands; otherwise run its generated code."""
        keep_high, self.keep_high = self.keep_high, None
        if self.refused and keep_high is not None:
            keep_high(self.refused, inputs)
        elif isinstance(self.run, FirstRun):
            self.run = self.run.later

    def _watched(self, *inputs: Any) -> Any:
        """Run the graph op by op, and find the first result or gradient that is not finite."""
        assert self.module is not None
        return self.training.probe.run(self.plan, self.module, inputs)
