"""Look at the values of a graph in fp32 before it runs in fp16, in the first calls of its model.

1. Run the captured graph in fp32 on the inputs of the call, and observe the limits of every value. Inputs that the graph writes are
   copied first, and random states are restored: the run leaves no trace. It records no gradients, unless the graph takes gradients itself.
2. If the low format would make an infinity of a value that the plan makes low, observe once more, with histograms, and decide anew with
   the ranges seen. The plan says so.
3. Then run the call itself, once. If the look raised and the call does not, warn that no value was observed.

The values in the bodies of loops and conditions are not observed. If the plan runs ops low in there, the rewritten graph runs on copies as
well, and its results are checked.

If values are spread over ranks, as under tensor parallelism, each rank observes its part, and all ranks decide by the ranges of all: a
collective must find the same format on every rank.

An export has no first call: `rewrite_for` looks at the arguments that it is given.

Only the first calls pay for this. It is on by default, since a model that returns NaN is useless.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx._pytree import tree_flatten_spec

from amprewrite.graphs.fx.captured import Captured
from amprewrite.graphs.fx.node_facts import differentiates, example_value, tensors, written_inputs
from amprewrite.graphs.fx.ops.cuda_graphs import recording
from amprewrite.graphs.fx.run.observer import Observer, local_part
from amprewrite.graphs.fx.run.range_dangers import dangers, too_large, unobserved
from amprewrite.graphs.fx.uncaptured import closed_if_raised, unhooked
from amprewrite.ir.evidence.ranges import Calibration, RegionRanges
from amprewrite.ir.plans.plan import RegionPlan
from amprewrite.ir.problem import Problem
from amprewrite.passes.driver import rewrite_graph
from amprewrite.runtime.ambient.kept_state import random_state_kept, state_kept
from amprewrite.runtime.ambient.past import asking_node
from amprewrite.runtime.compiler.suspend_modes import unselective
from amprewrite.tables.errors import one_line
from amprewrite.tables.vocabulary import Reason
from amprewrite.torch_internals.dispatch import FakeTensor
from amprewrite.torch_internals.graph_modules import force_recompile
from amprewrite.torch_internals.trees import tree_leaves

CALLS = 3
"""In how many calls of the model its graphs are looked at.

One does not do, however small its values are: it may be a warm-up on made-up inputs, such as zeros, and load weights later.
"""


def worth_watching(problem: Problem) -> bool:
    """Whether a graph's own decisions may overflow: in fp16, unless it follows a plan that was given."""
    return problem.policy.low.narrow and problem.given is None


class LookAhead:
    """The first calls of one graph.

    The graph runs `plan`. `learn` adds ranges to the calibration, `again` decides and emits the graph anew for such inputs and returns its
    plan, `warn` tells the user.
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
        made = (t for node in captured.module.graph.nodes for t in tensors(example_value(node)))
        self.devices = sorted({t.device.index or 0 for t in made if t.device.type == "cuda"})
        self.failed = ""
        """The error of the last look; "" if it raised none."""

    def call(self, run: Callable[[tuple[Any, ...]], Any], inputs: tuple[Any, ...], forward: int) -> Any:
        """The results of `run(inputs)` in this forward of the model, after a look.

        It does not look while a CUDA graph records or a checkpoint recomputes, nor at tensors without values. `left` is negative once no
        further call needs a look.
        """
        if forward != self.forward:
            self.forward, self.left = forward, self.left - 1
        on_graph = any(isinstance(value, torch.Tensor) and recording(value.device) for value in inputs)
        if self.left < 0 or on_graph or asking_node() is not None or not _hold_numbers(inputs):
            return run(inputs)
        finite = self.look(run, inputs)
        result = run(inputs)
        self.say_failed()
        if finite and not all_finite((result, [inputs[place] for place in self.written])):
            self._no_help()
        return result

    def say_failed(self) -> None:
        """Warn if the last look raised."""
        if self.failed:
            self.warn(
                f"{self._place} was not looked at before it runs in {self._low}: op by op in fp32 it raises {self.failed}; check that its "
                "results are finite, or use dtype='bf16', which has fp32's range"
            )

    def look(self, run: Callable[[tuple[Any, ...]], Any], inputs: tuple[Any, ...], always: bool = False) -> bool:
        """Look at a run in fp32, and decide anew if it shows a danger, or if `always`. True if its results and writes are all finite."""
        self.failed = ""
        try:
            seen, finite = self._observed(inputs, brief=not always)
            broken = always or any(dangers(self.captured, self.plan, seen)) or (finite and self._breaks_unobserved(run, inputs))
            if broken and not always:
                seen, finite = self._observed(inputs, brief=False)  # a decision reads histograms, which most looks can do without
        except torch.OutOfMemoryError:
            self.warn(
                f"{self._place} was not looked at before it runs in {self._low}: there is no memory to run it in fp32 without gradients; "
                "call it on a smaller batch first, give a calibration, or use dtype='bf16'"
            )
            return False
        except Exception as error:  # if the model refuses these inputs, the call raises the model's own error as well
            self.failed = f"{type(error).__name__}: {one_line(error)}"
            return False
        if broken:
            self._decide_anew(seen, inputs)
            if found := next(too_large(self.captured, self.plan, seen, room=1), None):
                self._no_help(f" ({found})")
        return finite

    def _observed(self, inputs: tuple[Any, ...], brief: bool) -> tuple[Mapping[str, RegionRanges], bool]:
        """The ranges of a run in fp32, of all ranks, and True if its results and writes are all finite."""
        with self._aside():
            observer, copies = Observer(weights=False, brief=brief), self._copies(inputs)
            finite = all_finite((observer(self.captured, copies), [copies[place] for place in self.written]))
        return _of_all_ranks(observer), finite

    def _no_help(self, found: str = "") -> None:
        """Warn, and look no more: the graph overflows though it was decided anew."""
        if self.left >= 0:
            self.left = -1
            self.warn(
                f"{self._place} gives NaN or infinities in {self._low} where fp32 gives none{found}, and keeping high what was seen to "
                "overflow does not help; dtype='bf16' has fp32's range"
            )

    def _breaks_unobserved(self, run: Callable[[tuple[Any, ...]], Any], inputs: tuple[Any, ...]) -> bool:
        """True if the rewritten graph runs ops low that are not observed, and on copies it raises or returns a value that is not finite."""
        if not unobserved(self.captured, self.plan):
            return False
        try:
            with self._aside():
                copies = self._copies(inputs)
                if not self.differentiates:  # the weights themselves: a cache of low copies knows them by identity
                    pairs = enumerate(zip(inputs, copies, strict=True))
                    copies = tuple(copied if place in self.written else value for place, (value, copied) in pairs)
                return not all_finite((run(copies), [copies[place] for place in self.written]))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError):  # an op refuses what overflowed; in fp32 it did not
            return True

    def _copies(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs for a run on the side: copies of inputs that the graph writes, and all without autograd history and hooks."""
        return tuple(self._copy(value, place in self.written) for place, value in enumerate(inputs))

    def _copy(self, value: Any, written: bool) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        learns = value.requires_grad and self.differentiates
        if value.requires_grad:
            value = value.detach()  # a graph may turn gradients on, as it does after a no_grad block
        if not written:
            return value.requires_grad_() if learns else value
        value = value.clone()
        return value.requires_grad_().clone() if learns else value  # a leaf may not be written

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """A context for a run whose results are dropped. Tensors that it saves for backward reach no hook of the call."""
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

    def _decide_anew(self, seen: Mapping[str, RegionRanges], inputs: tuple[Any, ...]) -> None:
        captured, calibration = self.captured, self.learn(tuple(seen.values()))
        for each in captured.with_parts():
            each.know(calibration=calibration)
            unseen = f"a first call would overflow in {self._low}, and the values in there are not observed"
            each.left_bodies[""] = Reason.OUT_OF_RANGE, unseen
        captured.note(f"a first call would overflow in {self._low} where fp32 does not: decided anew with the ranges seen in it")
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

    `overflowed` says that a first call of the model has: then ranges are looked at in any case. Buffers of the graph are restored.
    """
    edited, plan = _rewritten(captured)
    given = captured.module.graph._codegen.pytree_info.in_spec  # type: ignore[attr-defined]
    inputs = tuple(tree_flatten_spec((args, dict(kwargs)), given))  # flattened, as the module's own forward does first
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
    """The edited graph, with its code: torch.export reads the arguments of `forward`."""
    edited, plan = rewrite_graph(captured)
    force_recompile(edited)
    return edited, plan


def _of_all_ranks(observer: Observer) -> Mapping[str, RegionRanges]:
    """The observed ranges. If values are spread over ranks, those of all ranks, in the same order on each."""
    seen: dict[str, RegionRanges] = observer.regions
    for group in (group for mesh in observer.meshes for group in mesh.get_all_groups()):
        every: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(every, seen, group)
        seen = {}
        for graph, ranges in (item for theirs in every for item in theirs.items()):
            seen[graph] = seen[graph] | ranges if graph in seen else ranges
    return seen


def _hold_numbers(values: Any) -> bool:
    """Whether every tensor has values: a model may be exported on fake ones."""
    return not any(isinstance(t, FakeTensor) or t.is_meta for t in tree_leaves(values) if isinstance(t, torch.Tensor))


def _floats(value: Any) -> list[torch.Tensor]:
    leaves = (local_part(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor))
    return [t for t in leaves if t.is_floating_point() and t.layout == torch.strided]


@torch.no_grad()  # a look must leave no trace: activation checkpoints count what is saved for backward
def all_finite(value: Any) -> bool:
    """Whether every floating tensor in it is finite throughout."""
    return all(bool(t.isfinite().all()) for t in _floats(value))


__all__ = ["LookAhead", "rewrite_for", "worth_watching"]
