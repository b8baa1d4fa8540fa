"""The session of a rewritten model: run the rewritten graphs in every call, and check that they ran.

Dynamo captures, guards and dispatches. It sometimes runs the original code silently: under a dispatch mode, for a frame that it skips,
past its recompile limit, or if an environment variable disables it. This file is Dynamo's backend. It also detects such cases, and makes
the call run the graphs, warns, or raises an error.

One file because every step of a call reads and writes the state of one session.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch import nn

from amprewrite.graphs.fx.captured import Captured, put_inputs_first
from amprewrite.graphs.fx.node_facts import takes_gradients
from amprewrite.graphs.fx.read.names import frame_path
from amprewrite.graphs.fx.read.reader import turns_grad_on, under_autocast
from amprewrite.graphs.fx.run.first_run import Refusals
from amprewrite.graphs.fx.weights.frozen_weight import stand_in_for_frozen
from amprewrite.graphs.fx.weights.linked_copies import block_size
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.ir.evidence.ranges import Calibration, RegionRanges, parameters_fingerprint
from amprewrite.ir.pass_base import failing_as_pass
from amprewrite.ir.plans.each_once import each_once
from amprewrite.ir.plans.plan import ModelPlan, RegionPlan, Skipped
from amprewrite.ir.policies.pad_policy import PadPolicy
from amprewrite.ir.policies.policy import Policy
from amprewrite.passes.driver import graph_device, read_problem, refuse_ops, rewrite_graph
from amprewrite.passes.lower.emit import Emitted, emit
from amprewrite.runtime.ambient.low_cache import CacheReadHigh, CachesOfModel
from amprewrite.runtime.ambient.past import asking_number
from amprewrite.runtime.captured.agreement import Agreement
from amprewrite.runtime.captured.call_record import CallRecord
from amprewrite.runtime.captured.entries import FRESH_STARTS, Anew, Entry, Graphs, past_the_limit
from amprewrite.runtime.captured.look_ahead import LookAhead, worth_watching
from amprewrite.runtime.captured.region import Region, Running, scale_device
from amprewrite.runtime.captured.weight_watch import Schedule, known_weights
from amprewrite.runtime.compiler import dynamo
from amprewrite.runtime.compiler.dynamo_failures import Failure, has_begun, under_way
from amprewrite.runtime.compiler.growing_sizes import mark_growing
from amprewrite.runtime.compiler.heard import regions_around
from amprewrite.runtime.compiler.plain_words import DOOR_REASON, own_autocast
from amprewrite.runtime.compiler.suspend_modes import without_dispatch_modes
from amprewrite.runtime.compiler.tracers import asks_shapes, refuse_tracers, refuse_whole_graph, transform_at_work, undisturbed
from amprewrite.runtime.fp8_trial import runnable
from amprewrite.runtime.options import policy_on
from amprewrite.runtime.parts import is_sharded, sharded_inside
from amprewrite.runtime.training.loss_scale import parse_loss_scale
from amprewrite.runtime.training.training import Training
from amprewrite.runtime.weights.freezing import FROZEN, frozen_weights_note, hook_states, lost_values, refuse_training, unfreeze_weights
from amprewrite.runtime.weights.half_parameters import frozen_note, lost_masters
from amprewrite.runtime.weights.low_gather import GatheredLow, RoundedRead
from amprewrite.runtime.weights.weight_reads import WeightReads, weight_reads
from amprewrite.tables.boundary.arguments import shown
from amprewrite.tables.boundary.members import buffers_in, named_parameters_in, parameters_in
from amprewrite.tables.devices import Device, best_format, device_row, named_device
from amprewrite.tables.errors import AmpRewriteError, AmpRewriteWarning, CaptureError, PlanError, PolicyError, one_line
from amprewrite.tables.formats import FP32
from amprewrite.tables.recipes import BASE, WIDE
from amprewrite.tables.vocabulary import Edit
from amprewrite.torch_internals.autograd import current_backward
from amprewrite.torch_internals.dispatch import count_dispatch_modes


@dataclass
class Session(CallRecord):
    """The state of one rewritten model at run time, and the methods that run its calls, rewrite its graphs and report its plan."""

    entries: dict[str, Entry] = field(default_factory=dict)
    cache: WeightCache = field(init=False)
    turn: threading.RLock = field(default_factory=threading.RLock)
    """Held by the running replica of torch.nn.DataParallel: the model holds the tensors of one replica at a time."""
    take_in: Callable[[], None] = field(default=lambda: None)
    """Function that rewrites the calls of modules that were added to the model after the rewrite."""
    gathered: GatheredLow = field(default_factory=GatheredLow)
    children: tuple[nn.Module | None, ...] | None = None
    """Children of the root at the latest search for new modules; None: search after this call, because it captured a graph."""

    def __post_init__(self) -> None:
        self.cache, self.calibration = WeightCache(until_step=self.options.cache_weights == "step"), self.options.calibration
        self.overflowed = False  # True once a first call overflowed: an export must then observe ranges, too, to make the same decisions
        self.agreement = Agreement(self.options.parity is not None and self.options.given is None)
        low = self.options.low or best_format(self._row(self._device())) or FP32
        loss_scale = parse_loss_scale(self.options.loss_scale, low)
        kept = self.options.keep_high
        for text in filter(None, (kept.note if kept else "", dynamo.rounding_of(self.options.backend), frozen_note(self.root))):
            self.note(text)
        self.schedule = Schedule()
        self.caches = CachesOfModel(self.root, self.options.given, self.note)
        self.training = Training(self.root, loss_scale, self._in_parts, self._overflowed, self.look_at_weights, self.warn_once)

    def add_entry(self, path: str, function: Callable[..., Any], captured: bool = True, home: type[nn.Module] | None = None) -> None:
        """Make the module at `path` an entry. `function` is the code that a call of it runs; for `captured` and `home` see Entry."""
        self.entries[path] = Entry(self, self.rewrite_region, path, function, captured, home)

    # -- calls -------------------------------------------------------------------
    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `entry` on its rewritten graphs, and return its result. Dynamo captures a graph first if none fits the inputs."""
        state, nested = self.state, self.state.depth > 0
        recomputes = current_backward() >= 0  # inside a backward, a checkpoint repeats calls, which must run the graphs of their forward
        again = recomputes and (not nested or state.recomputed != asking_number())  # true for the outermost call of a recomputation
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
                self._check_gathered(entry, ())
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
        result, ran, failures = self._run_watched(entry, recomputes, args, kwargs)
        self._check_gathered(entry, ran)
        if nested:
            state.ran.extend(ran)
        else:
            self._follow_forward(entry, ran, result)
        if not captured and not entry.graphs.left_out:
            self.note(f"granularity: the code of {entry.place} between its parts runs as it is written, in fp32")
        elif entry.captured and (failures or dynamo.frames_given_up() != given_up or entry.place not in [each.place for each in ran]):
            self._say_failures(entry, ran, failures)
            if not failures or dynamo.frames_given_up() - given_up > len(failures):
                said = (why for why in dynamo.new_reasons(reasons) if not any(why in failure.why for failure in failures))
                self._not_all_ran(entry, ran, "; ".join(said))
        return result

    def step(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of `entry` as a step of `generate()`.

        If capture finds that the plan reads a low cache in fp32, the caches become fp32, and the call begins again: none of it has run yet.
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

    def _check_gathered(self, entry: Entry, ran: tuple[Region, ...]) -> None:
        """Raise CaptureError if FSDP2 gathers weights of `entry` low, and code outside of one whole graph may have read them.

        `ran`: the regions that ran in the call.
        """
        if self.gathered.gathers:
            whole = not entry.graphs_of_forward.left_out and len(ran) == 1 and ran[0].whole and ran[0].place == entry.place
            self.gathered.check_call(entry.path, entry.place, whole)

    def _begin_forward(self, entry: Entry, recomputes: bool, given_up: int) -> None:
        """Set up the state for an outermost call. `given_up`: the number of frames that Dynamo gave up before the call."""
        state = self.state
        self.cache.look(self.weight_names)
        self._look_for_new_modules()
        state.path, state.forwards, state.given_up = entry.path, state.forwards + (not recomputes), given_up
        state.around, state.recomputed = regions_around(), asking_number() if recomputes else None
        self.training.begin_forward()

    def _run_watched(
        self, entry: Entry, recomputes: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Region, ...], list[Failure]]:
        """Run `entry`, and return its result, the regions that ran, and the failures of Dynamo in this call."""
        state, given_up, captured = self.state, dynamo.frames_given_up(), entry.captured
        outer = state.ran, state.failures
        state.ran, state.depth, state.captured = [], state.depth + 1, state.captured + captured
        failures = state.failures = []
        try:
            result = self._run(entry, entry.graphs_of_forward if recomputes else entry.graphs, args, kwargs)
            return result, tuple(state.ran), failures
        except Exception:
            if failures or (dynamo.frames_given_up() != given_up and not entry.graphs.regions):
                entry.capture_anew(Anew.FAILED)  # try a new capture next time: the inputs may have been wrong, not the code
            raise
        finally:
            (state.ran, state.failures), state.depth, state.captured = outer, state.depth - 1, state.captured - captured
            if state.depth == 0:
                self.training.end_forward()
                state.path = None

    def _follow_forward(self, entry: Entry, ran: tuple[Region, ...], result: Any) -> None:
        """Update the state after an outermost call that returned `result` and ran the regions `ran`."""
        if self.children is None:
            self._look_for_new_modules()
        self.training.await_backward(result)
        if ran != self.last:
            self._remember(entry, ran)

    def _transformed(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], why: str) -> Any:
        """Run a call as written, in fp32, because of `why`: a torch.func transform or forward-mode derivatives are active.

        Of nested calls only the outermost is listed in the plan.
        """
        if not self.state.transformed:
            message = f"{entry.place} ran in fp32: {why}"
            self._left_out(entry, message, why)
        self.state.transformed += 1
        try:
            return entry.function(*args, **kwargs)
        finally:
            self.state.transformed -= 1

    def _look_for_new_modules(self) -> None:
        """Rewrite the calls of modules that were added to the model, if the root's children changed or `children` is None.

        So a new child of the root is found before the next call, and a new module deeper in the model after the next capture.
        """
        children = tuple(self.root._modules.values())
        if self.children != children:
            self.children = children
            self.take_in()

    def _run(self, entry: Entry, graphs: Graphs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the compiled function of `graphs`. If capture fails before the code of `entry` began, run `entry` as written instead.

        Raises CaptureError if capture fails under `strict`, or half way through the code.
        """
        try:
            if count_dispatch_modes() == 0:
                return graphs.compiled(*args, **kwargs)
            with without_dispatch_modes():
                return graphs.compiled(*args, **kwargs)
        except Exception as error:
            failed = dynamo.is_capture_error(error)
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
        """Run `entry` as written after its capture failed with `error`, and warn. No code of the entry has run before.

        An error of the entry's own code reaches the caller.
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

    def _in_parts(self) -> bool:
        """True if code of the model may run between the graphs of this forward."""
        state = self.state
        if state.path is None:
            return True
        graphs, capturing = self.entries[state.path].graphs, dynamo.frame_id() is not None
        graphs.in_parts |= bool(state.failures) or dynamo.frames_given_up() - state.given_up > capturing
        return state.depth > 1 or graphs.in_parts

    def look_at_weights(self) -> bool:
        """Mark graphs for a new capture if their weights have moved into or out of the low format's range.

        Returns True if a graph is marked.
        """
        if self.options.given is not None:
            return False
        low, every = self.policy_for(self._device()).low, [entry.graphs for entry in list(self.entries.values())]
        if found := self.agreement.follow_weights(every, self.root, low, self.note):
            warnings.warn(found, AmpRewriteWarning, stacklevel=2)
        return any(graphs.outdated for graphs in every)

    def _overflowed(self) -> str | None:
        """Return the place of the first overflow in the step that is being skipped; None if it is not found."""
        self.schedule.due = True
        graphs = [(region.plan, region.module) for region in self.last]
        found = self.training.probe.find(graphs, self.last[0].latest if len(self.last) == 1 else None)
        if found is None:
            return None
        self.training.gate.note(**found.finite)
        return found.where

    def _remember(self, entry: Entry, ran: tuple[Region, ...]) -> None:
        """Store the regions `ran` as the latest call. After a call of the whole model, first check its overrides and `products=`."""
        if not ran:
            return
        if entry.path == "":
            self._check_node_overrides()
            self._check_products()
            self._check_wide()
        with self.lock:
            entry.fresh_starts = 0
            self.last = ran
            self.calls[tuple(dict.fromkeys(ran))] = None

    def _check_products(self) -> None:
        """Raise PolicyError if a rule of `products=` matches no node, or if no product runs in fp8 though the device can multiply fp8.

        If an accuracy was asked for, the second case gives a note instead.
        """
        asked = self.options.products
        if asked is None or self.policy_for(self._device()).products is None:
            return
        plans = [part for each in list(self.entries.values()) for region in each.graphs.regions for part in region.plan.flat("")]
        asked.check_nodes(node.name for plan in plans for node in plan.nodes)
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
            "cost less, or ask for some at any price: products={'preset': 'fp8-safe', 'module:encoder.*': 'fp8'}"
        )

    def _check_wide(self) -> None:
        """Raise PolicyError if an override asks for wide products (bf16 operands, fp32 result) and matches no such product."""
        policy = self.policy_for(self._device())
        regions = [part for each in list(self.entries.values()) for region in each.graphs.regions for part in region.plan.flat("")]
        wide = [node for part in regions for node in part.nodes if node.name in part.edited(Edit.WIDE_PRODUCT)]
        for asked in policy.overrides if policy.low is BASE else ():
            if asked.word == WIDE and not any(asked.matches_node(node.name) or asked.matches_module(node.module) for node in wide):
                raise PolicyError(
                    f"overrides[{shown(asked.key)}] asks for wide products, and no product of rows and a matrix in fp32 is there: name the "
                    "module or node of a linear layer; print(amp.plan) lists them"
                )

    def _check_node_overrides(self) -> None:
        """Raise PolicyError if an override names a node that no captured graph has."""
        if any(override.scope == "node" for override in self.options.overrides):
            policy = Policy(self.options.low or FP32, overrides=self.options.overrides)
            regions = (region for each in list(self.entries.values()) for region in each.graphs.regions)
            policy.check_nodes(node.name for region in regions for node in region.plan.nodes)

    def _say_failures(self, entry: Entry, ran: tuple[Region, ...], failures: list[Failure]) -> None:
        """List the code that Dynamo failed on in this call, and warn once for each cause."""
        what = "has code that runs as it is written, in fp32 around its modules" if ran else "ran in fp32"
        for failure in dict.fromkeys(failures):
            where = f" ({failure.place})" if failure.place else ""
            message = f"{entry.place} {what}: {one_line(failure.why)}{where}"
            self._left_out(entry, message, failure.place, failure.place)

    def _not_all_ran(self, entry: Entry, ran: tuple[Region, ...], said: str) -> None:
        """Report that Dynamo ran original code in a call, and let the next call capture anew if that may help.

        `ran`: the regions that ran in the call. `said`: Dynamo's reasons, "" if it gave none.
        """
        switched_off = dynamo.why_switched_off()
        own = any(region.place == entry.place for region in ran)
        if not (switched_off or said) and (own or (not ran and entry.graphs.empty)):
            return  # no fault: either another thread is capturing, or the entry has no tensor op to rewrite
        if own and self.runs_recurrent_eagerly and said.startswith(dynamo.RECURRENT):
            self.note("LSTM, GRU and RNN modules run low in graphs of their own, which no compiler gets: it would unroll them over time")
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
        """List code that ran in fp32 outside of rewritten graphs in `plan.skipped`, and warn once for each cause.

        `cause` identifies the warning; "" stands for `message` itself. `place` names the code; "" stands for the entry.
        """
        entry.graphs.left_out[message] = Skipped(place or entry.path or "the model", message)
        self.warn_fp32(message, cause)

    def freeze(self, frozen: tuple[str, ...] | None) -> None:
        """Adapt the session to a model whose weights were frozen, or unfrozen if `frozen` is None: every graph is captured anew.

        `frozen`: names of the fp32 parameters that took gradients before. Low copies of weights are dropped.
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
        """Make a frozen model an fp32 model again, and return the names of the weights that keep rounded values.

        `values`: a state dict with the fp32 values; None: low copies are cast up. Raises PlanError if `values` lack a frozen weight or have
        another shape for it.
        """
        rounded = unfreeze_weights(self.root, self.options.frozen or (), values)
        self.freeze(None)
        return rounded

    # -- capture ---------------------------------------------------------------------
    def rewrite_region(self, graphs: Graphs, module: torch.fx.GraphModule, example_inputs: list[Any]) -> Region:
        """Plan, edit and emit a captured graph, and return its region.

        A graph that cannot be rewritten stays fp32, with a warning. Raises PlanError or PolicyError if the plan or the options do not fit
        the graph, CaptureError inside torch.autocast, and under `strict` every error of the rewrite.
        """
        dynamo.refuse_ambient_autocast()
        self.warn_once(lost_masters(self.root))
        self.children = None
        put_inputs_first(module.graph)
        stand_in_for_frozen(module.graph)
        with self.lock:
            graphs.note_break(module)
            return self._rewritten(graphs, module, example_inputs)

    def read_region(self, graphs: Graphs, module: torch.fx.GraphModule, example_inputs: list[Any]) -> Captured:
        """Return a captured graph with its problem: everything that decisions read. Nothing is decided yet."""
        entry, name = graphs.entry, f"graph{len(graphs.regions)}"
        path, scale = frame_path(module.graph, example_inputs, self.root), torch.is_grad_enabled() and self.training.loss_scale.enabled
        path = entry.path if path is None else path
        with failing_as_pass(f"reading {name}"):
            captured = self.read(module, example_inputs, name, path, entry.names, pad=self.options.pad, scale_loss=scale)
        if under_autocast(module.graph, captured.problem.graph):
            self.warn_once(own_autocast(entry.place), own_autocast.__name__)
        if captured.problem.scale_loss and takes_gradients(module.graph):
            captured.know(scale_loss=False)
            captured.note("its gradients are not scaled: it takes gradients itself")
        if captured.problem.training and self._casts_at_once(entry, True, captured.problem.device):
            captured.know(block_size=block_size())
        return captured

    def read(
        self, module: torch.fx.GraphModule, inputs: Sequence[Any], name: str, entry: str, names: tuple[str, ...],
        training: bool | None = None, may_decline: bool = True, pad: PadPolicy | None = None, scale_loss: bool = False,
    ) -> Captured:  # fmt: skip
        """Return a graph of this model with its problem, by this model's options.

        `training`: the graph records gradients; None: if grad mode is on or the graph turns it on. `may_decline`: the graph may stay fp32
        if a low format gains nothing.
        """
        policy = self.policy_for(graph_device(module))
        grad = torch.is_grad_enabled() or turns_grad_on(module.graph) if training is None else training
        return read_problem(
            module, replace(policy, may_decline=policy.may_decline and may_decline), inputs=inputs, name=name, entry=entry, training=grad,
            names=names, pad=pad, fold_masks="any" if self.options.backend == "eager" else "fixed", scale_loss=scale_loss,
            calibration=self.calibration, keep_high=self.options.keep_high, agreed=self.agreement.colours, given=self.options.given,
        )  # fmt: skip

    def _rewritten(self, graphs: Graphs, module: torch.fx.GraphModule, example_inputs: list[Any]) -> Region:
        """Plan and edit a captured graph, and emit the function that runs. If planning or editing fails, emit the unedited fp32 graph."""
        entry = graphs.entry
        compiled = self.options.backend != "eager" and entry.compiles
        backend = dynamo.without_counting_backwards(dynamo.lookup_backend(self.options.backend)) if compiled else None
        try:
            captured = self.read_region(graphs, module, example_inputs)
            rewritten, plan = rewrite_graph(captured)
            self.agreement.join(plan, [each.graphs for each in list(self.entries.values())], self.note)
            self.caches.check(self.state.low_caches, plan, not self.state.ran and not under_way(entry.function))
            for left in plan.left:
                graphs.left_out[left] = Skipped(plan.name, left)
                self.warn_fp32(left)
            for text in plan.flushes:
                self.warn_once(f"{text}; compute in fp32 or bf16 there, or use dtype='bf16'")
        except AmpRewriteError as error:
            if self.options.strict or isinstance(error, PlanError | PolicyError):
                raise
            why, name = f"{type(error).__name__}: {error}", f"graph{len(graphs.regions)}"
            graphs.left_out[name] = Skipped(name, why)
            self.warn_fp32(f"{name} of {entry.place} stays fp32: {why}")
            plan = RegionPlan(name, (), (), torch.is_grad_enabled(), (f"left in fp32: {why}",), entry.path)
            self.caches.check(self.state.low_caches, plan, not self.state.ran and not under_way(entry.function))
            unedited = emit(module, example_inputs, backend, None)
            return Region(entry.place, self.training, self.gathered, plan, unedited.run, None, self._reads(entry, unedited, example_inputs))
        problem, grad = captured.problem, captured.problem.training
        at_once = self._casts_at_once(entry, grad, problem.device)
        cache = self.cache if at_once or (not grad and not compiled and self.options.cache_weights and not self._sharded()) else None

        def emitted(rewritten: torch.fx.GraphModule, inputs: Sequence[Any], plan: RegionPlan) -> Running:
            device = scale_device(rewritten.graph) if problem.scale_loss else None
            scales = () if device is None else self.training.forward_scale(device).on(device)
            made = emit(rewritten, [*inputs, *scales], backend, cache, problem.policy.low, grad, plan.gradient_blocks, at_once)
            return made.run, rewritten if scales else None, self._reads(entry, made, inputs), made.refused

        region = Region(entry.place, self.training, self.gathered, plan, *emitted(rewritten, example_inputs, plan))

        def again(inputs: tuple[Any, ...]) -> RegionPlan:  # takes inputs, because a closure over `example_inputs` would keep them alive
            with self.lock:
                rewritten, plan = rewrite_graph(captured)
                region.become(plan, *emitted(rewritten, inputs, plan))
                self.agreement.join(plan, [each.graphs for each in list(self.entries.values())], self.note)
                return plan

        def keep_high(refused: Refusals, inputs: tuple[Any, ...]) -> None:
            refuse_ops(captured, refused)
            again(inputs)
            for op, why in refused.items():
                said = f"{op} refused {problem.policy.low.name} operands ({why}): it ran in fp32 in this call, and stays fp32"
                self.warn_once(f"{entry.place}: {said}", said)

        region.keep_high = keep_high
        if worth_watching(problem):
            graphs.weights += known_weights(captured, example_inputs, self.root)
            region.look_ahead = LookAhead(captured, plan, self.learn, again, self.warn_fp32)
        return region

    def _reads(self, entry: Entry, made: Emitted, inputs: Sequence[Any]) -> WeightReads:
        """Return how an emitted graph reads the weights, and warn if it reads fp32 values that freezing dropped."""
        reads = weight_reads(made, inputs, self.root)
        self.warn_fp32(lost_values(self.root, reads.copies, entry.place))
        return reads

    def learn(self, regions: tuple[RegionRanges, ...]) -> Calibration:
        """Add the ranges of a first call that overflowed to the calibration of this session, and return the new calibration."""
        with self.lock:
            old = self.calibration or Calibration("", parameters_fingerprint(self.root), 0, ())
            self.calibration, self.overflowed = old | Calibration("", old.parameters, 1, regions), True
            return self.calibration

    def _casts_at_once(self, entry: Entry, training: bool, device: str) -> bool:
        """True if one launch casts many weights for the graphs of `entry`; False if a graph casts each weight where it reads the weight."""
        kept = self.cache.block() is not None
        return self.options.casts_at_once(entry.compiles, training, device, kept) and not self._sharded()

    def _sharded(self) -> bool:
        """True, with a note, if FSDP2 shards a module. It gathers the weights for every forward, which `_version` does not show."""
        if found := any(map(is_sharded, self.root.modules())):
            self.note("cache_weights does nothing here: FSDP gathers the weights anew for every forward")
        return found

    def weight_names(self) -> dict[int, str]:
        """Return the names of the weights by id. A tied weight has the last of its names."""
        return {id(weight): name for name, weight in named_parameters_in(self.root, remove_duplicate=False)}

    def _row(self, device: str) -> Device:
        """Return the device to plan for: the device of the options, or the table's row for `device`, which the model is on."""
        return named_device(self.options.device) if self.options.device else device_row(device)

    def policy_for(self, device: str) -> Policy:
        """Return the policy for a model on `device`, such as "cuda". A note is added if the device gains nothing from the low format."""
        kept = "step" if self.cache.block() else self.options.cache_weights
        return policy_on(self._row(device), self.options, self.note, kept, runnable(self.options.products, device, self.note))

    def generates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Return the context manager for a call of `generate()` with these arguments."""
        return self.state.generates(self.caches.of_call(self.policy_for(self._device()).low, args, kwargs))

    # -- plan ---------------------------------------------------------------------------
    @property
    def left_out(self) -> tuple[Skipped, ...]:
        """Code that ran outside the rewritten graphs, for each entry since its graphs were last captured anew."""
        return tuple(self.unreadable) + tuple(part for entry in list(self.entries.values()) for part in entry.graphs.left_out.values())

    def plan_of(self, regions: Iterable[Region]) -> ModelPlan:
        """Return the plan of the graphs of `regions`, each once."""
        return self._plan([region.plan for region in dict.fromkeys(regions)])

    def plan_of_all(self) -> ModelPlan:
        """Return the plan of all graphs that have run, in the order of their first calls.

        Of graphs that differ only in sizes or mode the plan has the first. A note gives the number of the others.
        """
        ran = [region.plan for region in dict.fromkeys(region for call in (*self.calls, self.last) for region in call)]
        shown = each_once(ran)
        more = len(ran) - len(shown)
        alike = f"{more} more graph{'s' * (more > 1)} ran the same ops in the same colours, at other sizes or in another mode"
        return self._plan(shown, *[f"{alike}: amp.plans has each"] * (more > 0))

    def _plan(self, plans: Sequence[RegionPlan], *notes: str) -> ModelPlan:
        return ModelPlan(
            low=self.policy_for(self._device()).low.name,
            regions=tuple(part for index, plan in enumerate(plans) for part in plan.flat(f"graph{index}")),
            skipped=self.left_out,
            notes=(*self.notes, *notes),
            lists=lists if isinstance(lists := self.options.lists, str) else lists.name,
        )

    def _device(self) -> str:
        return next((t.device.type for t in (*parameters_in(self.root), *buffers_in(self.root))), "cpu")


def enter(session: Session, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the entry at `path`. Every call of a rewritten model runs through this function.

    An outer torch.compile breaks its graph here, because it must not capture the model into its own graph.
    """
    if torch.compiler.is_compiling() or dynamo.at_work():
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


__all__ = ["Entry", "Graphs", "Region", "Session", "enter"]
