"""Rewrite the graphs that Dynamo captures of one model: read, plan and emit each graph.

By default an op has one colour (low or high) in all graphs. `Agreement` stores the colours, and marks graphs that must be captured anew.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
import torch.fx
from torch import nn

from amprewrite.graphs.fx.captured import Captured, put_inputs_first
from amprewrite.graphs.fx.node_facts import takes_gradients
from amprewrite.graphs.fx.ops.fp8_units import runnable
from amprewrite.graphs.fx.read.names import frame_path
from amprewrite.graphs.fx.read.reader import turns_grad_on, under_autocast
from amprewrite.graphs.fx.run.first_run import Refusals
from amprewrite.graphs.fx.uncaptured import enters_regions
from amprewrite.graphs.fx.weights.frozen_weight import stand_in_for_frozen
from amprewrite.graphs.fx.weights.weight_cache import WeightCache
from amprewrite.ir.evidence.agreed import Agreed
from amprewrite.ir.evidence.range_rules import Fit
from amprewrite.ir.evidence.ranges import Calibration, RegionRanges, parameters_fingerprint
from amprewrite.ir.pass_base import failing_as_pass
from amprewrite.ir.plans.plan import NodePlan, RegionPlan, Skipped
from amprewrite.ir.policies.policy import PadPolicy, Policy
from amprewrite.passes.driver import graph_device, read_problem, refuse_ops, rewrite_graph
from amprewrite.passes.lower.emit import Emitted, emit
from amprewrite.passes.normalise.open_grad_regions import open_compile_regions
from amprewrite.runtime.ambient.low_cache import CachesOfModel
from amprewrite.runtime.captured.entries import Anew, Entry, Graphs
from amprewrite.runtime.captured.look_ahead import LookAhead, worth_watching
from amprewrite.runtime.captured.region import CallRecord, Region, Running, scale_device
from amprewrite.runtime.compiler import dynamo
from amprewrite.runtime.compiler.dynamo_failures import under_way
from amprewrite.runtime.compiler.plain_words import own_autocast
from amprewrite.runtime.compiler.sizes import for_each_size
from amprewrite.runtime.options import is_sharded, policy_on
from amprewrite.runtime.training.loss_scale import parse_loss_scale
from amprewrite.runtime.training.training import Training
from amprewrite.runtime.weights.freezing import lost_values
from amprewrite.runtime.weights.half_values import conversion_warning, frozen_note
from amprewrite.runtime.weights.weight_reads import ReadChecks, Schedule, WeightReads, known_weights, moved, weight_reads, weights_by_path
from amprewrite.tables.boundary.members import buffers_in, named_parameters_in, parameters_in
from amprewrite.tables.devices import Device, best_format, device_row, named_device
from amprewrite.tables.errors import AmpRewriteError, AmpRewriteWarning, PlanError, PolicyError
from amprewrite.tables.formats import FP32, OUT, Format
from amprewrite.tables.vocabulary import Colour


@dataclass
class GraphRewriter(CallRecord):
    """Plans and rewrites the captured graphs of one model, and holds the state that their plans share, such as the calibration."""

    entries: dict[str, Entry] = field(default_factory=dict)
    checks: ReadChecks = field(default_factory=ReadChecks)
    children: dict[str, nn.Module | None] | None = None
    """Children of the root when modules that were added to the model were last searched for. A capture sets None: then the search is
    repeated after the running call."""

    def __post_init__(self) -> None:
        self.cache, self.calibration = WeightCache(until_step=self.options.cache_weights == "step"), self.options.calibration
        # True once a graph was planned with observed ranges, because it would have overflowed in one of its first calls (see LookAhead).
        # Exports are then planned with observed ranges, too, even if nothing overflows on their inputs.
        self.overflowed = False
        self.agreement = Agreement(self.options.parity is not None and self.options.given is None, self.options.agreed)
        low = self.options.low or best_format(self._row(self._device())) or FP32
        self.loss_scale = parse_loss_scale(self.options.loss_scale, low)
        kept = self.options.keep_high
        for text in filter(None, (kept.note if kept else "", dynamo.rounding_of(self.options.backend), frozen_note(self.root))):
            self.note(text)
        self.schedule = Schedule()
        self.caches = CachesOfModel(self.root, self.options.given, self.note)
        self._first = frozenset(map(id, parameters_in(self.root)))
        if self.loss_scale.enabled:
            _ = self.training  # make it now: the first call may run inside `optimizer.step(closure)`, which needs the optimizer's hooks

    @functools.cached_property
    def training(self) -> Training:
        """The object that scales the model's losses. It is made in `__post_init__` if there is a loss scale, otherwise when first read."""
        with self.lock:  # two threads may read this property for the first time at once, and must get the same object
            if "training" not in self.__dict__:
                self.__dict__["training"] = Training(
                    self.root, self.loss_scale, self._first, self._in_parts, self._overflowed, self.look_at_weights, self.warn_once
                )
            training: Training = self.__dict__["training"]
            return training

    def add_entry(
        self, path: str, function: Callable[..., Any], captured: bool = True, home: type[nn.Module] | None = None, key: str | None = None
    ) -> None:
        """Register the module at `path` as an entry: a module that is called from outside of graphs, and so has captured graphs of its own.

        `function` is the code that a call of the module runs: the forward of the class `home`, or other code if `home` is None. With
        `captured=False` this code runs as written. `key` is the key in `entries`, by default `path`.
        """
        key = path if key is None else key
        self.entries[key] = Entry(self, self.rewrite_region, path, function, captured, home, key)

    @property
    def graphs(self) -> list[Graphs]:
        """The captured graphs of all entries (modules that are called from outside of graphs), one `Graphs` for each entry."""
        return [entry.graphs for entry in list(self.entries.values())]

    @property
    def regions(self) -> list[Region]:
        """The rewritten graphs (regions) of all entries, without graphs that a new capture has replaced."""
        return [region for graphs in self.graphs for region in graphs.regions]

    @property
    def policy(self) -> Policy:
        """The rules for planning (low format, op lists, overrides and so on) on the device that the model is on."""
        return self.policy_for(self._device())

    def agree(self, plan: RegionPlan) -> None:
        """Add the colours (low or high) of a newly planned graph to the colours that all graphs share. A graph whose plan contradicts
        the shared colours is marked for a new capture."""
        self.agreement.join(plan, self.graphs, self.note)

    def rewrite_region(self, graphs: Graphs, module: torch.fx.GraphModule, example_inputs: list[Any]) -> Region:
        """Plan, edit and emit a captured graph, and return it as a Region, which Dynamo calls.

        A graph that cannot be rewritten stays fp32, with a warning. Raises PlanError or PolicyError if the plan or the options do not fit
        the graph, CaptureError inside torch.autocast, and under `strict` every error of the rewrite.
        """
        dynamo.refuse_ambient_autocast()
        self.warn_once(conversion_warning(self.root))
        self.children = None
        open_compile_regions(module)
        put_inputs_first(module.graph)
        stand_in_for_frozen(module.graph)
        with self.lock:
            graphs.note_break(module)
            region = self._rewritten(graphs, module, example_inputs)
            region.enters_regions = enters_regions(module.graph)
            return region

    def read_region(self, graphs: Graphs, module: torch.fx.GraphModule, example_inputs: list[Any]) -> Captured:
        """Return a captured graph with its `Problem`, the planner's input: ops, their values and the policy. Nothing is planned yet."""
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
        return captured

    def read(
        self, module: torch.fx.GraphModule, inputs: Sequence[Any], name: str, entry: str, names: tuple[str, ...],
        training: bool | None = None, may_decline: bool = True, pad: PadPolicy | None = None, scale_loss: bool = False,
    ) -> Captured:  # fmt: skip
        """Return a captured graph as a `Captured`. It holds the graph and the planner's input (`Problem`), made with this model's options.

        `training`: whether the graph records gradients. None means True if grad mode is on or the graph turns it on. `may_decline`: if the
        policy allows it, too, the graph may stay fp32 where a low format gains nothing. The other arguments are as for `read_problem`.
        """
        policy = self.policy_for(graph_device(module))
        grad = torch.is_grad_enabled() or turns_grad_on(module.graph) if training is None else training
        return read_problem(
            module, replace(policy, may_decline=policy.may_decline and may_decline), inputs=inputs, name=name, entry=entry, training=grad,
            names=names, pad=pad, fold_masks="any" if self.options.backend == "eager" else "fixed", scale_loss=scale_loss,
            calibration=self.calibration, keep_high=self.options.keep_high, agreed=self.agreement.colours, given=self.options.given,
        )  # fmt: skip

    def _rewritten(self, graphs: Graphs, module: torch.fx.GraphModule, example_inputs: list[Any]) -> Region:
        """Plan and edit a captured graph, and emit the function that runs. If planning or editing fails, emit the unedited fp32 graph.

        Under `strict`, and for a PlanError or PolicyError, the error is raised instead.
        """
        entry = graphs.entry
        compiled = self.options.backend != "eager" and entry.compiles
        backend = for_each_size(dynamo.lookup_backend(self.options.backend)) if compiled else None
        try:
            captured = self.read_region(graphs, module, example_inputs)
            rewritten, plan = rewrite_graph(captured)
            self.agree(plan)
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
            return Region(entry.place, self.training, self.checks, plan, unedited.run, None, self._reads(entry, unedited, example_inputs))
        problem, grad = captured.problem, captured.problem.training
        cache = self._cache(grad, compiled)

        def emitted(rewritten: torch.fx.GraphModule, inputs: Sequence[Any]) -> Running:
            device = scale_device(rewritten.graph) if problem.scale_loss else None
            scales = () if device is None else self.training.forward_scale(device).on(device)
            made = emit(rewritten, [*inputs, *scales], backend, cache, problem.policy.low, grad, own=not scales)
            return made.run, rewritten if scales else None, self._reads(entry, made, inputs), made.refused

        region = Region(entry.place, self.training, self.checks, plan, *emitted(rewritten, example_inputs))

        def again(inputs: tuple[Any, ...]) -> RegionPlan:  # takes `inputs`, because a closure over `example_inputs` would keep them alive
            with self.lock:
                rewritten, plan = rewrite_graph(captured)
                region.become(plan, *emitted(rewritten, inputs))
                self.agree(plan)
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
        """Return which weights the emitted graph `made` reads, and in which formats. Warn if it needs fp32 values that freezing dropped."""
        reads = weight_reads(made, inputs, self.root)
        self.warn_fp32(lost_values(self.root, reads.copies, entry.place))
        return reads

    def learn(self, regions: tuple[RegionRanges, ...]) -> Calibration:
        """Add `regions`, the value ranges that LookAhead observed in graphs, to the model's calibration, and return the calibration.

        Also set `overflowed`: a graph is planned with these ranges, so later exports of the model are planned with observed ranges, too.
        """
        with self.lock:
            old = self.calibration or Calibration("", parameters_fingerprint(self.root), 0, ())
            self.calibration, self.overflowed = old | Calibration("", old.parameters, 1, regions), True
            return self.calibration

    def _cache(self, training: bool, compiled: bool) -> WeightCache | None:
        """Return the cache from which a graph reads low copies of weights; None if the graph casts its weights anew in each call.

        A graph that records gradients (`training`) gets the cache if `cache_weights` is "step" and no compiler is used (`compiled`). A
        graph without gradients gets it unless `cache_weights` is False. But with a compiler, `cache_weights` must be "step", or the graph
        must be emitted in a block that keeps copies, such as a call of `generate()`. No graph of a model sharded by FSDP2 gets the cache.
        """
        asked = self.options.cache_weights
        wanted = asked == "step" and not compiled if training else asked and (not compiled or self.cache.block() is not None)
        if wanted and any(map(is_sharded, self.root.modules())):  # FSDP2 writes weights, but their version counters do not show it
            self.note("low copies of weights are not kept here: FSDP gathers the weights anew for every forward")
            return None
        return self.cache if wanted else None

    def weight_names(self) -> dict[int, str]:
        """Return the name of each weight, by the `id()` of the parameter. A tied weight has the last of its names."""
        return {id(weight): name for name, weight in named_parameters_in(self.root, remove_duplicate=False)}

    def _row(self, device: str) -> Device:
        """Return the row (speeds, formats) of the device to plan for: the device that the options name, or `device` if they name none."""
        return named_device(self.options.device) if self.options.device else device_row(device)

    def policy_for(self, device: str) -> Policy:
        """Return the rules for planning on `device`, such as "cuda". Note limits of the device, such as no fast bf16, in the plan."""
        kept, products = self.cache.block() is not None, self.options.products
        return policy_on(self._row(device), self.options, self.note, kept, products and runnable(products, device, self.note))

    def _in_parts(self) -> bool:
        """True if code of the model may run between the graphs of the running forward. If no forward runs, this is unknown: return True."""
        state = self.state
        if state.entry is None:
            return True
        graphs, given_up = self.entries[state.entry].graphs, dynamo.frames_given_up() - state.given_up
        graphs.in_parts |= bool(state.failures) or (given_up > 0 and given_up > (dynamo.frame_id() is not None))
        return state.depth > 1 or graphs.in_parts

    def look_at_weights(self) -> bool:
        """Mark graphs for a new capture if a weight has moved into or out of the low format's range. Warn if a weight no longer fits.

        Returns True if a graph is marked. Does nothing, and returns False, if the user gave a plan.
        """
        if self.options.given is not None:
            return False
        graphs = self.graphs
        if found := self.agreement.follow_weights(graphs, self.root, self.policy.low, self.note):
            warnings.warn(found, AmpRewriteWarning, stacklevel=2)
        return any(each.outdated for each in graphs)

    def _overflowed(self) -> str | None:
        """Called when loss scaling skips a training step. Return where the first inf or NaN of this step arose; None if this is not found.

        The cause may be a weight outside the low format's range. So the weights are also checked before the next call (`look_at_weights`).
        """
        self.schedule.due = True
        graphs = [(region.plan, region.module) for region in self.last]
        found = self.training.probe.find(graphs, self.last[0].latest if len(self.last) == 1 else None)
        if found is None:
            return None
        self.training.gate.note(**found.finite)
        return found.where

    def _device(self) -> str:
        return next((t.device.type for t in chain(parameters_in(self.root), buffers_in(self.root))), "cpu")


class Agreement:
    """The colours (low or high) of ops, which all graphs of one model share. If `on` is False, each graph is planned separately."""

    def __init__(self, on: bool, colours: Agreed) -> None:
        self.on, self.colours = on, colours

    def join(self, plan: RegionPlan, every: Sequence[Graphs], note: Callable[[str], None]) -> None:
        """Add the colours (low or high) of a newly planned graph to the colours that all graphs share.

        `every` holds the graphs of all entries. If a plan of an entry's graphs contradicts the shared colours, mark these graphs: the next
        call captures them anew. `note` is called with the reason for the mark.
        """
        before = self.colours
        for part in plan.flat("") if self.on else ():
            self.colours = self.colours.joined(part.nodes).joined_by_products(_products(part))
        for graphs in every if self.colours is not before else ():
            if graphs.anew is None and any(self._contradicts(region.plan) for region in list(graphs.regions)):
                graphs.anew = Anew.AGREED
                note("captured anew: another graph keeps high what ran low in this one, and one plan serves all graphs of the model")

    def _contradicts(self, plan: RegionPlan) -> bool:
        """True if `plan` gives an op another colour (low or high), or another decision on fp8, than the graphs of the model agreed on."""
        fp8 = self.colours.products
        return any(self.colours.contradicts(part.nodes) or (fp8 and fp8.contradicts(_products(part))) for part in plan.flat(""))

    def follow_weights(self, every: Sequence[Graphs], root: nn.Module, low: Format, note: Callable[[str], None]) -> str:
        """Mark graphs for a new capture if one of their weights moved into or out of the low format's range.

        If graphs share colours (`on`), all graphs in `every` are marked. `note` is called with a text for each of these weights. Returns a
        warning if a weight no longer fits, otherwise "".
        """
        if not any(graphs.weights for graphs in every):
            return ""
        weights = weights_by_path(root)
        found = {graphs: moved(graphs.weights, weights, low) for graphs in every if graphs.anew is None}
        said = [each for changes in found.values() for each in changes]
        for graphs in every if said else ():
            if self.on or found.get(graphs):
                graphs.anew, graphs.weights = graphs.anew or Anew.WEIGHTS, []  # forget the weights: the new capture measures them again
        if said and self.on:
            self.colours = Agreed()
        for text, _ in said:
            note(text)
        worse = [text for text, now in said if now is not Fit.FITS]
        more = f" (and {len(worse) - 1} more weights)" if worse[1:] else ""
        return f"{worse[0]}{more}; results since then may be wrong, and the next call keeps high what reads it" if worse else ""


def _products(plan: RegionPlan) -> list[NodePlan]:
    """Return copies of the nodes that the planner considered for fp8, coloured low if their forward GEMM runs in fp8, otherwise high.

    These colours stand for the decisions on fp8, so that all graphs can share them as they share the real colours.
    """
    fp8 = {each.node: each.takes(OUT) for each in plan.quantised.products}
    return [replace(node, colour=Colour.LOW if fp8[node.name] else Colour.HIGH) for node in plan.nodes if node.name in fp8]
