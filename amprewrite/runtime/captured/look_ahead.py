"""Observe the values of a graph in an fp32 run before the graph runs in fp16, in the first calls of its model.

1. Run the captured graph in fp32 on the inputs of the call, and record the range of every value. Inputs that the graph writes are copied
   before, and random states are restored after, so that this run has no side effects. Grad mode is off unless the graph differentiates.
2. If fp16 would overflow for a value that the plan makes low, repeat this run to record histograms of the values as well. Plan the graph
   anew with the observed ranges. A note in the plan says so.
3. Then run the call itself, once. If the fp32 run raised an error and the call succeeds, warn that no value was observed.

The values in the body graphs of loops and conditions are not observed. If the plan runs ops low in such a body, the rewritten graph also
runs once, on copies. Its results and those of each body are checked for NaN and infinities, as the graph may hide an infinity of a body:
`loop(x) > 0` is finite, but the gradients of the loop are not. Compiled code does not show the results of bodies, so with a compiler
bodies stay fp32.

If values are sharded over ranks, as under tensor parallelism, each rank observes its own shard. Then the ranks merge all that they saw, so
that all decide alike: every rank must run the same collectives, with operands of the same format.

An export has no first call: `rewrite_for` observes a run on the arguments of the export.

Only the first calls become slower. Observing is on by default, because a model that returns NaN is useless.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx._pytree import tree_flatten_spec
from torch.overrides import TorchFunctionMode

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import BODIES, differentiates, example_value, tensors, written_inputs
from amprewrite.graphs.fx.ops.on_device import local_part, recording
from amprewrite.graphs.fx.run.observer import Observer, dangers, too_large, unobserved
from amprewrite.graphs.fx.uncaptured import closed_if_raised, unhooked
from amprewrite.ir.evidence.ranges import Calibration, RegionRanges
from amprewrite.ir.pass_base import Problem
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.passes.driver import rewrite_graph
from amprewrite.runtime.ambient.kept_state import hooks_kept, random_state_kept, state_kept
from amprewrite.runtime.ambient.past import asking_node
from amprewrite.runtime.compiler.dynamo import unselective
from amprewrite.tables.errors import one_line
from amprewrite.tables.vocabulary import Reason
from amprewrite.torch_internals.dispatch import FakeTensor
from amprewrite.torch_internals.graph_modules import force_recompile
from amprewrite.torch_internals.operators import HigherOrderOperator
from amprewrite.torch_internals.trees import tree_leaves

CALLS = 3
"""Number of calls of the model in which each graph is observed, from the first call that runs the graph on.

One call is not enough, even if all of its values are small: it may be a warm-up on zeros, before weights are loaded.
"""


def worth_watching(problem: Problem) -> bool:
    """True if decisions of the planner may make a graph overflow: its low format is narrow (fp16), and the user gave no plan for it."""
    return problem.policy.low.narrow and problem.given is None


class LookAhead:
    """Runs the first calls of one graph. Before each, it runs the same graph in fp32 and observes it, to find values that would overflow.

    `plan` is the plan of the graph. `learn` adds value ranges to the calibration and returns the new calibration. `again` plans and emits
    the graph anew for the given inputs, and returns its plan. `warn` warns the user.
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
        self.left, self.forward = CALLS, -1  # `left` forwards are still to be observed; `forward` is the number of the latest forward
        self.meshes: dict[Any, None] = {}
        """Device meshes over which values are sharded, as the latest fp32 run saw them."""
        self.differentiates = differentiates(captured.module.graph)
        self.written = written_inputs(captured.module.graph)
        made = (t for node in captured.module.graph.nodes for t in tensors(example_value(node)))
        self.devices = sorted({t.device.index or 0 for t in made if t.device.type == "cuda"})
        self.failed = ""
        """The error that the graph raised in its latest fp32 run, as text; "" if it raised none."""

    def call(self, run: Callable[[tuple[Any, ...]], Any], inputs: tuple[Any, ...], forward: int) -> Any:
        """Return `run(inputs)`. In the first CALLS forwards that call this graph, run the graph in fp32 before, and observe its values.

        `run` calls the rewritten graph. Warn if its results are not finite although the fp32 results are. `forward` is the number of the
        running forward of the model, in which a graph may be called several times. Nothing is observed while a CUDA graph records, while a
        checkpoint recomputes, and on tensors without values (meta, fake).
        """
        if forward != self.forward:
            self.forward, self.left = forward, self.left - 1
        on_graph = any(isinstance(value, torch.Tensor) and recording(value.device) for value in inputs)
        if self.left < 0 or on_graph or asking_node() is not None or not _hold_numbers(inputs):
            return run(inputs)
        finite = self.look(run, inputs)
        result = run(inputs)
        self.say_failed()
        if finite and not self._all_finite((result, [inputs[place] for place in self.written])):
            self._no_help()
        return result

    def say_failed(self) -> None:
        """If the latest fp32 run of the graph raised an error, warn that no value was observed."""
        if self.failed:
            self.warn(
                f"{self._place} was not looked at before it runs in {self._low}: op by op in fp32 it raises {self.failed}; check that its "
                "results are finite, or use dtype='bf16', which has fp32's range"
            )

    def look(self, run: Callable[[tuple[Any, ...]], Any], inputs: tuple[Any, ...], always: bool = False) -> bool:
        """Run the graph in fp32 and observe its values. Plan the graph anew if a value would or may overflow in fp16, or if `always`.

        `run` calls the rewritten graph. Returns True if the fp32 run raised no error, and its results and all written inputs are finite.
        """
        self.failed = ""
        try:
            exact, unseen = _BodyResults(), unobserved(self.captured, self.plan)
            with exact if unseen else contextlib.nullcontext():
                seen, finite = self._observed(inputs, brief=not always)
            hidden = ""
            broken = always or any(dangers(self.captured, self.plan, seen))
            if not broken and unseen and finite:
                told = self._of_all_ranks(self._breaks_unobserved(run, inputs, exact))
                broken, hidden = any(breaks for breaks, _ in told), max(why for _, why in told)
            if (broken or hidden) and not always:
                seen, finite = self._observed(inputs, brief=False)  # repeat the run with the costly histograms that planning needs
        except torch.OutOfMemoryError:
            self.warn(
                f"{self._place} was not looked at before it runs in {self._low}: there is no memory to run it in fp32 without gradients; "
                "call it on a smaller batch first, give a calibration, or use dtype='bf16'"
            )
            return False
        except Exception as error:  # do not raise it: if the model refuses these inputs, the call itself raises the same error
            self.failed = f"{type(error).__name__}: {one_line(error)}"
            return False
        if broken or hidden:
            self._decide_anew(seen, inputs, hidden)
            if found := next(too_large(self.captured, self.plan, seen, room=1), None):
                self._no_help(f" ({found})")
        return finite

    def _observed(self, inputs: tuple[Any, ...], brief: bool) -> tuple[Mapping[str, RegionRanges], bool]:
        """Run the graph in fp32. Return (value ranges, True if all results and all written inputs of the graph are finite).

        If values are sharded over ranks, ranges and answers of all ranks are merged. With `brief` the ranges have no histograms.
        """
        with self._aside():
            observer, copies = Observer(weights=False, brief=brief), self._copies(inputs)
            results = observer(self.captured, copies)
            self.meshes = observer.meshes
            finite = self._all_finite((results, [copies[place] for place in self.written]))
        seen: dict[str, RegionRanges] = {}
        for graph, ranges in (item for theirs in self._of_all_ranks(observer.regions) for item in theirs.items()):
            seen[graph] = seen[graph] | ranges if graph in seen else ranges
        return seen, finite

    def _all_finite(self, value: Any) -> bool:
        """True if all floating tensors in a nested value are finite; if values are sharded, on all ranks."""
        return all(self._of_all_ranks(all_finite(value)))

    def _of_all_ranks(self, value: Any) -> list[Any]:
        """Return the `value` of each rank that holds shards of the graph's values, in the same order on each; [value] without shards."""
        values = [value]
        for group in (group for mesh in self.meshes for group in mesh.get_all_groups()):
            every: list[Any] = [None] * torch.distributed.get_world_size(group)
            torch.distributed.all_gather_object(every, values, group)
            values = [each for theirs in every for each in theirs]
        return values

    def _no_help(self, found: str = "") -> None:
        """Warn that values overflow the low format though the first calls ran in fp32 to find them; end such calls. `found`: the values."""
        if self.left >= 0:
            self.left = -1
            self.warn(
                f"{self._place} gives NaN or infinities in {self._low} where fp32 gives none{found}, and keeping high what was seen to "
                "overflow does not help; dtype='bf16' has fp32's range"
            )

    def _breaks_unobserved(self, run: Callable[[tuple[Any, ...]], Any], inputs: tuple[Any, ...], exact: _BodyResults) -> tuple[bool, str]:
        """Look for overflows in bodies of loops and conditions, which the fp32 run does not observe: run the rewritten graph on copies.

        Return (overflows, why). `overflows`: the graph raises an error, or it or a body returns NaN or infinities that the fp32 run did not
        return. `why`: the reason why an overflow may stay unseen, or "". `exact`: whether each body's results were finite in the fp32 run.
        """
        try:
            with self._aside(), hooks_kept(inputs), _BodyResults() as rounded:  # the graph may turn gradients on and hook its inputs
                copies = self._copies(inputs)
                if not self.differentiates:  # pass the weights themselves, because the cache of low copies finds them by identity
                    pairs = enumerate(zip(inputs, copies, strict=True))
                    copies = tuple(copied if place in self.written else value for place, (value, copied) in pairs)
                finite = all_finite((run(copies), [copies[place] for place in self.written]))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError):  # the fp32 run raised nothing, so an op must have refused an overflowed value
            return True, ""
        if not finite or rounded.overflow_beside(exact):
            return True, ""
        unseen = f"compiled code does not show whether values in there overflow in {self._low}"
        return False, unseen if exact.found and not rounded.found else ""

    def _copies(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the inputs for a trial run: without autograd history and hooks, and copied if the graph writes them."""
        return tuple(self._copy(value, place in self.written) for place, value in enumerate(inputs))

    def _copy(self, value: Any, written: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        learns = value.requires_grad and self.differentiates
        if value.requires_grad:
            value = value.detach()  # detach even under no_grad, because the graph itself may turn gradients on
        if not written:
            return value.requires_grad_() if learns else value
        value = value.clone()
        return value.requires_grad_().clone() if learns else value  # the second clone is no leaf, so the graph may write to it

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """Context manager for a trial run: restore random states, and hide the run from saved-tensor hooks and selective checkpoints."""
        gradients = contextlib.nullcontext() if self.differentiates else torch.no_grad()
        with random_state_kept(self.devices), closed_if_raised(), unselective(), unhooked(), gradients:
            yield

    @property
    def _place(self) -> str:
        problem = self.captured.problem
        return f"{problem.name}{' of ' if problem.entry else ''}{problem.entry}"

    @property
    def _low(self) -> str:
        return self.captured.problem.policy.low.name

    def _decide_anew(self, seen: Mapping[str, RegionRanges], inputs: tuple[Any, ...], hidden: str) -> None:
        """Plan and emit the graph anew with the ranges `seen`. Bodies of loops and conditions, which are not observed, stay fp32.

        `hidden`: why these bodies may overflow unseen, or "" if the graph is planned anew because it or an earlier graph would overflow.
        """
        captured, calibration = self.captured, self.learn(tuple(seen.values()))
        unseen = f"a first call would overflow in {self._low}, and the values in there are not observed"
        for each in captured.with_parts():
            each.know(calibration=calibration)
            each.left_bodies[""] = (Reason.OPAQUE, hidden) if hidden else (Reason.OUT_OF_RANGE, unseen)
        if not hidden:
            captured.note(f"a first call would overflow in {self._low} where fp32 does not: decided anew with the ranges seen in it")
        self.plan = self.again(inputs)


class _BodyResults(TorchFunctionMode):
    """Context manager that records, for each call of an op that runs body graphs, whether all its results are finite.

    Such an op runs a loop, a condition or an autograd Function. Compiled code calls no such op, so nothing is recorded for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator) and func.name() not in BODIES:
            self.found.append((func.name(), all_finite(result)))
        return result

    def overflow_beside(self, exact: _BodyResults) -> bool:
        """True if a result is not finite here although the same result is finite in `exact`, the fp32 run of the same graph."""
        return any(wide == (name, True) and not finite for wide, (name, finite) in zip(exact.found, self.found, strict=False))


def rewrite_for(
    captured: Captured,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    learn: Callable[[tuple[RegionRanges, ...]], Calibration],
    warn: Callable[[str], None],
    overflowed: bool,
) -> tuple[torch.fx.GraphModule, RegionPlan]:
    """Rewrite the graph of an exported module, and return the edited graph and its plan.

    If the low format is fp16 and the user gave no plan, run the graph in fp32 on `args` and `kwargs`, and restore its buffers. Plan the
    graph anew with the observed ranges if a value would or may overflow. Do so in any case if `overflowed` is True: an earlier graph of the
    model would have overflowed. `learn` adds ranges to the calibration and returns the new calibration. `warn` warns the user.
    """
    edited, plan = _rewritten(captured)
    given = captured.module.graph._codegen.pytree_info.in_spec  # type: ignore[attr-defined]
    inputs = tuple(tree_flatten_spec((args, dict(kwargs)), given))  # flatten the arguments here, because the runs below do not
    if not worth_watching(captured.problem) or not _hold_numbers((inputs, captured.module.state_dict())):
        return edited, plan

    def run(given: tuple[Any, ...]) -> Any:
        return torch.fx.Interpreter(edited).run(*given, enable_io_processing=False)

    def again(_: tuple[Any, ...]) -> RegionPlan:
        nonlocal edited, plan
        edited, plan = _rewritten(captured)
        return plan

    with torch.no_grad(), state_kept(captured.module):
        ahead = LookAhead(captured, plan, learn, again, warn)
        ahead.look(run, inputs, always=overflowed)
        ahead.say_failed()
    return edited, plan


def _rewritten(captured: Captured) -> tuple[torch.fx.GraphModule, RegionPlan]:
    """Rewrite `captured`, and return (edited graph, its plan). Also generate the graph's code: torch.export reads its signature."""
    edited, plan = rewrite_graph(captured)
    force_recompile(edited)
    return edited, plan


def _hold_numbers(values: Any) -> bool:
    """True if all tensors in `values` hold numbers. Fake tensors and meta tensors, on which a model may be exported, hold none."""
    return not any(isinstance(t, FakeTensor) or t.is_meta for t in tree_leaves(values) if isinstance(t, torch.Tensor))


def _floats(value: Any) -> list[torch.Tensor]:
    """Return the dense floating tensors in a nested value; of a distributed tensor the local part."""
    leaves = (local_part(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor))
    return [t for t in leaves if t.is_floating_point() and t.layout == torch.strided]


@torch.no_grad()  # the check must save no tensors for backward, because activation checkpoints count saved tensors
def all_finite(value: Any) -> bool:
    """True if the dense floating tensors in a nested value hold no NaN or infinity. Of a distributed tensor the local part is read."""
    return all(bool(t.isfinite().all()) for t in _floats(value))
