"""The session of a rewritten model: run the rewritten graphs in every call, and check that they ran.

Dynamo captures, guards and dispatches. It sometimes runs the original code silently: under a dispatch mode, for a frame that it skips,
past its recompile limit, or if an environment variable disables it. This file detects such cases. Then it makes the call run the graphs,
warns, or raises an error. `captured/graph_rewriter.py` rewrites the graphs.

An `Entry` is a module that is called from outside of graphs, such as the model. A `Region` is a rewritten graph.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx

from amprewrite.ir.follow_plan import each_once
from amprewrite.ir.plans.plan import ModelPlan, RegionPlan, Skipped
from amprewrite.runtime.ambient.low_cache import CacheReadHigh, mark_growing
from amprewrite.runtime.ambient.past import asking_number
from amprewrite.runtime.captured.entries import FRESH_STARTS, Anew, Entry, Graphs, past_the_limit
from amprewrite.runtime.captured.graph_rewriter import GraphRewriter
from amprewrite.runtime.captured.region import Region
from amprewrite.runtime.compiler import dynamo
from amprewrite.runtime.compiler.dynamo import without_dispatch_modes
from amprewrite.runtime.compiler.dynamo_failures import Failure, has_begun, is_capture_error
from amprewrite.runtime.compiler.heard import regions_around
from amprewrite.runtime.compiler.plain_words import DOOR_REASON
from amprewrite.runtime.compiler.tracers import asks_shapes, refuse_tracers, refuse_whole_graph, transform_at_work, undisturbed
from amprewrite.runtime.options import sharded_inside
from amprewrite.runtime.weights.freezing import FROZEN, frozen_weights_note, hook_states, refuse_training, unfreeze_weights
from amprewrite.runtime.weights.half_values import TwoDtypes, Widened, note_half_inputs
from amprewrite.runtime.weights.weight_reads import RoundedRead
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.errors import AmpRewriteError, CaptureError, PolicyError, one_line
from amprewrite.tables.formats import BASE, WIDE
from amprewrite.tables.vocabulary import Colour, Edit
from amprewrite.torch_internals.dispatch import count_dispatch_modes, current_backward

_PLACE = operator.attrgetter("place")


@dataclass
class Session(GraphRewriter):
    """A rewritten model at run time: runs its calls, and reports its plan."""

    turn: threading.RLock = field(default_factory=threading.RLock)
    """Lock that a replica of torch.nn.DataParallel holds while it runs, because the model holds the tensors of one replica at a time."""
    take_in: Callable[[], None] = field(default=lambda: None)
    """Function that rewrites the calls of modules that were added to the model after the rewrite."""

    # -- run calls of the model, and check them ----------------------------------------
    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module (`entry`) on its rewritten graphs, and return its result. Dynamo captures a graph first if none fits the inputs.

        The module runs as written inside a torch.autocast block in the model's code, and under a torch.func transform or forward-mode AD.
        """
        if entry.widens and (widened := Widened(args, kwargs)):
            with widened:
                return self.call(entry, widened.args, widened.kwargs)
        state, nested = self.state, self.state.depth > 0
        recomputes = current_backward() >= 0  # True inside a backward: then an activation checkpoint repeats a forward
        again = recomputes and (not nested or state.recomputed != asking_number())  # True for the outermost call of a recomputation
        inside = entry.regions.of_forward() if again else nested and regions_around() > state.around
        if not recomputes and (inside or entry.regions.changes):
            entry.regions.note(inside)
        if inside:
            self.note(f"{entry.place} is called inside an autocast region of the model's own: there it runs as written, as the region says")
            return entry.function(*args, **kwargs)
        if again and nested:
            with state.recomputes(asking_number(), regions_around()):
                return self.call(entry, args, kwargs)
        if self.options.frozen is not None and not nested:
            refuse_training(self.root, args, kwargs)
        if not undisturbed():
            dynamo.refuse_ambient_autocast()
            refuse_tracers()
            if why := transform_at_work():
                if self.checks.calls:
                    self._check_reads(entry, ())
                return self._transformed(entry, args, kwargs, why)
        if not nested and not recomputes and self.schedule.look_now(self.root.training):
            self.look_at_weights()
        if anew := entry.why_anew(recomputes):
            entry.capture_anew(anew)
        if self.options.strict and dynamo.disabled():
            raise CaptureError(f"{entry.place} cannot be captured: {dynamo.why_switched_off()}")
        given_up, reasons, captured = dynamo.frames_given_up(), dynamo.reasons(), entry.captured
        if not nested:
            self._begin_forward(entry, recomputes, given_up)
        try:
            result, ran, failures = self._run_watched(entry, recomputes, given_up, args, kwargs)
        except TwoDtypes:
            return self._start_widened(entry, args, kwargs)
        if self.checks.calls:
            self._check_reads(entry, ran)
        if nested:
            state.ran.extend(ran)
        else:
            self._follow_forward(entry, ran, result)
        if not captured and not entry.graphs.left_out:
            self.note(f"granularity: the code of {entry.place} between its parts runs as it is written, in fp32")
        elif entry.captured and (failures or dynamo.frames_given_up() != given_up or entry.place not in map(_PLACE, ran)):
            self._say_failures(entry, ran, failures)
            if not failures or dynamo.frames_given_up() - given_up > len(failures):
                said = (why for why in dynamo.new_reasons(reasons) if not any(why in failure.why for failure in failures))
                self._not_all_ran(entry, ran, "; ".join(said))
        return result

    def step(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the module `entry` as a step of `generate()`.

        If the plan would read a bf16 KV cache in fp32, capture stops before any code of the call has run. Then the caches become fp32, and
        the call restarts.
        """
        state = self.state
        if state.low_caches is not None:
            state.low_caches.take(args, kwargs)
        mark_growing(args, kwargs)
        try:
            return self.call(entry, args, kwargs)
        except CacheReadHigh:
            entry.capture_anew(Anew.LOW_CACHE)
            if state.low_caches is not None:
                state.low_caches.end()
            state.low_caches = None
        mark_growing(args, kwargs)
        return self.call(entry, args, kwargs)

    def _start_widened(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Restart a call of `entry`, whose code has not begun, with half inputs cast to fp32. Later calls cast such inputs at once."""
        entry.capture_anew(Anew.HALF_INPUTS)
        entry.widens = True
        try:
            result = self.call(entry, args, kwargs)
        except BaseException:
            entry.widens = False
            raise
        self.note(f"half inputs of {entry.place} become fp32 as a call begins: products read them beside weights in fp32")
        return result

    def _check_reads(self, entry: Entry, ran: tuple[Region, ...]) -> None:
        """Raise RoundedRead if the latest call of `entry` may have read weights in fp32 although FSDP2 gathers them in bf16 or fp16.

        `ran`: the rewritten graphs that ran in the call.
        """
        for check in self.checks.calls:
            whole = not entry.graphs_of_forward.left_out and len(ran) == 1 and ran[0].whole and ran[0].place == entry.place
            check(entry.path, entry.place, whole)

    def _begin_forward(self, entry: Entry, recomputes: bool, given_up: int) -> None:
        """Prepare an outermost call: redirect new submodules, count the forward, drop overflow flags of gradients that no step used.

        `recomputes`: a backward makes the call to repeat a forward (activation checkpointing). `given_up`: number of frames that Dynamo
        failed to capture before this call.
        """
        state = self.state
        self.cache.look(self.weight_names)
        if self.children != self.root._modules:
            self._take_in_new_modules()
        state.entry, state.forwards, state.given_up = entry.key, state.forwards + (not recomputes), given_up
        state.around, state.recomputed = regions_around(), asking_number() if recomputes else None
        if self.loss_scale.enabled:
            self.training.begin_forward()

    def _run_watched(
        self, entry: Entry, recomputes: bool, given_up: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Region, ...], list[Failure]]:
        """Run `entry`, and return its result, the rewritten graphs (regions) that ran, and the failures of Dynamo in this call.

        `recomputes`: a backward makes the call to repeat a forward (activation checkpointing). `given_up`: the number of frames that Dynamo
        failed to capture before this call.
        """
        state = self.state
        ran: list[Region] = []
        failures: list[Failure] = []
        outer = _, _, depth, captured = state.ran, state.failures, state.depth, state.captured
        state.ran, state.failures, state.depth, state.captured = ran, failures, depth + 1, captured + entry.captured
        try:
            result = self._run(entry, entry.graphs_of_forward if recomputes else entry.graphs, args, kwargs)
            return result, tuple(ran), failures
        except Exception as error:
            if failures or (dynamo.frames_given_up() != given_up and not entry.graphs.regions):
                entry.capture_anew(Anew.FAILED)  # in the next call, capture anew: perhaps only these inputs were wrong, not the code
                note_half_inputs(error, self.root, (args, kwargs))
            raise
        finally:
            state.ran, state.failures, state.depth, state.captured = outer
            if depth == 0:
                if self.loss_scale.enabled:
                    self.training.end_forward()
                state.entry = None

    def _follow_forward(self, entry: Entry, ran: tuple[Region, ...], result: Any) -> None:
        """After an outermost call: prepare gradient checks for a backward through its `result`, and record `ran`, the graphs that ran."""
        if self.children is None:
            self._take_in_new_modules()
        if self.loss_scale.enabled:
            self.training.await_backward(result)
        if ran != self.last:
            self._remember(entry, ran)

    def _transformed(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        """Run a call as written, in fp32, because a torch.func transform or forward-mode AD is active (`why` says which).

        List the call in `plan.skipped`, unless it runs inside another such call.
        """
        if not self.state.transformed:
            message = f"{entry.place} ran in fp32: {why}"
            self._left_out(entry, message, why)
        self.state.transformed += 1
        try:
            return entry.function(*args, **kwargs)
        finally:
            self.state.transformed -= 1

    def _take_in_new_modules(self) -> None:
        """Find the modules that were added to the model since the last search, so that their calls use rewritten graphs, too.

        A call of the model begins with this if the root's direct children have changed, or if the last call captured a graph (which sets
        `self.children` to None): then modules may have been added deeper in the model.
        """
        self.children = dict(self.root._modules)
        self.take_in()

    def _run(self, entry: Entry, graphs: Graphs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled function of `graphs`. If capture fails before any code of `entry` has run, run `entry` as written instead.

        Raises CaptureError if capture fails although the user set `strict=True`, or after some code of `entry` has run.
        """
        try:
            if count_dispatch_modes() == 0:
                return graphs.compiled(*args, **kwargs)
            with without_dispatch_modes():
                return graphs.compiled(*args, **kwargs)
        except Exception as error:
            failed = is_capture_error(error)
            if failed and self.options.strict and entry.graphs.full:
                raise CaptureError(past_the_limit(entry)) from error
            if failed or (isinstance(error, AmpRewriteError) and not isinstance(error, RoundedRead)):
                entry.capture_anew(Anew.FAILED)
            if not failed or (type(error).__name__ in dynamo.ASKED_FOR and not self.options.strict):
                raise
            if self.options.strict:
                raise CaptureError(f"strict=True, and {entry.place} cannot be captured whole: {dynamo.first_line(error)}") from error
            if has_begun(error, entry.function):
                what = f"{entry.place} cannot be captured, and this call stopped half way: {dynamo.first_line(error)}"
                raise CaptureError(f"{what}; what it wrote stays written. Rewrite its parts with granularity='blocks'") from error
            return self._as_written(entry, args, kwargs, error)

    def _as_written(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException) -> Any:
        """Run `entry` as written after its capture failed with `error`, and warn. The failed call has run no code of the entry.

        An error of the entry's own code is raised to the caller.
        """
        entry.capture_anew(Anew.NOT_CAPTURED)
        self.state.captured -= 1
        try:
            result = entry.function(*args, **kwargs)
        except BaseException:
            entry.capture_anew(Anew.FAILED)
            raise
        finally:
            self.state.captured += 1
        message = f"{entry.place} has code that runs as it is written, in fp32 around its modules: {one_line(error)}"
        self._left_out(entry, message)
        return result

    def _remember(self, entry: Entry, ran: tuple[Region, ...]) -> None:
        """Record that the latest call ran the rewritten graphs `ran`. Do nothing if `ran` is empty.

        If this is the first call of the whole model that ran these graphs, first check overrides and `products=` (`_check_options`).
        """
        if not ran:
            return
        if entry.path == "" and tuple(dict.fromkeys(ran)) not in self.calls:
            self._check_options()
        with self.lock:
            entry.fresh_starts = 0
            self.last = ran
            self.calls[tuple(dict.fromkeys(ran))] = None

    def _check_options(self) -> None:
        """Raise PolicyError, or warn, if an override or a rule of `products=` (matmuls in fp8) applies to no op of the plans."""
        self._check_overrides()
        self._check_products()
        self._check_wide()

    def _check_products(self) -> None:
        """Raise PolicyError if a rule of `products=` matches no node, or if no matmul runs in fp8.

        The second error is raised only if the device can multiply fp8, or if the preset asks for fp8 even where it costs time. If the user
        asked for an accuracy, which may keep every matmul in fp32, the plan gets a note instead of this error.
        """
        asked = self.options.products
        if asked is None or self.policy.products is None:
            return
        plans = [part for region in self.regions for part in region.plan.flat("")]
        asked.check("node", (node.name for plan in plans for node in plan.nodes))
        weighed = [gemm for plan in plans for product in plan.quantised.products for gemm in product.gemms]
        if any(gemm.fp8 for gemm in weighed) or not (self._row(self._device()).fp8 or not asked.preset.priced):
            return
        if self.options.keep_high is not None:
            self.note(f"products={asked.name!r} runs nothing in fp8: the accuracy that was asked for keeps the products in fp32")
            return
        reasons = Counter(gemm.reason for gemm in weighed).most_common()
        counted = "; ".join(f"{count} because {reason.value}" for reason, count in reasons)
        why = counted or "the graphs have no low product of rows and a matrix"
        raise PolicyError(
            f"products={asked.name!r} runs none of {len(weighed)} GEMMs in fp8: {why}. Leave products= out, try 'fp8-safe', whose copies "
            "cost less, or backend='inductor', or ask for some at any price: products={'preset': 'fp8-safe', 'module:encoder.*': 'fp8'}"
        )

    def _check_wide(self) -> None:
        """Raise PolicyError if an override asks for wide products (matmuls with bf16 operands and fp32 result) but matches no matmul."""
        policy, parts = self.policy, [part for region in self.regions for part in region.plan.flat("")]
        wide = [node for part in parts for node in part.nodes if node.name in part.edited(Edit.WIDE_PRODUCT)]
        for asked in policy.overrides if policy.low is BASE else ():
            if asked.word == WIDE and not any(asked.matches_node(node.name) or asked.matches_module(node.module) for node in wide):
                raise PolicyError(
                    f"overrides[{shown(asked.key)}] asks for wide products, and no product of rows and a matrix in fp32 is there: name the "
                    "module or node of a linear layer; print(amp.plan) lists them"
                )

    def _check_overrides(self) -> None:
        """Raise PolicyError if an override names a node that is in no captured graph.

        Warn if an override names a module, and no captured graph has an op of this module with fp32 values.
        """
        self._check_node_overrides()
        plans = [part for region in self.regions for part in region.plan.flat("")]
        modules = {node.module for plan in plans for node in plan.nodes if node.role == "op" and node.colour is not Colour.PLAIN}
        for asked in (each for each in self.options.overrides if each.scope == "module"):
            if not any(map(asked.matches_module, modules)):
                self.warn_once(
                    f"overrides[{shown(asked.key)}] decides nothing so far: the graphs have no op with fp32 values of that module. It did "
                    "not run, runs as written (plan.skipped), or only holds weights that other modules read; print(amp.plan) lists all ops"
                )

    def _check_node_overrides(self) -> None:
        if any(override.scope == "node" for override in self.options.overrides):
            plans = (part for region in self.regions for part in region.plan.flat(""))
            self.policy.check("node", (node.name for plan in plans for node in plan.nodes))

    def _say_failures(self, entry: Entry, ran: tuple[Region, ...], failures: list[Failure]) -> None:
        """Add `failures`, the code that Dynamo failed to capture in a call of `entry`, to `plan.skipped`. Warn once for each place.

        `ran`: the rewritten graphs that ran in the call. If there are none, the warning says that all of the entry ran in fp32.
        """
        what = "has code that runs as it is written, in fp32 around its modules" if ran else "ran in fp32"
        for failure in dict.fromkeys(failures):
            where = f" ({failure.place})" if failure.place else ""
            message = f"{entry.place} {what}: {one_line(failure.why)}{where}"
            self._left_out(entry, message, failure.place, failure.place)

    def _not_all_ran(self, entry: Entry, ran: tuple[Region, ...], said: str) -> None:
        """Warn that Dynamo ran original code in a call of a module (`entry`), unless this is expected, as for a module without tensor ops.

        If no graph of the module itself ran, make its next call capture anew, at most FRESH_STARTS times in a row.
        `ran`: the rewritten graphs that ran in the call, including graphs of submodules. `said`: Dynamo's reasons, or "".
        """
        switched_off = dynamo.why_switched_off()
        own = any(region.place == entry.place for region in ran)
        if not (switched_off or said) and (own or (not ran and entry.graphs.empty)):
            return  # nothing is wrong: another thread is capturing, or the entry has no tensor op to rewrite
        if own and self.runs_recurrent_eagerly and said.startswith(dynamo.RECURRENT):
            self.note(dynamo.RUNS_RECURRENT)
            return
        if entry.graphs.full and not switched_off:
            self._left_out(entry, past_the_limit(entry))
            return
        why = switched_off or said or "Dynamo captured no graph of it (a frame it skips, or no tensor op inside)"
        what = "has code that runs as it is written, in fp32 around its modules" if ran else "ran in fp32"
        sharded = sharded_inside(self.root, entry.path)
        if not (switched_off or own) and entry.fresh_starts < FRESH_STARTS:
            entry.fresh_starts += 1
            entry.graphs.anew = entry.graphs.anew or Anew.ORIGINAL_CODE
        self._left_out(entry, f"{entry.place} {what}: {why}{sharded}", f"{what}: {why}{bool(sharded)}")

    def _left_out(self, entry: Entry, message: str, cause: str = "", place: str = "") -> None:
        """Add code that ran in fp32, outside of rewritten graphs, to the list `plan.skipped`, and warn once for each cause.

        `cause` identifies the warning; "" stands for `message` itself. `place` names the code; "" stands for the path of the entry.
        """
        entry.graphs.left_out[message] = Skipped(place or entry.path or "the model", message)
        self.warn_fp32(message, cause)

    def freeze(self, frozen: tuple[str, ...] | None) -> None:
        """Drop every graph, and the low copies of weights that are kept between calls, so that the next calls capture anew.

        Call this after weights were frozen (stored in the low format) or unfrozen. `frozen`: names of the fp32 parameters that required
        gradients before freezing; None after unfreezing.
        """
        hook_states(self.root, frozen is not None)
        self.options = replace(self.options, frozen=frozen)
        self.notes = {text: None for text in self.notes if not text.startswith(FROZEN)}
        if frozen is not None:
            self.note(frozen_weights_note(self.root))
        self.cache.clear()
        with self.lock:
            self.last = ()
            for entry in list(self.entries.values()):
                entry.capture_anew(Anew.FROZEN)

    def thaw(self, values: Mapping[str, Any] | None = None) -> list[str]:
        """Make a frozen model an fp32 model again, and return the names of the weights whose values stay rounded.

        `values`: a state dict with the fp32 values. If it is None, each weight gets the fp32 values that it kept, or its low values cast to
        fp32. Raises PlanError if `values` lacks a frozen weight or has it in another shape.
        """
        rounded = unfreeze_weights(self.root, self.options.frozen or (), values)
        self.freeze(None)
        return rounded

    def generates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Return the context manager for a call of `generate()`: its steps have dynamic sizes, and may store KV caches in bf16."""
        return self.state.generates(self.caches.of_call(self.policy.low, args, kwargs))

    # -- report the plan ---------------------------------------------------------------
    @property
    def left_out(self) -> tuple[Skipped, ...]:
        """The pieces of code that ran in fp32 outside of rewritten graphs, with reasons. They are modules that Dynamo can never capture,
        and code of a module that its current graphs leave out."""
        return tuple(self.unreadable) + tuple(part for graphs in self.graphs for part in graphs.left_out.values())

    def plan_of(self, regions: Iterable[Region]) -> ModelPlan:
        """Return the plan of the rewritten graphs `regions`. A graph that occurs several times is listed once."""
        return self._plan([region.weighed() for region in dict.fromkeys(regions)])

    def plan_of_all(self) -> ModelPlan:
        """Return the plan of all graphs that have run, in the order of their first calls.

        Of graphs that differ only in sizes or in training mode, the plan has only the first. A note gives the number of the rest.
        """
        ran = [region.weighed() for region in dict.fromkeys(region for call in (*self.calls, self.last) for region in call)]
        shown = each_once(ran)
        more = len(ran) - len(shown)
        alike = f"{more} more graph{'s' * (more > 1)} ran the same ops in the same colours, at other sizes or in another mode"
        return self._plan(shown, *[f"{alike}: amp.plans has each"] * (more > 0))

    def _plan(self, plans: Sequence[RegionPlan], *notes: str) -> ModelPlan:
        regions = tuple(part for index, plan in enumerate(plans) for part in plan.flat(f"graph{index}"))
        ops = {node.op for part in regions for node in part.nodes}
        # no warning: a general rule, such as fp32 for every softmax, is fine for a model without a softmax
        unused = [each for each in self.options.overrides if each.scope == "op" and each.pattern not in ops]
        return ModelPlan(
            low=self.policy.low.name,
            regions=regions,
            skipped=self.left_out,
            notes=(*self.notes, *notes, *(f"overrides[{shown(each.key)}] decides nothing here: no graph has this op" for each in unused)),
            lists=lists if isinstance(lists := self.options.lists, str) else lists.name,
        )


def enter(session: Session, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the module at `path`. Calls of a rewritten model, and of its submodules outside of graphs, run through this function.

    The user's torch.compile breaks its graph here, because it must not capture the model into its own graph. A call with inputs on the meta
    device, which only asks for shapes (`asks_shapes`), runs as written.
    """
    if torch.compiler.is_dynamo_compiling() or dynamo.at_work():
        refuse_whole_graph(type(session.root).__name__)
        return _enter_alone(session, path, args, kwargs)
    if asks_shapes(session.root, args, kwargs):
        return session.entries[path].function(*args, **kwargs)
    if session.state.generating:
        return session.step(session.entries[path], args, kwargs)
    return session.call(session.entries[path], args, kwargs)


@torch.compiler.disable(reason=DOOR_REASON)  # type: ignore[misc]
def _enter_alone(session: Session, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return session.call(session.entries[path], args, kwargs)
