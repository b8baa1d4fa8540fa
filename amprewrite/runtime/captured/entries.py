"""Entries of a rewritten model, and what each has captured: the compiled function, its graphs, and the code left out of them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from types import FunctionType
from typing import Any, Protocol

import torch.fx
from torch import nn

from amprewrite.graphs.fx.node_facts import forget_inputs
from amprewrite.graphs.fx.read.recorded_writes import hooked_and_written
from amprewrite.ir.plans.plan import Skipped
from amprewrite.passes.lower.emit import CompiledFn
from amprewrite.runtime.ambient.hook_watch import HookWatch, any_global_hook, may_differ, unseen_hooks
from amprewrite.runtime.ambient.low_cache import CacheReadHigh, LowCaches
from amprewrite.runtime.ambient.past import CallsInRegions, Past
from amprewrite.runtime.captured.region import Region, Run
from amprewrite.runtime.captured.weight_watch import Known
from amprewrite.runtime.compiler import dynamo
from amprewrite.runtime.compiler.capture_check import CaptureCheck, can_be_checked
from amprewrite.runtime.compiler.dynamo import parameter_names
from amprewrite.runtime.compiler.dynamo_failures import Failure, try_all_again
from amprewrite.runtime.compiler.growing_sizes import mark_growing
from amprewrite.runtime.compiler.plain_words import DISABLE_REASON, captured_otherwise
from amprewrite.runtime.options import Options
from amprewrite.runtime.training.forward_scale import ForwardScale
from amprewrite.tables.errors import CaptureError
from amprewrite.torch_internals.autograd import current_backward
from amprewrite.torch_internals.dynamo import SkipFrame

HOOKED_INPUT = "a tensor that it is given gets a hook on its gradient and is written in place; write to a clone: x = x.clone()"
"""Why such code runs as written: Dynamo would put the hook on the value after the write."""
FRESH_STARTS = 2
"""How often in a row an entry starts afresh because none of its graphs ran, before it is left alone."""


class Anew(Enum):
    """Why the graphs of an entry are dropped and captured anew."""

    HOOKS = "hooks on its modules came or went"
    FORWARD = "its class has another forward"
    WEIGHTS = "a weight has come into the low format's range or left it"
    AGREED = "another graph of the model keeps high what ran low in this one"
    ORIGINAL_CODE = "Dynamo ran original code in the latest call, and may capture it in the next"
    SWITCHED_ON = "Dynamo was switched off at capture, and is on"
    FAILED = "a call failed in it"
    NOT_CAPTURED = "capture failed: the entry runs as written, around its parts"
    LOW_CACHE = "the plan reads a cache of generate() in fp32"
    FROZEN = "the model was frozen, or is not frozen any more"


class Owner(Run, Protocol):
    """The members of a session that an entry uses."""

    root: nn.Module
    options: Options

    @property
    def plain(self) -> Callable[[], nn.Module]: ...

    @property
    def runs_recurrent_eagerly(self) -> bool: ...

    def rewrite_region(self, graphs: Graphs, module: torch.fx.GraphModule, example_inputs: list[Any]) -> Region: ...

    def note(self, text: str) -> None: ...

    def forget_calls(self) -> None: ...

    def warn_fp32(self, message: str, cause: str = "") -> None: ...

    def warn_once(self, message: str, cause: str = "") -> None: ...


class Graphs:
    """The captures of an entry since it last started afresh: its compiled function, and the regions that Dynamo calls from it.

    Dynamo keeps backends and compiled graphs until it is reset, so it gets weak references; a call in flight keeps its
    `Graphs` alive.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.regions: list[Region] = []
        self.left_out: dict[str, Skipped] = {}
        self.asleep = dynamo.disabled()
        self.weights: list[Known] = []
        """Weights whose sizes decisions rest on."""
        self.anew: Anew | None = None
        """Why the next call captures anew, if that was found in an earlier one. A recomputation runs what its forward ran."""
        self.full = False
        """Some frame has no room left for another graph: Dynamo runs the graphs it has, and calls that fit none of them as written."""
        self.empty: bool | None = None
        """Dynamo read all of the code for some kind of call and found no tensor op in it; False if it ever gave the code up."""
        self.in_parts = not entry.captured
        """Code of the model may run between its graphs."""
        self._captures: Counter[int | None] = Counter()
        session = entry.session
        self._alone = self._beside_hooks = entry.function
        try_all_again()
        if entry.captured:
            self._alone, self._beside_hooks = (
                dynamo.compile_afresh(
                    entry.function, _weakly(self.rewrite), session.options.strict, session.root, _weakly(session.note),
                    recurrent=not (entry.compiles and session.runs_recurrent_eagerly), failed=_weakly(self.failed),
                    beside_hooks=beside_hooks, hooks_differ=may_differ(session.root), no_graph=_weakly(self.no_graph),
                    around=_weakly(session.state.regions_around),
                )
                for beside_hooks in (False, True)
            )  # fmt: skip

    @property
    def compiled(self) -> Callable[..., Any]:
        """The function to call now: one of two, with and without hooks on all modules of the process.

        Guards against such hooks would capture anew for every `with FlopCounterMode():`.
        """
        if not any_global_hook():
            return self._alone if self.regions else self._first_call
        self.entry.session.warn_once(unseen_hooks())
        return self._beside_hooks

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        """Call, and compare the captured graph with the original model, if first calls are looked at."""
        session, state, options = self.entry.session, self.entry.session.state, self.entry.session.options
        looked_at = options.strict or options.low is None or options.low.narrow
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
        """True if decisions no longer hold, though the code is the same."""
        return self.anew in (Anew.WEIGHTS, Anew.AGREED)

    def failed(self, failure: Failure) -> None:
        """Note a failure of Dynamo: the code runs as written from here on."""
        self.entry.session.state.failures.append(failure)

    def no_graph(self, read: bool) -> None:
        """Note that the entry's own code has no graph for a kind of call, though Dynamo `read` it, or because it gave it up."""
        self.empty = read and self.empty is not False

    def leave_early_hooks(self, module: torch.fx.GraphModule) -> None:
        """Have Dynamo run the frame that it is capturing as written if it would put a hook on what the graph has written by then.

        CaptureError if the graph must be whole.
        """
        if not hooked_and_written(module.graph, dynamo.inputs_to_hook()):
            return
        if dynamo.wants_one_graph():
            asked = "strict=True" if self.entry.session.options.strict else "fullgraph=True"
            raise CaptureError(f"{asked}, and {self.entry.place} cannot be captured whole: {HOOKED_INPUT}")
        self.failed(Failure(HOOKED_INPUT, ""))
        raise SkipFrame(HOOKED_INPUT)

    def note_break(self, module: torch.fx.GraphModule) -> None:
        """Note where and why Dynamo left the graph, if it did so before its end."""
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            return
        where = reason.user_stack[-1] if reason.user_stack else None
        place = f"{where.filename}:{where.lineno} in {where.name}" if where else self.entry.place
        why = dynamo.first_line(reason.reason)
        self.left_out[place] = Skipped(place, f"graph break: {why}")
        if "disable()" in why and DISABLE_REASON not in reason.reason:  # after other breaks capture goes on with the next line
            self.entry.session.warn_fp32(f"{self.entry.place} has code that runs as it is written, in fp32: {why} ({place})")

    def rewrite(self, module: torch.fx.GraphModule, example_inputs: list[Any]) -> CompiledFn:
        """Dynamo's backend."""
        self.leave_early_hooks(module)
        frame = dynamo.frame_id()
        self._captures[frame] += 1
        reason = getattr(module, "compile_subgraph_reason", None)
        self.in_parts = self.in_parts or len(self._captures) > 1 or (reason is not None and reason.graph_break)
        if (check := self.entry.session.state.check) is not None:
            check.captures(module)
        region = self.entry.session.rewrite_region(self, module, example_inputs)
        region.whole = dynamo.is_whole(module, self.entry.function)
        forget_inputs(module.graph)
        self.regions.append(region)
        self.full = self.full or self._captures[frame] >= dynamo.RECOMPILE_LIMIT
        return _weakly(region.call)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, without keeping its object alive."""
    found, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def call(*args: Any) -> Any:
        owner = found()
        assert owner is not None, "a call keeps the graphs it runs on alive"
        return function(owner, *args)

    return call


class Entry:
    """A module that may be called from outside: the root, or a part of it.

    An entry that is not `captured` runs as written, around captured parts. Graphs of an LSTM's entry, whose `compiles` is
    False, run eagerly whatever the backend.
    """

    def __init__(
        self, session: Owner, path: str, function: Callable[..., Any], captured: bool = True, home: type[nn.Module] | None = None
    ) -> None:
        """`home` is the class that `function` was taken from, if it was not set on the module."""
        self.session, self.path, self.function, self._home = session, path, function, home
        self.compiles = not (session.runs_recurrent_eagerly and isinstance(session.root.get_submodule(path), nn.RNNBase))
        self.captured = self._to_capture = captured
        self.names = parameter_names(function)
        self.hooks = HookWatch(session.root)
        self.fresh_starts = 0
        self.graphs = Graphs(self)
        self._past, self.regions = Past[Graphs](), CallsInRegions()

    @property
    def is_own_forward(self) -> bool:
        """Whether this is the forward of the whole model, as its class has it."""
        return self.path == "" and self._home is not None

    @property
    def graphs_of_forward(self) -> Graphs:
        """The graphs to call: the recomputation of an activation checkpoint calls the graphs of its forward."""
        return self._past.of_forward(self.graphs)

    def why_anew(self, recomputes: bool) -> Anew | None:
        """Why this call captures anew; None if it runs the graphs there are."""
        if self.hooks.changed():
            return Anew.HOOKS
        if self._patched():
            return Anew.FORWARD
        if recomputes:
            return None
        return Anew.SWITCHED_ON if self.graphs.anew is None and self.graphs.asleep and not dynamo.disabled() else self.graphs.anew

    def _patched(self) -> bool:
        """True if the class has another forward by now, which is the one to capture then."""
        now = None if self._home is None else self._home.forward
        if now is getattr(self.function, "__func__", None) or not isinstance(now, FunctionType):
            return False
        self.function = now.__get__(self.session.root.get_submodule(self.path))
        self.names = parameter_names(self.function)
        return True

    def capture_anew(self, why: Anew) -> None:
        """Start with new code and a new Dynamo cache: nothing that was skipped stays skipped. The old graphs are left to recomputations."""
        self.captured = self._to_capture and why is not Anew.NOT_CAPTURED
        before, self.graphs = self.graphs, Graphs(self)
        if before.outdated:  # the code is the same: activations of its forwards may wait to be recomputed
            self._past.keep(before)
        # other graphs may have agreed with decisions for earlier values of these weights
        self.graphs.weights = list({(each.name, each.fit): each for each in before.weights}.values())
        self.session.forget_calls()

    @property
    def place(self) -> str:
        """The name of this entry in messages: "Bert" or "Bert.encoder"."""
        return f"{type(self.session.root).__name__}{'.' * bool(self.path)}{self.path}"


class State(threading.local):
    """Per thread: how deep we are in calls of one rewritten model, which of its regions ran, and this forward's loss scale."""

    def __init__(self) -> None:
        self.depth = 0
        self.transformed = 0
        """How many calls inside a transform of torch.func or a level of dual tensors are in flight."""
        self.generating = 0
        """How many calls of `generate()` are in flight."""
        self.captured = 0
        """How many of these calls run what was captured."""
        self.ran: list[Region] = []
        self.scale: ForwardScale | None = None
        self.entry: Entry | None = None
        """The outermost one under way."""
        self.forwards = 0
        """How many outermost calls have begun; those of a recomputation do not count."""
        self.given_up = 0
        """How many frames Dynamo had given up when it began."""
        self.failures: list[Failure] = []
        """Code of the call in flight that Dynamo failed on."""
        self.check: CaptureCheck | None = None
        """Compares the graph that the call in flight captures with the original model."""
        self.around = 0
        """How many regions of torch.autocast there were around the outermost call, or around the recomputation that is under way in it."""
        self.recomputed: tuple[int, int] | None = None
        """The `asking_number()` of the recomputation that the outermost call is, or that is under way in it; None if there is none."""

        self.low_caches: LowCaches | None = None
        """The low caches of the innermost call of `generate()` in flight; None if its caches stay fp32."""

    def regions_around(self) -> int:
        """How many regions of torch.autocast there are around the outermost call, or the recomputation in it."""
        return self.around

    @contextlib.contextmanager
    def recomputes(self, asked: tuple[int, int] | None, around: int) -> Iterator[None]:
        """Around a call that an activation checkpoint makes again while its forward is under way, as in a forward that takes gradients.

        The checkpoint restores autocast's state of the forward: these regions are none of the model's own.
        """
        outer = self.recomputed, self.around
        self.recomputed, self.around = asked, self.around if asked is None else around
        try:
            yield
        finally:
            self.recomputed, self.around = outer

    @contextlib.contextmanager
    def generates(self, low_caches: LowCaches | None) -> Iterator[None]:
        """Around a call of `generate()`: sizes grow, and it keeps caches low."""
        outer = self.low_caches
        self.generating, self.low_caches = self.generating + 1, low_caches
        try:
            yield
        finally:
            self.generating, self.low_caches = self.generating - 1, outer
            if low_caches is not None:
                low_caches.end()

    def step(self, call: Callable[..., Any], entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`call` an entry inside of `generate()`. If it finds a cache read in fp32 it goes on without low caches: nothing of it ran yet."""
        if self.low_caches is not None:
            self.low_caches.take(args, kwargs)
        mark_growing(args, kwargs)
        try:
            return call(entry, args, kwargs)
        except CacheReadHigh:
            entry.capture_anew(Anew.LOW_CACHE)
            if self.low_caches is not None:
                self.low_caches.end()
            self.low_caches = None
        mark_growing(args, kwargs)
        return call(entry, args, kwargs)


def past_the_limit(entry: Entry) -> str:
    """The message for a call that would need one graph more than an entry may have."""
    return (
        f"{entry.place} needs more than {dynamo.RECOMPILE_LIMIT} graphs for the variants it is called in: calls that fit none of the "
        "graphs it has run as they are written, in fp32; call it in fewer variants: pad lists to a few lengths, "
        "torch._dynamo.mark_dynamic the sizes that vary, pass numbers that vary as tensors"
    )


__all__ = ["FRESH_STARTS", "Anew", "Entry", "Graphs", "State", "past_the_limit"]
