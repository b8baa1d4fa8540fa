"""Run a rewritten model with emulated rounding: capture it again, run it once unrounded, then run it rounded as often as needed.

1. Capture a clone of the original model as `rewrite` does, and plan each captured graph. A rewritten model keeps no captured graphs.
2. Run the clone unrounded and keep every result. If `backward` is True, also keep the gradient of a loss with respect to every low result.
3. `rounded` runs the clone with the plan's rounding, and with given nodes kept in fp32. It returns a row for every result, copy and
   gradient.

A model may compute gradients itself. So even if `backward` is False, gradients are on in graphs that call torch.autograd or torch.func.
If code outside the graphs computes gradients, the first run fails, and all runs from then on have gradients on in all graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch import nn

from amprewrite.accuracy.strict.interpreter import Recording, Row, StrictInterpreter, StrictRegion
from amprewrite.accuracy.trial import Loss, deep_copy, loss_of
from amprewrite.graphs.fx.node_facts import differentiates
from amprewrite.graphs.fx.read.names import frame_path
from amprewrite.passes.driver import read_parts, rewrite_graph
from amprewrite.passes.normalise.open_grad_regions import open_compile_regions
from amprewrite.passes.weigh_plans import weighed
from amprewrite.report.cast_plan import CastPlan
from amprewrite.runtime.ambient.kept_state import state_kept
from amprewrite.runtime.compiler.capture_check import TOLERANCE, Values, relative_error, results_of
from amprewrite.runtime.compiler.dynamo import compile_afresh, parameter_names, refuse_ambient_autocast
from amprewrite.runtime.model.rewritten import RewrittenBase, plain_of, session_of
from amprewrite.runtime.options import part_paths
from amprewrite.runtime.weights.half_values import half_beside_fp32, is_half
from amprewrite.tables.boundary.members import named_parameters_in
from amprewrite.tables.errors import CaptureError, PolicyError
from amprewrite.tables.formats import FP32
from amprewrite.torch_internals.trees import tree_map


@dataclass(frozen=True)
class Outcome:
    """Result of `StrictRun.rounded`, a run with emulated rounding: the measured errors of each value, the outputs and the gradients."""

    rows: tuple[Row, ...]
    """Measured errors of each op result and each cast copy, in running order."""
    error: float
    """Relative L2 error of all floating outputs of the model together, against the unrounded fp32 run."""
    gradient_rows: tuple[Row, ...] = ()
    """Measured errors of each rounded gradient, in the order of backward."""
    gradients: dict[str, float] = field(default_factory=dict)
    """Relative L2 error of each parameter's gradient, by the parameter's name."""
    notes: tuple[str, ...] = ()


class StrictRun:
    """Captures a rewritten model again, and runs it unrounded on the given inputs. `rounded` compares rounded runs with this reference run.

    `asker` is the public function that error messages name, such as "debug". Raises PolicyError if `amp` is not rewritten, CaptureError
    if no part of it can be captured.
    """

    def __init__(
        self,
        amp: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        backward: bool = False,
        loss: Loss | None = None,
        asker: str = "verify",
    ) -> None:
        if not isinstance(amp, RewrittenBase):
            raise PolicyError(f"{asker} takes a rewritten model, not {type(amp).__name__}; pass what amprewrite.rewrite returned")
        if not isinstance(args, tuple):
            raise PolicyError(f"{asker} takes the arguments as a tuple, not {type(args).__name__}; write {asker}(amp, (x,))")
        refuse_ambient_autocast()
        self.amp, self.session = amp, session_of(amp)
        self.args, self.kwargs, self.backward, self.loss = args, kwargs, backward, loss
        if half_beside_fp32(plain_of(amp), (args, kwargs)):  # convert half inputs to fp32, as a call of `amp` does
            self.args, self.kwargs = tree_map(lambda each: each.float() if is_half(each) else each, (args, kwargs))
        self.low = FP32.name
        self.regions: list[StrictRegion] = []
        self.kept: frozenset[str] = frozenset()
        self.values: Values | None = None
        self.rounding = self.diverged = False
        self.reference: list[tuple[int, Recording]] = []
        self.runs: list[tuple[int, Recording]] = []
        self.model = plain_of(amp)
        for path in part_paths(self.model, self.session.options.granularity) or ("",):
            part = self.model.get_submodule(path)
            forward = part.forward
            backend = self._capture_in(path, parameter_names(forward))
            part.__dict__["forward"] = compile_afresh(forward, backend, whole=False, root=part)
        self.differentiable = backward
        try:
            outputs, self.exact_gradients = self._run()
        except RuntimeError:
            if self.differentiable:
                raise
            self.differentiable, self.runs = True, []
            outputs, self.exact_gradients = self._run()
        self.exact = [t.detach().clone() for t in outputs]
        self.reference = self.runs
        if not self.reference:
            name = type(self.model).__name__
            raise CaptureError(f"nothing of {name} can be captured, so there is no plan to {asker}; call it and see amp.plan.skipped")

    @property
    def plan(self) -> CastPlan:
        """The plans of all captured graphs, and of the body graphs inside them, as one `CastPlan`."""
        regions = tuple(part for region in self.regions for part in region.plan.flat(region.plan.name))
        return CastPlan(self.low, regions)

    def rounded(self, kept: frozenset[str] = frozenset()) -> Outcome:
        """Run the model with the rounding of the plan, except at the nodes `kept`, which run in fp32. Return rows and errors."""
        self.rounding, self.kept, self.diverged, self.runs = True, kept, False, []
        outputs, gradients = self._run()
        notes = ("rounding sent the model's control flow another way: later results have no fp32 counterpart",) * self.diverged
        had, got = ([tuple(each.shape) for each in results] for results in (self.exact, outputs))
        if sizes := [f"{a} in fp32 and {b} here" for a, b in zip(had, got, strict=False) if a != b]:
            notes += (f"rounding changes the shapes of results, which depend on values, so their error is infinite: {', '.join(sizes)}",)
        if unset := [str(place) for place, each in enumerate(self.exact) if each.isnan().any()]:
            notes += (f"results {', '.join(unset)} hold NaN in fp32, too; numbers that are NaN in both runs count as no error",)
        error = relative_error(outputs, self.exact)
        rows = [(number, row) for number, kept in self.runs for row in kept.rows]
        # backward visits the graphs in reverse order, and the gradient rows follow the order of backward
        back = [(number, row) for number, kept in reversed(self.runs) for row in kept.gradient_rows]
        if len(self.plan.regions) > 1:
            rows, back = ([(number, _in_plan(row, self.regions[number].plan.name)) for number, row in each] for each in (rows, back))
        errors = {name: relative_error([g], [self.exact_gradients[name]]) for name, g in gradients.items() if name in self.exact_gradients}
        return Outcome(tuple(row for _, row in rows), error, tuple(row for _, row in back), errors, notes)

    def capture(self) -> tuple[float | None, str]:
        """Compare the unrounded captured graphs with the eager model. Return (error, name of the first op with a different result).

        The name is "" if no such op is found. The error is 0 if it is within fp32's rounding, and None if two runs of the eager model
        differ, so that a comparison is not possible.
        """
        captured, self.model = self.model, plain_of(self.amp)
        try:
            wanted, _ = self._run()
            far = relative_error(self.exact, wanted)
            if far <= TOLERANCE:
                return 0.0, ""
            with Values() as values:
                again, _ = self._run()
        finally:
            self.model = captured
        if relative_error(again, wanted) > TOLERANCE:
            return None, ""
        values.add((self.args, dict(self.kwargs or {})))
        self.rounding, self.values, self.runs = False, values, []
        self._run()
        self.values = None
        parted = next((node for _, recording in self.runs for node in recording.parted), None)
        return far, "" if parted is None else f"{parted.name}{f' ({parted.source})' if parted.source else ''}"

    # -- capture ------------------------------------------------------------------------------
    def _capture_in(self, path: str, names: tuple[str, ...]) -> Callable[..., Any]:
        """Return a Dynamo backend that captures the graphs of the submodule at `path`. `names` are the parameter names of its forward."""
        return lambda module, example_inputs: self._capture(module, example_inputs, path, names)

    def _capture(self, module: torch.fx.GraphModule, example_inputs: list[Any], path: str, names: tuple[str, ...]) -> Callable[..., Any]:
        open_compile_regions(module)
        found = frame_path(module.graph, example_inputs, self.model)
        captured = self.session.read(module, example_inputs, f"graph{len(self.regions)}", path if found is None else found, names)
        self.low = captured.problem.policy.low.name
        read_parts(captured)
        _, plan = rewrite_graph(captured)
        region, number = StrictRegion.of(captured, weighed(plan)), len(self.regions)
        wanted = differentiates(module.graph)
        self.regions.append(region)

        def run(*inputs: Any) -> Any:
            with torch.set_grad_enabled((self.differentiable or wanted) and torch.is_grad_enabled()):
                return self._run_region(number, region, inputs)

        return run

    # -- running --------------------------------------------------------------------------------
    def _run_region(self, number: int, region: StrictRegion, inputs: tuple[Any, ...]) -> Any:
        recording = Recording(rounding=self.rounding, kept=self.kept, backward=self.backward, values=self.values)
        if self.rounding:
            place = len(self.runs)
            self.diverged = self.diverged or place >= len(self.reference) or self.reference[place][0] != number
            if not self.diverged:
                recording.reference, recording.gradients = self.reference[place][1].reference, self.reference[place][1].gradients
            scale = self.session.training.loss_scale
            # Without `backward`, only the model's code may compute gradients (torch.autograd.grad). They are not scaled, so the scale is 1.
            recording.scale = scale.value if scale.enabled and self.backward else 1.0
        self.runs.append((number, recording))
        return StrictInterpreter(region, recording).run(*inputs)

    def _run(self) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Run `self.model` on copies of the inputs. Return (floating outputs, {parameter name: gradient}; {} if `self.backward` is False).

        Buffers, random state and `.grad` do not change.
        """
        args, kwargs = deep_copy((self.args, dict(self.kwargs or {})))
        with state_kept(self.model):
            output = self.model(*args, **kwargs)
            # run backward before `state_kept` restores the buffers: autograd refuses a backward that needs overwritten values
            return results_of(output), self._gradients(output) if self.backward else {}

    def _gradients(self, output: Any) -> dict[str, torch.Tensor]:
        loss = default_loss(output) if self.loss is None else loss_of(self.loss, output, PolicyError)
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            raise PolicyError("loss= takes a function that makes of the model's output a 0-dim tensor with a gradient")
        parameters = {name: p for name, p in named_parameters_in(self.model) if p.requires_grad}
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return {name: g.detach() for name, g in zip(parameters, found, strict=True) if g is not None and not g.is_sparse}


def default_loss(output: Any) -> torch.Tensor:
    """Return the attribute or item `loss` of a model's output if it is a 0-dim tensor. Otherwise compute a loss from its tensors.

    Only tensors that require a gradient count. If there is only one, of 0 dims, it is the loss. Otherwise the loss is the sum of the mean
    squares of these tensors. Raises PolicyError if no tensor requires a gradient.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and not own.dim():
        return own
    found = [t for t in results_of(output) if t.requires_grad]
    if len(found) == 1 and not found[0].dim():
        return found[0]
    if not found:
        raise PolicyError("no output of the model has a gradient: call debug with backward=False, or give it a loss=")
    return torch.stack([t.float().square().mean() for t in found]).sum()


def _in_plan(row: Row, graph: str) -> Row:
    """Return `row` with node names as in a plan of several graphs: "body_0/linear" of `graph` "graph0" becomes "graph0.body_0/linear"."""

    def named(name: str) -> str:
        *bodies, node = name.split("/")
        return f"{'.'.join((graph, *bodies))}/{node}"

    return replace(row, name=named(row.name), inputs=tuple(map(named, row.inputs)))
