"""Look at the first results of a graph rewritten to fp16, and decide it anew where they overflow.

1. Before a call, copy what the graph might write: inputs other than parameters, and the random state.
2. After it, see whether all floating results, and what it wrote, are finite. Nearly always they are, and that was all.
3. Where not, run the captured graph in fp32 on the copies, watching every value. If fp32 has no finite value there either,
   the model means it.
4. Else the ranges seen are a calibration: undo what the call wrote, decide with them, and run again. The plan says so.

A graph that raises in such a call is treated alike if fp32 does not raise: an op refuses what overflowed, as `binary_cross_entropy`
refuses NaN.

Some graphs may overflow without a trace in their results (`unseen_overflow`): those are watched in fp32 in any case.

These further runs need no gradients, unless the graph takes gradients itself: then its inputs want theirs, as in the call.
Such a graph calls the hooks of its inputs (`retain_grad` is one), and an activation checkpoint counts what runs inside it:
there the first run is one on copies, and the call itself runs once. So it is where an overflow may be unseen, and where an input
that is written has gradients, or is written with values that have some: autograd records the write, which cannot be undone then.

An export has no first call: `rewrite_for` makes one, on the arguments that it was given.

A few calls only: later ones cost nothing. This is on by default, since a model that gives NaN is of no use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx._pytree import tree_flatten_spec

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.flow.recorded_writes import recorded_inputs
from amprewrite.graphs.fx.node_facts import differentiates, written_inputs
from amprewrite.graphs.fx.ops.cuda_graphs import recording
from amprewrite.graphs.fx.run.observer import Observer
from amprewrite.graphs.fx.run.unseen_overflow import beyond_range, may_overflow_unseen
from amprewrite.graphs.fx.uncaptured import closed_if_raised, unhooked
from amprewrite.graphs.fx.weights.frozen_weight import thawed
from amprewrite.ir.evidence.ranges import Calibration, RegionRanges
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.ir.problem import Problem
from amprewrite.passes.driver import rewrite_graph
from amprewrite.runtime.ambient.kept_state import state_kept
from amprewrite.runtime.ambient.suspend_modes import unselective
from amprewrite.tables.vocabulary import Reason
from amprewrite.torch_internals.autograd import saved_tensors_are_hooked
from amprewrite.torch_internals.dispatch import FakeTensor
from amprewrite.torch_internals.graph_modules import force_recompile
from amprewrite.torch_internals.trees import tree_leaves

CALLS = 3
"""In how many calls of the model its graphs are looked at: the first may be a warm-up on made-up inputs, and load weights later."""

_REFUSALS = (RuntimeError, ValueError, IndexError)
"""What ops raise that refuse a value."""


def worth_watching(problem: Problem) -> bool:
    """Whether a graph's own decisions may overflow: in fp16, unless it follows a plan that was given."""
    return problem.policy.low.narrow and problem.given is None


class OverflowRetry:
    """The first calls of one graph.

    `plan` is what the graph runs. `learn` adds ranges to what the calibration says, `again` decides and emits the graph anew for
    such inputs and gives its plan, `warn` tells the user.
    """

    def __init__(
        self,
        captured: Captured,
        plan: RegionPlan,
        learn: Callable[[tuple[RegionRanges, ...]], Calibration],
        again: Callable[[tuple[Any, ...]], RegionPlan],
        warn: Callable[[str], None],
    ) -> None:
        self.captured, self.plan, self.learn, self.again, self.warn = captured, plan, learn, again, warn
        self.left, self.forward = CALLS, -1
        self.differentiates = differentiates(captured.module.graph)
        self.written = written_inputs(captured.module.graph)
        self.recorded = recorded_inputs(captured.module.graph) if self.written else frozenset[int]()
        self.unseen = may_overflow_unseen(captured, plan)

    def call(self, run: Callable[[tuple[Any, ...]], Any], inputs: tuple[Any, ...], forward: int) -> Any:
        """The results of `run(inputs)` in this forward of the model, or of what takes its place.

        What a CUDA graph records is not looked at. `left` is negative when no further call need come here.
        """
        if forward != self.forward:
            self.forward, self.left = forward, self.left - 1
        if self.left < 0 or any(isinstance(value, torch.Tensor) and recording(value.device) for value in inputs):
            return run(inputs)
        before = _Before(inputs, self.differentiates, self.written, self.recorded)
        if self.differentiates or self.unseen or before.recorded or _inside_checkpoint():
            broken = self._look_ahead(run, before, inputs)
            return self._looked_at(run(inputs), inputs, broken)
        result = error = watched = None
        try:
            with closed_if_raised():
                result = run(inputs)
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS as raised:
            error, watched = raised, self._watched_after_error(before)
            if watched is None:
                raise
        if error is None and before.all_finite(result, inputs):
            return result
        watched = watched or self._watched(before)
        if error is None and not watched.broken(result, inputs):
            return result
        if not before.can_undo(inputs):
            self._decide_anew(watched, inputs)
            self.warn(f"{self._place} overflowed in {self._low} in this call; the next one runs on a plan that knows its ranges")
            if error is not None:
                raise error
            return result
        before.undo(inputs)
        self._decide_anew(watched, inputs)
        return self._looked_at(run(inputs), inputs, watched)

    def look_anew(self, inputs: tuple[Any, ...]) -> None:
        """Decide with the ranges of a run in fp32, as other graphs of the model are decided since one of them overflowed."""
        self._decide_anew(self._watched(_Before(inputs, self.differentiates, self.written, self.recorded)), inputs)

    def _looked_at(self, result: Any, inputs: tuple[Any, ...], watched: _Watched | None) -> Any:
        """`result`, after a warning if it overflows where fp32 does not; `watched` is None if the graph was not decided anew."""
        if watched is not None and (watched.broken(result, inputs) or self._beyond(watched)):
            self.left = -1
            self.warn(
                f"{self._place} gives NaN or infinities in {self._low} where fp32 gives none, and keeping high what was seen to "
                "overflow does not help; dtype='bf16' has fp32's range"
            )
        return result

    def _look_ahead(self, run: Callable[[tuple[Any, ...]], Any], before: _Before, inputs: tuple[Any, ...]) -> _Watched | None:
        """Look at a run of its own, and decide before the real one. Give what fp32 gives, None if the graph stays as it is."""
        try:
            with self._aside():
                copies = before.copies()
                result = run(copies)
                finite = before.all_finite(result, copies)
        except torch.OutOfMemoryError:
            before.undo(inputs)
            raise
        except _REFUSALS:
            watched, broken = self._watched_after_error(before), True
        else:
            watched = self._watched(before) if self.unseen or not finite else None
            broken = watched is not None and (watched.broken(result, copies) or self._beyond(watched))
        before.undo(inputs)
        if watched is None or not broken:
            return None
        self._decide_anew(watched, inputs)
        return watched

    def _watched_after_error(self, before: _Before) -> _Watched | None:
        """The run in fp32 after one in the low format raised; None if fp32 raises, too."""
        try:
            return self._watched(before)
        except torch.OutOfMemoryError:
            raise
        except _REFUSALS:
            return None

    def _watched(self, before: _Before) -> _Watched:
        """What the captured graph gives in fp32, and the ranges of its values."""
        with self._aside():
            watch, copies = Observer(), before.copies()
            return _Watched(watch, watch(self.captured, copies), {place: copies[place] for place in before.clones})

    def _beyond(self, watched: _Watched) -> bool:
        """Whether a value that no result shows is beyond the low format's range."""
        return self.unseen and beyond_range(self.captured, self.plan, watched.observer.regions)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """A context for a run that is looked at and thrown away. What it saves for backward reaches no hook of the call."""
        with closed_if_raised(), unselective(), unhooked() if self.differentiates else torch.no_grad():
            yield

    @property
    def _place(self) -> str:
        problem = self.captured.problem
        return f"{problem.name}{' of ' if problem.entry else ''}{problem.entry}"

    @property
    def _low(self) -> str:
        return self.captured.problem.policy.low.name

    def _decide_anew(self, watched: _Watched, inputs: tuple[Any, ...]) -> None:
        captured, calibration = self.captured, self.learn(tuple(watched.observer.regions.values()))
        for each in captured.with_parts():
            each.know(calibration=calibration)
            unobserved = f"a first call overflowed in {self._low}, and the values in there are not observed"
            each.left_bodies[""] = Reason.OUT_OF_RANGE, unobserved
        captured.note(f"a first call overflowed in {self._low} where fp32 does not: decided anew with the ranges seen in it")
        self.plan = self.again(inputs)


def rewrite_for(
    captured: Captured,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    learn: Callable[[tuple[RegionRanges, ...]], Calibration],
    warn: Callable[[str], None],
    overflowed: bool,
) -> tuple[torch.fx.GraphModule, RegionPlan]:
    """The edited graph of an exported module, and its plan, decided as after a first call on these arguments.

    `overflowed` says that a first call of the model has: then ranges are looked at in any case. What is run here leaves what it writes to
    buffers of the graph as it was.
    """
    edited, plan = _rewritten(captured)
    given = captured.module.graph._codegen.pytree_info.in_spec  # type: ignore[attr-defined]
    inputs = tuple(tree_flatten_spec((args, dict(kwargs)), given))  # as the module's own code takes them
    if not worth_watching(captured.problem) or not _hold_numbers((inputs, captured.module.state_dict())):
        return edited, plan

    def run(given: tuple[Any, ...]) -> Any:
        return torch.fx.Interpreter(edited).run(*given, enable_io_processing=False)

    def again(_: tuple[Any, ...]) -> RegionPlan:
        nonlocal edited, plan
        edited, plan = _rewritten(captured)
        return plan

    with torch.no_grad(), state_kept(captured.module):
        retry = OverflowRetry(captured, plan, learn, again, warn)
        if overflowed:
            retry.look_anew(inputs)
        retry.call(run, inputs, 0)
    return edited, plan


def _rewritten(captured: Captured) -> tuple[torch.fx.GraphModule, RegionPlan]:
    """The edited graph, with its code: torch.export reads the arguments of `forward`."""
    edited, plan = rewrite_graph(captured)
    force_recompile(edited)
    return edited, plan


def _hold_numbers(values: Any) -> bool:
    """Whether every tensor has values: a model may be exported on fake ones."""
    return not any(isinstance(t, FakeTensor) or t.is_meta for t in tree_leaves(values) if isinstance(t, torch.Tensor))


def _inside_checkpoint() -> bool:
    """Whether what is saved for backward goes through hooks, as inside an activation checkpoint."""
    return torch.is_grad_enabled() and saved_tensors_are_hooked()


class _Before:
    """What a call may change, as it was. With `differentiable` copies want gradients if the inputs do.

    `written` are the places of inputs that the graph writes itself, `trained` of those that it writes values with gradients to. Of
    parameters only those are copied. `recorded` tells whether autograd may record such a write.
    """

    def __init__(self, inputs: tuple[Any, ...], differentiable: bool, written: Set[int], trained: Set[int]) -> None:
        self.inputs, self.differentiable = inputs, differentiable
        self.clones = {
            place: value.detach().clone()
            for place, value in enumerate(inputs)
            if isinstance(value, torch.Tensor) and (place in written or not isinstance(value, nn.Parameter))
        }
        learnt = [place for place in written if place in trained or inputs[place].requires_grad]
        self.recorded = not all(isinstance(inputs[place], nn.Parameter) for place in learnt)
        self.random = torch.get_rng_state()
        devices = {value.device for value in inputs if isinstance(value, torch.Tensor) and value.device.type == "cuda"}
        self.random_there = {device: torch.cuda.get_rng_state(device) for device in devices}

    def copies(self) -> tuple[Any, ...]:
        """The inputs as they were, to be run on freely; parameters that are only read share their memory."""
        return tuple(self._copy(place) if place in self.clones else self._parameter(value) for place, value in enumerate(self.inputs))

    def _parameter(self, value: Any) -> Any:
        """A parameter, or an input that is no tensor, as a run on copies takes it: without hooks if gradients are taken of it."""
        value = thawed(value)
        return value.detach().requires_grad_() if self.differentiable and isinstance(value, torch.Tensor) and value.requires_grad else value

    def _copy(self, place: int) -> torch.Tensor:
        copied = self.clones[place].clone()
        if self.differentiable and self.inputs[place].requires_grad:
            return copied.requires_grad_().clone()  # no leaf: the graph may write it
        return copied

    def _changed(self, inputs: tuple[Any, ...]) -> list[int]:
        return [place for place, clone in self.clones.items() if not _same(inputs[place], clone)]

    def all_finite(self, result: Any, inputs: tuple[Any, ...]) -> bool:
        """Whether every float that a call gave, or wrote to its inputs, is finite."""
        return all_finite(result) and all_finite([inputs[place] for place in self._changed(inputs)])

    def can_undo(self, inputs: tuple[Any, ...]) -> bool:
        """Whether what the call changed can be written back: nothing of it was computed with gradients."""
        return not any(inputs[place].grad_fn is not None for place in self._changed(inputs))

    def undo(self, inputs: tuple[Any, ...]) -> None:
        with torch.no_grad():
            for place in self._changed(inputs):
                inputs[place].copy_(self.clones[place])
        torch.set_rng_state(self.random)
        for device, state in self.random_there.items():
            torch.cuda.set_rng_state(state, device)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a.detach() == b) | ((a != a) & (b != b))).all()) if a.layout == torch.strided else True


def _floats(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.layout == torch.strided]


@torch.no_grad()  # a look must leave no trace: activation checkpoints count what is saved for backward
def all_finite(value: Any) -> bool:
    """Whether every floating tensor in it is finite throughout."""
    return all(bool(t.isfinite().all()) for t in _floats(value))


@dataclass(frozen=True)
class _Watched:
    """A run in fp32: what was seen in it, what it gave, and what it left in the inputs that it may write, by place."""

    observer: Observer
    result: Any
    inputs: dict[int, torch.Tensor]

    @torch.no_grad()
    def broken(self, result: Any, inputs: tuple[Any, ...]) -> bool:
        """Whether something that a call gave or wrote is not finite where this run has finite values."""
        pairs = zip(_floats((result, [inputs[place] for place in self.inputs])), _floats((self.result, self.inputs)), strict=True)
        return any(a.shape != b.shape or bool((b.isfinite() & ~a.isfinite()).any()) for a, b in pairs)


__all__ = ["OverflowRetry", "all_finite", "rewrite_for", "worth_watching"]
