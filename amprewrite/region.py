"""One rewritten graph at run time: what Dynamo calls in place of the code that it captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch.fx
from torch import Tensor

from amprewrite.cuda_graphs import recording
from amprewrite.first_calls import FirstCalls
from amprewrite.modes_aside import pushed, put_aside
from amprewrite.overflow_probe import LatestInputs, OverflowProbe
from amprewrite.plan import RegionPlan
from amprewrite.scale_cap import cap, low_results
from amprewrite.step_gate import StepGate

CompiledFn = Callable[..., Any]


class Run(Protocol):
    """What a region needs of the run-time state of its model."""

    state: Any
    probe: OverflowProbe
    gate: StepGate

    @property
    def may_cap(self) -> bool: ...

    def scales(self) -> tuple[Tensor, Tensor]: ...


class Place(Protocol):
    """What a region needs of the entry that it was captured from."""

    @property
    def session(self) -> Run: ...


class Region:
    """One rewritten graph, as Dynamo calls it; `module` is the edited graph of one that scales gradients."""

    def __init__(self, entry: Place, plan: RegionPlan, run: CompiledFn, module: torch.fx.GraphModule | None = None) -> None:
        self.entry, self.session, self.state = entry, entry.session, entry.session.state
        self.become(plan, run, module)
        self.latest = None if module is None else LatestInputs(self)
        self.first_calls: FirstCalls | None = None

    def become(self, plan: RegionPlan, run: CompiledFn, module: torch.fx.GraphModule | None) -> None:
        """Run this from now on."""
        self.plan, self.run, self.module = plan, run, module
        self.low_results = low_results(module.graph) if module is not None and self.session.may_cap else ()

    def call(self, *inputs: Any) -> Any:
        self.state.ran.append(self)
        first = self.first_calls
        if first is None:
            return self._call(inputs)
        result = first.call(self._call, inputs)
        if first.left <= 0:
            self.first_calls = None
        return result

    def _call(self, inputs: tuple[Any, ...]) -> Any:
        run, capped = self.run, False
        if self.latest is not None:
            scale, inverse = self.session.scales()
            capped = bool(self.low_results) and not self.session.gate.guarding
            if capped:
                scale, inverse = scale.clone(), inverse.clone()
            inputs = (*inputs, scale, inverse)
            self.latest.keep(inputs)
            if self.session.probe.armed and not recording(scale.device):
                run = self._watched
        modes = put_aside.modes
        if not modes:
            results = run(*inputs)
        else:
            with pushed(modes):
                results = run(*inputs)
        if capped:
            cap(results, self.low_results, scale, inverse)
        return results

    def _watched(self, *inputs: Any) -> Any:
        return self.session.probe.run(self, inputs)


__all__ = ["Region"]
