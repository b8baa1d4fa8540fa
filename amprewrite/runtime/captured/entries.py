"""Store the captures of each entry: its compiled functions, their rewritten graphs, and a list of the code that is in no graph.

An entry is a module that is called from outside of the model's graphs, such as the root, so that it needs graphs of its own.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from enum import Enum
from types import FunctionType
from typing import Any

import torch.fx
from torch import nn

from amprewrite.graphs.fx.captured import put_in_region
from amprewrite.graphs.fx.node_facts import forget_inputs
from amprewrite.graphs.fx.read.reader import hooked_and_written
from amprewrite.ir.plans.plan import Skipped
from amprewrite.passes.driver import graph_device
from amprewrite.passes.lower.emit import CompiledFn
from amprewrite.runtime.ambient.hook_watch import HookWatch, any_global_hook, may_differ, unseen_hooks
from amprewrite.runtime.ambient.past import CallsInRegions, Past
from amprewrite.runtime.captured.region import CallRecord, Region
from amprewrite.runtime.compiler import dynamo
from amprewrite.runtime.compiler.capture_check import CaptureCheck, can_be_checked
from amprewrite.runtime.compiler.dynamo import parameter_names
from amprewrite.runtime.compiler.dynamo_failures import Failure, try_all_again, under_way
from amprewrite.runtime.compiler.heard import regions_around
from amprewrite.runtime.compiler.plain_words import DISABLE_REASON, captured_otherwise
from amprewrite.runtime.weights.half_values import TwoDtypes, half_beside_fp32, reads_two_dtypes
from amprewrite.runtime.weights.weight_reads import Known
from amprewrite.tables.errors import CaptureError
from amprewrite.torch_internals.dispatch import current_backward, is_any_autocast_enabled
from amprewrite.torch_internals.dynamo import SkipFrame

HOOKED_INPUT = "a tensor that it is given gets a hook on its gradient and is written in place; write to a clone: x = x.clone()"
"""Reason that messages give if code sets a hook on an input and writes to the input. Such code runs as written, because Dynamo would put
the hook on the written value."""
FRESH_STARTS = 2
"""Largest number of times in a row that the graphs of a module are captured anew because none of them ran in a call."""


class Anew(Enum):
    """Reasons to drop the graphs of an entry (a module that is called from outside of graphs) and capture them anew in its next call."""

    HOOKS = "hooks on its modules came or went"
    FORWARD = "its class has another forward"
    WEIGHTS = "a weight has come into the low format's range or left it"
    AGREED = "another graph of the model keeps high what ran low in this one"
    ORIGINAL_CODE = "Dynamo ran original code in the latest call, and may capture it in the next"
    SWITCHED_ON = "Dynamo was switched off at capture, and is on"
    FAILED = "a call failed in it"
    NOT_CAPTURED = "capture failed: the entry runs as written, around its parts"
    LOW_CACHE = "the plan reads a cache of generate() in fp32"
    HALF_INPUTS = "half inputs of its calls become fp32"
    FROZEN = "the model was frozen, or is not frozen any more"


RewriteRegion = Callable[["Graphs", torch.fx.GraphModule, list[Any]], Region]
"""A function that plans, edits and emits a captured graph, and returns it as a Region. Its first argument holds the module's graphs."""


class Graphs:
    """The captures of one entry, a module that is called from outside of graphs: its compiled functions and its rewritten graphs (regions).

    `Entry.capture_anew` makes a new object. Dynamo keeps backends and compiled graphs until it is reset. So the functions that are passed
    to Dynamo refer only weakly to this object and its regions. A running call keeps its `Graphs` alive.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.regions: list[Region] = []
        self.left_out: dict[str, Skipped] = {}
        self.asleep = dynamo.disabled()
        """True if Dynamo was disabled when this object was made, so that the functions are not compiled."""
        self.weights: list[Known] = []
        """Weights whose magnitudes affected the plans of these graphs."""
        self.anew: Anew | None = None
        """The reason why the next call captures anew; None if it need not. Recomputations of earlier forwards still run these graphs."""
        self.full = False
        """True if Dynamo's limit allows no further graph for some code of the module. Calls that fit none of the graphs run as written."""
        self.empty: bool | None = None
        """True if Dynamo read all of the module's code and found no tensor op; False if it gave up the code; None if neither happened."""
        self.in_parts = not entry.captured
        """True if code of the model may run between the graphs of the module."""
        self._captures: Counter[int | None] = Counter()
        try_all_again()
        self._alone = self._compile(beside_hooks=False)

    def _compile(self, beside_hooks: bool) -> Callable[..., Any]:
        """Return the function that runs the entry: compiled by Dynamo, or uncompiled if its code runs as written (`captured` is False).

        `beside_hooks`: whether the function is for calls that run while the process has global module hooks.
        """
        entry, session = self.entry, self.entry.session
        if not entry.captured:
            return entry.function
        return dynamo.compile_afresh(
            entry.function, _weakly(self.rewrite), session.options.strict, session.root, _weakly(session.note),
            recurrent=not (entry.compiles and session.runs_recurrent_eagerly), failed=_weakly(self.failed), beside_hooks=beside_hooks,
            hooks_differ=may_differ(session.root), no_graph=_weakly(self.no_graph), around=_weakly(session.state.regions_around),
            eager=session.options.backend == "eager", starts_again=_weakly(self.starts_again),
        )  # fmt: skip

    @functools.cached_property
    def _beside_hooks(self) -> Callable[..., Any]:
        return self._compile(beside_hooks=True)

    @property
    def compiled(self) -> Callable[..., Any]:
        """The function that the next call runs. It is `_first_call` until a graph is captured.

        While the process has global module hooks, a second compiled function runs. It has no guards on these hooks: with guards, every
        `with FlopCounterMode():` would cause a new capture, because this mode registers such hooks.
        """
        if not any_global_hook():
            return self._alone if self.regions else self._first_call
        self.entry.session.warn_once(unseen_hooks())
        return self._beside_hooks

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call in which Dynamo captures the module for the first time. Return its result, and check the captured graph.

        The check runs the captured graph and the original model in fp32 after the call. If their results differ, it warns, or raises
        CaptureError under `strict`. A call is checked if `strict` is set or the low format is fp16, and if one graph ran the whole model on
        inputs that can be copied. Calls in `generate()` or a backward are not checked, and no calls of a model after `amp.freeze()`.
        """
        session, state, options = self.entry.session, self.entry.session.state, self.entry.session.options
        looked_at = self.entry.captured and (options.strict or options.low is None or options.low.narrow)
        alone = state.depth == 1 and not state.generating and options.frozen is None and current_backward() < 0
        if not (looked_at and alone and self.entry.is_own_forward and can_be_checked(session.root, args, kwargs)):
            return self._alone(*args, **kwargs)
        check = state.check = CaptureCheck(session.root, session.plain, args, kwargs)
        try:
            result = self._alone(*args, **kwargs)
        finally:
            state.check = None
        whole = len(state.ran) == 1 and state.ran[0].whole and not state.failures
        if whole and (options.strict or state.ran[0].look_ahead is not None) and (found := check.parted()):
            message = captured_otherwise(self.entry.place, *found)
            session.note(message)
            session.warn_fp32(message)
        return result

    @property
    def outdated(self) -> bool:
        """True if the graphs must be planned anew because a weight or another graph's plan changed. The model's code has not changed."""
        return self.anew in (Anew.WEIGHTS, Anew.AGREED)

    def failed(self, failure: Failure) -> None:
        """Record `failure`, code that Dynamo could not capture: the code runs as written from now on."""
        self.entry.session.state.failures.append(failure)

    def starts_again(self, inputs: Any) -> bool:
        """True if an fp32 model gets half-precision `inputs`, and the call can restart with fp32 inputs because it has run no code yet."""
        entry, session = self.entry, self.entry.session
        return not entry.widens and half_beside_fp32(session.root, inputs) and not session.state.ran and not under_way(entry.function)

    def no_graph(self, read: bool) -> None:
        """Record that Dynamo made no graph of the module's own forward. `read`: True if Dynamo read all of it, False if it gave up."""
        self.empty = read and self.empty is not False

    def leave_early_hooks(self, module: torch.fx.GraphModule) -> None:
        """If captured code sets a hook on an input that its graph overwrites, raise SkipFrame, so that Dynamo runs the code as written.

        Dynamo would set the hook only after the graph has run, on the new value. Raises CaptureError instead if the user asked for one
        graph of the whole module (`strict=True` or `fullgraph=True`).
        """
        if not hooked_and_written(module.graph, dynamo.inputs_to_hook()):
            return
        if dynamo.wants_one_graph():
            asked = "strict=True" if self.entry.session.options.strict else "fullgraph=True"
            raise CaptureError(f"{asked}, and {self.entry.place} cannot be captured whole: {HOOKED_INPUT}")
        self.failed(Failure(HOOKED_INPUT, ""))
        raise SkipFrame(HOOKED_INPUT)

    def note_break(self, module: torch.fx.GraphModule) -> None:
        """If a graph break ended the captured graph `module`, list the place and the reason in `left_out`.

        If Dynamo broke the graph at a function that is disabled for Dynamo, also warn, or raise CaptureError under `strict`.
        """
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            return
        where = reason.user_stack[-1] if reason.user_stack else None
        place = f"{where.filename}:{where.lineno} in {where.name}" if where else self.entry.place
        why = dynamo.first_line(reason.reason)
        if why == dynamo.RECURRENT and self.entry.session.runs_recurrent_eagerly:  # from torch 2.15 on, recurrent layers break the graph
            self.entry.session.note(dynamo.RUNS_RECURRENT)
            return
        self.left_out[place] = Skipped(place, f"graph break: {why}")
        # Warn only for a disabled function, because all of its code stays uncaptured. At other breaks Dynamo captures the code before and
        # after the break. Functions that this package disables (DISABLE_REASON) need no warning.
        if "disable()" in why and DISABLE_REASON not in reason.reason:
            self.entry.session.warn_fp32(f"{self.entry.place} has code that runs as it is written, in fp32: {why} ({place})")

    def rewrite(self, module: torch.fx.GraphModule, example_inputs: list[Any]) -> CompiledFn:
        """The backend that Dynamo calls: rewrite a captured graph, and return the function that runs in its place."""
        self.leave_early_hooks(module)
        if self.starts_again(example_inputs) and reads_two_dtypes(module):
            raise TwoDtypes
        frame = dynamo.frame_id()
        self._captures[frame] += 1
        reason = getattr(module, "compile_subgraph_reason", None)
        self.in_parts = self.in_parts or len(self._captures) > 1 or (reason is not None and reason.graph_break)
        if (check := self.entry.session.state.check) is not None:
            check.captures(module)
        if regions_around() > self.entry.session.state.around:  # the captured code is in an autocast region of the model
            if is_any_autocast_enabled():  # Dynamo gave up capturing the code that enters the region, so skip the functions called there
                self.entry.session.note(f"code of {self.entry.place} in an autocast region of the model runs as the region says")
                raise SkipFrame("it is in an autocast region of the model")
            put_in_region(module.graph, graph_device(module))
        region = self.entry.rewrite_region(self, module, example_inputs)
        region.whole = dynamo.is_whole(module, self.entry.function)
        forget_inputs(module.graph)
        self.regions.append(region)
        self.full = self.full or self._captures[frame] >= dynamo.RECOMPILE_LIMIT
        found, state = weakref.ref(region), self.entry.session.state

        def call(*inputs: Any) -> Any:
            region = found()
            assert region is not None, "a call keeps the graphs it runs on alive"
            state.ran.append(region)
            if state.check is not None:
                state.check.runs(inputs)
            if region.look_ahead is None and not region.enters_regions:
                return region.call_steady(inputs)
            return region.call(inputs, state.forwards)

        return call


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `method`. Dynamo keeps this function, so it refers only weakly to the object of the bound method."""
    found, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*args: Any) -> Any:
        owner = found()
        assert owner is not None, "a call keeps the graphs it runs on alive"
        return function(owner, *args)

    return call


class Entry:
    """A module that is called from outside of the model's graphs: the root, or a submodule that is captured separately or called directly.

    If `captured` is False, the entry's own code runs as written, and its parts (submodules that are captured separately) are entries, too.
    If `compiles` is False, as for an LSTM, the graphs run eagerly with every backend.
    """

    def __init__(
        self, session: CallRecord, rewrite_region: RewriteRegion, path: str, function: Callable[..., Any], captured: bool = True,
        home: type[nn.Module] | None = None, key: str = "",
    ) -> None:  # fmt: skip
        """Make the entry of the module at `path`, with key `key` in `session.entries`. Its calls run `function`, which is the forward of
        the class `home`, or other code if `home` is None. `rewrite_region` rewrites its captured graphs."""
        self.session, self.rewrite_region, self.path, self.function, self._home = session, rewrite_region, path, function, home
        self.key = key
        self.place = f"{type(session.root).__name__}{'.' * bool(path)}{path}"
        """The name of this entry in messages: "Bert" or "Bert.encoder"."""
        module = dict(session.root.named_modules()).get(path)  # None if the user took the module out of the model and calls it alone
        self.compiles = not (session.runs_recurrent_eagerly and isinstance(module, nn.RNNBase))
        self.captured = self._to_capture = captured
        self.widens = False
        """True if each call first casts its half inputs to fp32, because matmuls or convolutions read them together with fp32 weights."""
        self.names = parameter_names(function)
        self.hooks = HookWatch(session.root)
        self.fresh_starts = 0
        self.graphs = Graphs(self)
        self._past, self.regions = Past[Graphs](), CallsInRegions()

    @property
    def is_own_forward(self) -> bool:
        """True if the entry is the forward of the whole model and comes from the model's class, not from the instance."""
        return self.path == "" and self._home is not None

    @property
    def graphs_of_forward(self) -> Graphs:
        """The graphs to run: in a recomputation by a non-reentrant checkpoint the graphs of its forward, otherwise the present graphs."""
        return self._past.of_forward(self.graphs)

    def why_anew(self, recomputes: bool) -> Anew | None:
        """Return the reason why this call must capture its graphs anew; None if it may run existing graphs.

        `recomputes`: whether a backward makes the call, to repeat a forward pass. Such a call runs existing graphs, even outdated
        ones (see `graphs_of_forward`), unless hooks on modules have changed or the `forward` method was replaced.
        """
        if self.hooks.changed():
            return Anew.HOOKS
        if self._patched():
            return Anew.FORWARD
        if recomputes:
            return None
        return Anew.SWITCHED_ON if self.graphs.anew is None and self.graphs.asleep and not dynamo.disabled() else self.graphs.anew

    def _patched(self) -> bool:
        """True if the class now has another `forward` method than this entry calls. If so, make the entry call that method from now on."""
        now = None if self._home is None else self._home.forward
        if now is getattr(self.function, "__func__", None) or not isinstance(now, FunctionType):
            return False
        self.function = now.__get__(self.session.root.get_submodule(self.path))
        self.names = parameter_names(self.function)
        return True

    def capture_anew(self, why: Anew) -> None:
        """Drop the graphs, so that the next call captures them anew. New code objects keep Dynamo from reusing earlier graphs or failures.

        `why` is the reason. If it is NOT_CAPTURED, the entry runs as written until the next call of this method. If the old graphs are
        `outdated` (their plans no longer hold, but the code is unchanged), they are kept for recomputations of forwards that ran them.
        """
        self.captured = self._to_capture and why is not Anew.NOT_CAPTURED
        before, self.graphs = self.graphs, Graphs(self)
        if before.outdated:  # keep the old graphs: a checkpoint may still recompute a forward with them in its backward
            self._past.keep(before)
        # keep watching the weights of the old graphs: decisions of other graphs may depend on whether these weights fit the low format
        self.graphs.weights = list({(each.name, each.fit): each for each in before.weights}.values())
        self.session.forget_calls()


def past_the_limit(entry: Entry) -> str:
    """Return the message for a call that fits none of a module's captured graphs, when Dynamo's limit allows no further graph."""
    return (
        f"{entry.place} needs more than {dynamo.RECOMPILE_LIMIT} graphs for the variants it is called in: calls that fit none of the "
        "graphs it has run as they are written, in fp32; call it in fewer variants: pad lists to a few lengths, "
        "torch._dynamo.mark_dynamic the sizes that vary, pass numbers that vary as tensors"
    )
